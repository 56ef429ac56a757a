"""reducescatter in its forms, with Horovod's names and arguments: each rank gets its rows of a reduction. Any thread.

Rows are dealt out as evenly as can be, in the order of the ranks, the lower ranks getting one more where they don't
divide. Bytes per machine: what its ranks give for others elsewhere out, what others give for its ranks in; summed where
it is needed, each machine's ranks first.

All raise NotInitializedError outside init() … shutdown(), UsageError (a ValueError) for misuse, and when waited for
MismatchError, StallError or PeerLostError (HorovodInternalError all of them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from byteps_py.errors import UnsupportedError
from byteps_py.torch.compression import Compression
from byteps_py.torch.engine import context as contexts
from byteps_py.torch.horovod.allgather import start_gather
from byteps_py.torch.horovod.api import result_of
from byteps_py.torch.horovod.ops import Average, ReduceOp, Sum, listed
from byteps_py.torch.horovod.plans import ReductionOptions
from byteps_py.torch.horovod.process_sets import ProcessSet, global_process_set, group_of, members_of
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
    """Begin to reduce ``tensor`` (Average or Sum) and to deal its rows out; ``synchronize`` gives this rank's.

    The same shape on all ranks, of one dimension or more. The factors multiply before and after.
    """
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
    """This rank's rows of the reduction; see reducescatter_async. Differentiable: the gradients are gathered.

    >>> import torch, byteps_py as hvd
    >>> hvd.init()
    >>> hvd.reducescatter(torch.tensor([1.0, 2.0]), op=hvd.Sum)  # a job of one rank
    tensor([1., 2.])
    >>> hvd.shutdown()
    """
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
    """Begin to reduce and deal out each of ``tensors``, all or none; ``synchronize`` gives a tuple of new tensors."""
    options = _options_of(op, process_set, prescale_factor, postscale_factor, listed(tensors), name)
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
    """This rank's rows of the reductions of ``tensors``, in a list. Differentiable, see reducescatter."""
    options = _options_of(op, process_set, prescale_factor, postscale_factor, listed(tensors), name)
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
        own = None if name is None else f"reducescatter.{name}.grad"
        with contexts.use(context):  # autograd may run this on a thread of its own
            # As in Horovod: gradients are of the average over ranks, of which a sum is size() times as much.
            factor = options.before * options.after * (len(members_of(process_set)) if options.op is Sum else 1)
            given = [scaled(gradient, factor) for gradient in grads]
            handle = start_gather(context, given, own, options.group, is_group=True, background=False)
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
        raise UnsupportedError(f"reducescatter: tensor {name!r} has no first dimension whose rows could be dealt out")
    group = group_of(process_set)
    return ReductionOptions(op, "reducescatter", group, before=float(before), after=float(after), scatters=True)
