"""reducescatter: each rank gets its rows of a reduction. Names and arguments as in Horovod. Any thread.

Rows are divided among the ranks in order, as evenly as possible: the first ranks get one more if the division leaves a
remainder. Each machine first sums its own ranks' tensors. Bytes per machine, for a tensor of M bytes, n machines and
equal numbers of ranks: (n-1)/n · M out and as many in; the machine of the rank that gets the rows sums them.

All functions raise NotInitializedError outside init() … shutdown() and UsageError (a ValueError) for misuse. Waiting
for the result raises MismatchError, StallError or PeerLostError (each a HorovodInternalError).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from byteps_py.errors import UnsupportedError
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.dtypes import check_are_tensors
from byteps_py.torch.compression import Compression
from byteps_py.torch.horovod.allgather import start_gather
from byteps_py.torch.horovod.api import result_of
from byteps_py.torch.horovod.ops import Average, ReduceOp, Sum, tensor_list
from byteps_py.torch.horovod.process_sets import ProcessSet, global_process_set, group_of, members_of
from byteps_py.torch.horovod.reduction_plans import ReductionOptions
from byteps_py.torch.horovod.reductions import start_reduction
from byteps_py.torch.horovod.scaling import scaled


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce ``tensor`` and scatter its rows. ``synchronize(handle)`` returns this rank's rows, a new tensor.
    See reducescatter."""
    options = _options_of(op, process_set, prescale_factor, postscale_factor, [tensor], name)
    return start_reduction(contexts.current(), [tensor], None, name, options)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the reduction of ``tensor``, a new tensor. Differentiable: gradients are gathered.

    tensor: dense, on cpu or cuda, of dtype float16, bfloat16, float32, float64, int8, int16, int32, int64 or uint8, of
    one dimension or more; the same shape and dtype on all ranks. Rows are divided in rank order, as evenly as possible;
    the first ranks get one more if the division leaves a remainder.
    op: Average or Sum. prescale_factor, postscale_factor: multiply each rank's tensor before, and the result after.
    Any thread may call it. Raises NotInitializedError, UsageError (a ValueError), and MismatchError, StallError or
    PeerLostError (each a HorovodInternalError).

    >>> import torch, byteps_py as hvd
    >>> hvd.init()
    >>> hvd.reducescatter(torch.tensor([1.0, 2.0]), op=hvd.Sum)  # a job of one rank
    tensor([1., 2.])
    >>> hvd.shutdown()
    """
    check_are_tensors((tensor,), name)
    compressed, undo = compression.compress(tensor)
    options = _options_of(op, process_set, prescale_factor, postscale_factor, [tensor], name)
    (result,) = _Reducescatter.apply(name, options, process_set, False, compressed)  # type: ignore[no-untyped-call]
    decompressed: torch.Tensor = compression.decompress(result, undo)
    return decompressed


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin the reducescatter of each of ``tensors`` as one operation. ``synchronize`` returns a tuple of tensors."""
    options = _options_of(op, process_set, prescale_factor, postscale_factor, tensor_list(tensors), name)
    return start_reduction(contexts.current(), list(tensors), None, name, options, is_group=True)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """This rank's rows of the reduction of each of ``tensors``, in a list. Differentiable; see reducescatter."""
    options = _options_of(op, process_set, prescale_factor, postscale_factor, tensor_list(tensors), name)
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = _Reducescatter.apply(name, options, process_set, True, *[tensor for tensor, _ in pairs])  # type: ignore[no-untyped-call]
    return [compression.decompress(result, undo) for result, (_, undo) in zip(results, pairs, strict=True)]


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        options: ReductionOptions,
        process_set: ProcessSet,
        is_group: bool,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = contexts.current(), name, options, process_set
        result = result_of(start_reduction(contexts.current(), tensors, None, name, options, is_group))
        return result if is_group else (result,)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        context, name, options, process_set = ctx.arguments
        grad_name = None if name is None else f"reducescatter.{name}.grad"
        with contexts.use(context):  # autograd may run this on a thread of its own
            # As in Horovod: gradients are of the average over ranks. The sum is size() times the average.
            factor = options.before * options.after * (len(members_of(process_set)) if options.op is Sum else 1)
            given = [scaled(gradient, factor) for gradient in grads]
            handle = start_gather(context, given, grad_name, options.group, is_group=True, background=False)
            return None, None, None, None, *result_of(handle)


def _options_of(
    op: ReduceOp,
    process_set: ProcessSet,
    before: float,
    after: float,
    tensors: Sequence[torch.Tensor],
    name: str | None,
) -> ReductionOptions:
    if op not in (Average, Sum):
        raise UnsupportedError(f"reducescatter takes op=Average or op=Sum, got {op!r}")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise UnsupportedError(f"reducescatter: tensor {name!r} has no first dimension whose rows could be scattered")
    group = group_of(process_set)
    return ReductionOptions(op, "reducescatter", group, before=float(before), after=float(after), scatters=True)
