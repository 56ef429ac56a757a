"""Reductions with Horovod's names and arguments: allreduce, grouped_allreduce and sparse_allreduce_async.

Moves, per GPU machine and M bytes: see placement in the design; with k CPU machines beside n GPU machines
2n(n-1) / (n² + kn - 2k) · M in and as much out, whatever the number of ranks on the machine. A group travels as one
tensor per dtype and device.

All take part in every call: the same name (without one, calls are matched in order), shape, dtype, operation and
scale factors on all ranks of the process set. Any thread may call. All raise NotInitializedError outside init() …
shutdown(), UsageError (a ValueError) for misuse, and when waited for MismatchError, StallError or PeerLostError
(HorovodInternalError all of them). Tensors: dense, on cpu or cuda, of dtype float16, bfloat16, float32, float64, int8,
int16, int32, int64, uint8; bool with Min, Max and Product.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from byteps_py.errors import UsageError
from byteps_py.torch.compression import Compression
from byteps_py.torch.engine import context as contexts
from byteps_py.torch.engine.integer_averages import is_summed_wider, mean, summands
from byteps_py.torch.horovod.api import result_of, synchronize
from byteps_py.torch.horovod.gathers import allgather_async
from byteps_py.torch.horovod.ops import Adasum, Average, ReduceOp, Sum, listed
from byteps_py.torch.horovod.plans import ReductionOptions
from byteps_py.torch.horovod.process_sets import ProcessSet, global_process_set, group_of, members_of
from byteps_py.torch.horovod.reductions import start_adasum, start_reduction


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce ``tensor``; ``synchronize(handle)`` gives the result, a new tensor.

    op: Average (default), Sum, Min, Max, Product, Adasum. ``average`` is its old form (deprecated; giving both is an
    error). The factors multiply each rank's tensor before, and the result after. Averages of integers are exact,
    cut off towards zero; sums may wrap around.
    """
    options = _options_of(op, average, prescale_factor, postscale_factor, process_set)
    return _start([tensor], None, name, options)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Like allreduce_async, but the result goes into ``tensor`` when it is synchronized."""
    options = _options_of(op, average, prescale_factor, postscale_factor, process_set)
    return _start([tensor], [tensor], name, options)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce ``tensor`` in place, and return it."""
    options = _options_of(op, average, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = result_of(_start([tensor], [tensor], name, options, is_awaited=True))
    return result


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The reduction of ``tensor``; see allreduce_async. Differentiable for Sum and Average.

    >>> import torch, byteps_py as hvd
    >>> hvd.init()
    >>> hvd.allreduce(torch.tensor([1.0, 2.0]), prescale_factor=2)  # a job of one rank
    tensor([2., 4.])
    >>> hvd.shutdown()
    """
    options = _options_of(op, average, prescale_factor, postscale_factor, process_set)
    compressed, undo = compression.compress(tensor)
    (result,) = _Allreduce.apply(name, options, False, compressed)  # type: ignore[no-untyped-call]
    decompressed: torch.Tensor = compression.decompress(result, undo)
    return decompressed


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce each of ``tensors``, all or none; ``synchronize`` gives a tuple of new tensors."""
    options = _options_of(op, average, prescale_factor, postscale_factor, process_set)
    return _start(listed(tensors), None, name, options, is_group=True)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Like grouped_allreduce_async, but the results go into ``tensors`` when they are synchronized."""
    options = _options_of(op, average, prescale_factor, postscale_factor, process_set)
    return _start(listed(tensors), listed(tensors), name, options, is_group=True)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduce each of ``tensors`` in place, and return them in a tuple."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    result: tuple[torch.Tensor, ...] = result_of(handle)
    return result


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """The reductions of ``tensors``, in a list. Differentiable for Sum and Average."""
    options = _options_of(op, average, prescale_factor, postscale_factor, process_set)
    pairs = [compression.compress(tensor) for tensor in listed(tensors)]
    results = _Allreduce.apply(name, options, True, *[compressed for compressed, _ in pairs])  # type: ignore[no-untyped-call]
    return [compression.decompress(result, undo) for result, (_, undo) in zip(results, pairs, strict=True)]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begin to add up sparse COO tensors (Sum or Average): indices and values of all ranks are gathered.

    Returns a function that waits and gives the result, a sparse tensor that is not coalesced (but averages of
    integers, which are divided after they are added up).
    """
    if op not in (Sum, Average):
        raise UsageError(f"a sparse tensor can be reduced with op=Sum or op=Average, not {op!r}")
    if tensor.layout is not torch.sparse_coo:
        raise UsageError(f"tensor {name!r} is not sparse COO but {tensor.layout}; use allreduce_async for it")
    # As they are: coalescing would not lose anything, but cost a sort that the sum needs again.
    indices = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)
    members = len(members_of(process_set))

    def wait() -> torch.Tensor:
        all_values = synchronize(values)
        all_indices = synchronize(indices)
        if op is Average and is_summed_wider(tensor.dtype):
            sums = summands(all_values)
            shape = (*tensor.size(), 2) if sums.dim() > all_values.dim() else tensor.size()
            total = torch.sparse_coo_tensor(all_indices.t(), sums, shape, check_invariants=False).coalesce()
            return torch.sparse_coo_tensor(
                total.indices(),
                mean(total.values(), members, tensor.dtype, "trunc"),
                tensor.size(),
                is_coalesced=True,
                check_invariants=False,
            )
        if op is Average:
            all_values = all_values / members
        return torch.sparse_coo_tensor(
            all_indices.t(), all_values, tensor.size(), dtype=tensor.dtype, check_invariants=False
        )

    return wait


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, options: ReductionOptions, is_group: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = contexts.current(), name, options, is_group
        result = result_of(_start(tensors, None, name, options, is_group, is_awaited=True))
        return result if is_group else (result,)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        context, name, options, is_group = ctx.arguments
        if options.op not in (Sum, Average, Adasum):
            raise UsageError(
                f"allreduce with op={options.op.name.title()} is not differentiable, only Sum and Average are"
            )
        with contexts.use(context):  # autograd may run this on a thread of its own
            own = None if name is None else f"{name}.grad"
            reduced = result_of(_start(grads, None, own, options, is_group, is_awaited=True))
        return None, None, None, *(reduced if is_group else (reduced,))


def _start(
    tensors: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor] | None,
    name: str | None,
    options: ReductionOptions,
    is_group: bool = False,
    is_awaited: bool = False,
) -> int:
    if options.op is Adasum:
        return start_adasum(contexts.current(), tensors, into, name, options, is_group)
    return start_reduction(contexts.current(), tensors, into, name, options, is_group, is_awaited)


def _options_of(
    op: ReduceOp | None, average: bool | None, before: float, after: float, process_set: ProcessSet
) -> ReductionOptions:
    return ReductionOptions(
        chosen(op, average), "allreduce", group_of(process_set), before=float(before), after=float(after)
    )


def chosen(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """The operation of an allreduce. Raises UsageError if both are given."""
    if op is not None:
        if average is not None:
            raise UsageError("The op parameter supersedes average. Please provide only one of them.")
        if not isinstance(op, ReduceOp):
            raise UsageError(f"op must be one of Average, Sum, Adasum, Min, Max, Product, got {op!r}")
        return op
    if average is None:
        return Average
    warnings.warn("Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=4)
    return Average if average else Sum
