"""Reductions with the names and arguments of BytePS and Horovod: push_pull, allreduce, grouped_allreduce,
sparse_allreduce_async.

Bytes per GPU machine, for tensors of M bytes, n GPU machines and k CPU machines: 2n(n-1) / (n² + kn - 2k) · M in and
as many out, for any number of ranks on the machine (docs/explanation/placement.md; BytePS, OSDI 2020, section 4.1). A
group travels as one tensor per dtype and device.

All ranks of the process set make every call, with the same name (calls without a name are matched in order), shape,
dtype, operation and scale factors. Any thread may call. Tensors are dense, on cpu or cuda, of dtype float16, bfloat16,
float32, float64, int8, int16, int32, int64 or uint8; also bool with Min, Max and Product.

All functions raise NotInitializedError outside init() … shutdown() and UsageError (a ValueError) for misuse. Waiting
for the result raises MismatchError, StallError or PeerLostError (each a HorovodInternalError).

``sparse_allreduce_async`` adds sparse tensors (COO):

    allgather of indices ─┬ few in common: allgather of values ─► add
                          └ alltoall: to owners ─ add ─ allgather of sums

``collectives/row_owners.py`` says what is few. The call sends the indices; a thread of the pool does the rest, because
what a message holds depends on the one before.
"""

from __future__ import annotations

import contextvars
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from byteps_py.errors import UsageError
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.completion import POOL
from byteps_py.torch.collectives.dtypes import check_are_tensors, check_indices
from byteps_py.torch.collectives.row_owners import (
    RowBytes,
    RowMeans,
    RowOwners,
    can_pay,
    check_numbers,
    indices_of,
    numbered,
    table_of,
)
from byteps_py.torch.compression import Compression, Compressor, compression_of
from byteps_py.torch.horovod.differentiable import reduce
from byteps_py.torch.operations.gathers import start_alltoall, start_gather
from byteps_py.torch.operations.handles import result_of
from byteps_py.torch.operations.process_sets import ProcessSet, global_process_set, group_of, members_of
from byteps_py.torch.operations.reductions import Average, ReduceOp, ReductionOptions, Sum, start_reduction

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "byteps_push_pull",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "sparse_allreduce_async",
]


# ---- push_pull ---------------------------------------------------------------------------------------------


def push_pull_async(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0, *,
    op: ReduceOp | None = None, compression: type[Compressor] | Mapping[str, Any] = Compression.none,
) -> int:  # fmt: skip
    """Begin to reduce ``tensor`` over all ranks. ``synchronize(handle)`` returns the result, a new tensor.

    tensor: dense, on cpu or cuda, of dtype float16, bfloat16, float32, float64, int8, int16, int32, int64 or uint8; the
    same shape and dtype on all ranks. A CUDA tensor must not change before ``synchronize``; a CPU tensor may change.
    average: divide the sum by size() (floor division for integers). op: Sum, Average, Min, Max or Product instead.
    name: the same on all ranks; tensors of equal shape and dtype without a name are matched in order.
    priority: tensors of higher priority are sent first. Below zero, the first quarter of a tensor is sent in the order
    of the calls, which is the same on all machines. version: BytePS's argument, without effect.
    compression: one of Compression, or a dictionary of BytePS. Those with a codec compress sums and
    averages of float32, float16 and bfloat16 between machines.
    Any thread may call it. Raises NotInitializedError and UsageError (a ValueError).
    """
    options = ReductionOptions(which_op(average, op), compression=compression_of(compression), priority=priority)
    return start_reduction([tensor], None, name, options)


def push_pull_async_inplace(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0, *,
    op: ReduceOp | None = None, compression: type[Compressor] | Mapping[str, Any] = Compression.none,
) -> int:  # fmt: skip
    """Like push_pull_async, but ``synchronize`` writes the result into ``tensor``."""
    options = ReductionOptions(which_op(average, op), compression=compression_of(compression), priority=priority)
    return start_reduction([tensor], [tensor], name, options)


byteps_push_pull = push_pull_async_inplace


def push_pull_inplace(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0, *,
    op: ReduceOp | None = None, compression: type[Compressor] | Mapping[str, Any] = Compression.none,
) -> torch.Tensor:  # fmt: skip
    """Reduce ``tensor`` over all ranks in place, and return it. See push_pull_async for the arguments."""
    options = ReductionOptions(which_op(average, op), compression=compression_of(compression), priority=priority)
    handle = start_reduction([tensor], [tensor], name, options, is_awaited=True)
    result: torch.Tensor = result_of(handle)
    return result


def push_pull(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0,
    compression: type[Compressor] | Mapping[str, Any] = Compression.none, *, op: ReduceOp | None = None,
) -> torch.Tensor:  # fmt: skip
    """The reduction of ``tensor`` over all ranks, a new tensor. Differentiable for Sum and Average.

    See push_pull_async for the arguments. Any thread may call it. Raises NotInitializedError, UsageError (a
    ValueError), and MismatchError, StallError or PeerLostError.

    >>> import torch, byteps_py as bps
    >>> bps.init()
    >>> bps.push_pull(torch.tensor([1.0, 2.0]), name="x")  # a job of one rank
    tensor([1., 2.])
    >>> bps.shutdown()
    """
    options = ReductionOptions(which_op(average, op), compression=compression_of(compression), priority=priority)
    (result,) = reduce([tensor], name, options)
    return result


# ---- allreduce ---------------------------------------------------------------------------------------------


def allreduce_async(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Begin to reduce ``tensor``. ``synchronize(handle)`` returns the result, a new tensor. See allreduce."""
    options = _options_of(op, average, prescale_factor, postscale_factor, process_set)
    return start_reduction([tensor], None, name, options)


def allreduce_async_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Like allreduce_async, but ``synchronize`` writes the result into ``tensor``. See allreduce."""
    options = _options_of(op, average, prescale_factor, postscale_factor, process_set)
    return start_reduction([tensor], [tensor], name, options)


def allreduce_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> torch.Tensor:  # fmt: skip
    """Reduce ``tensor`` in place, and return it. See allreduce."""
    options = _options_of(op, average, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = result_of(start_reduction([tensor], [tensor], name, options, is_awaited=True))
    return result


def allreduce(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:  # fmt: skip
    """The reduction of ``tensor`` over all ranks, a new tensor. Differentiable for Sum, Average and Adasum.

    tensor: dense, on cpu or cuda, of dtype float16, bfloat16, float32, float64, int8, int16, int32, int64 or uint8;
    also bool with Min, Max and Product. The same shape and dtype on all ranks.
    name: the same on all ranks; calls without a name are matched in order.
    compression: one of Compression.
    op: Average (default), Sum, Min, Max, Product or Adasum. ``average`` is its old form: deprecated, and an error
    together with ``op``. Averages of integers are exact and rounded towards zero; sums of integers may wrap around.
    prescale_factor, postscale_factor: multiply each rank's tensor before the reduction, and the result after it.
    Any thread may call it. Raises NotInitializedError, UsageError (a ValueError), and MismatchError, StallError or
    PeerLostError (each a HorovodInternalError).

    >>> import torch, byteps_py as hvd
    >>> hvd.init()
    >>> hvd.allreduce(torch.tensor([1.0, 2.0]), prescale_factor=2)  # a job of one rank
    tensor([2., 4.])
    >>> hvd.shutdown()
    """
    options = _options_of(op, average, prescale_factor, postscale_factor, process_set)
    options, compression = coded(options, compression)
    check_are_tensors((tensor,), name)
    (result,) = compressed(compression, [tensor], lambda given: reduce(given, name, options))
    return result


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Begin to reduce each of ``tensors`` as one operation. ``synchronize(handle)`` returns a tuple of new tensors."""
    options = _options_of(op, average, prescale_factor, postscale_factor, process_set, is_group=True)
    return start_reduction(tensor_list(tensors), None, name, options)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Like grouped_allreduce_async, but ``synchronize`` writes the results into ``tensors``."""
    options = _options_of(op, average, prescale_factor, postscale_factor, process_set, is_group=True)
    return start_reduction(tensor_list(tensors), tensor_list(tensors), name, options)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Reduce each of ``tensors`` in place as one operation, and return them in a tuple. See allreduce."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    result: tuple[torch.Tensor, ...] = result_of(handle)
    return result


def grouped_allreduce(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
    compression: Any = Compression.none, op: ReduceOp | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:  # fmt: skip
    """The reductions of ``tensors``, as one operation, in a list of new tensors. See allreduce."""
    options = _options_of(op, average, prescale_factor, postscale_factor, process_set, is_group=True)
    options, compression = coded(options, compression)
    return compressed(compression, tensor_list(tensors), lambda given: reduce(given, name, options))


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begin to add sparse COO tensors of all ranks, in rank order.

    op: Sum or Average. Returns a function that waits and returns the result, a new sparse tensor, coalesced. Any thread
    may call. Raises UsageError for another op or layout; the returned function raises as allreduce does.
    """
    if op not in (Sum, Average):
        raise UsageError(f"a sparse tensor can be reduced with op=Sum or op=Average, not {op!r}")
    check_are_tensors((tensor,), name)
    if tensor.layout is not torch.sparse_coo:
        raise UsageError(f"tensor {name!r} is not sparse COO but {tensor.layout}; use allreduce_async for it")
    return SparseAllreduce(name, op is Average, process_set).start(tensor)


def _options_of(
    op: ReduceOp | None, average: bool | None, before: float, after: float, process_set: ProcessSet,
    is_group: bool = False,
) -> ReductionOptions:  # fmt: skip
    which = which_allreduce_op(op, average)
    return ReductionOptions(which, "allreduce", group_of(process_set), is_group, float(before), float(after))


def which_op(average: bool, op: ReduceOp | None) -> ReduceOp:
    """The operation that the two arguments of push_pull name. Raises UsageError if they contradict each other."""
    if op is None:
        return Average if average else Sum
    if not isinstance(op, ReduceOp):
        raise UsageError(f"op must be one of Average, Sum, Min, Max, Product, got {op!r}")
    if op is Average and not average:
        raise UsageError("average=False contradicts op=Average; give one of them")
    return op


def which_allreduce_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
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


def coded(options: ReductionOptions, compression: Any) -> tuple[ReductionOptions, Any]:
    """``options``, and what is left for ``compressed`` to do: of a codec, which the services use, nothing."""
    if getattr(compression, "codec", None) is None and not isinstance(compression, Mapping):
        return options, compression
    return replace(options, compression=compression_of(compression)), Compression.none


def compressed(
    compression: Any, tensors: Sequence[torch.Tensor], run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """The results of ``run`` for ``tensors``, which travel in a smaller dtype. Differentiable if ``run`` is. Raises
    UsageError for a codec, which only sums that all ranks get may have."""
    if getattr(compression, "codec", None) is not None or isinstance(compression, Mapping):
        raise UsageError(
            f"compression {compression_of(compression).codec} is for sums and averages that all ranks get, not for a "
            "reducescatter: use Compression.none, fp16 or bf16"
        )
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = run([given for given, _ in pairs])
    return [compression.decompress(result, undo) for result, (_, undo) in zip(results, pairs, strict=True)]


def tensor_list(tensors: Any) -> list[torch.Tensor]:
    """The tensors of a group. Raises UsageError for a single tensor, whose rows are not a group, and for an object that
    is no tensor."""
    if isinstance(tensors, torch.Tensor):
        raise UsageError("a group is a list of tensors, got one tensor")
    check_are_tensors(tensors, None)
    return list(tensors)


class SparseAllreduce:
    """One sum."""

    def __init__(self, name: str, is_average: bool, process_set: ProcessSet) -> None:
        self._name = name
        self._group, self._members = group_of(process_set), members_of(process_set)
        self._how = RowMeans(len(self._members) if is_average else 0, "trunc")

    def start(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send the indices. Returns a function that waits for the result."""
        mine = tensor.detach().coalesce()
        place, table = contexts.current().session.machine_index, table_of(tensor.shape, tensor.dtype)
        facts = torch.tensor([[mine.indices().shape[1], place, table]], dtype=torch.int64, device=mine.device)
        handle = start_gather([mine.indices().t().contiguous(), facts], f"{self._name}.indices", self._group, True)
        result: Future[torch.Tensor] = Future()

        def carry_out() -> None:
            try:
                result.set_result(self._add(mine, *result_of(handle)))
            except BaseException as error:
                result.set_exception(error)

        current = contextvars.copy_context()
        POOL.run(lambda: current.run(carry_out))
        return result.result

    def _add(self, mine: torch.Tensor, every: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        """every: the indices of all ranks, [row, dimension]. facts: [rank, (rows, machine, what the table is)]."""
        values, shape = mine.values(), mine.shape
        table = tuple(shape[: mine.sparse_dim()])
        counts, machines, tables = facts.t().tolist()
        touched = []
        for rank, at in zip(self._members, every.split(counts), strict=True):
            check_indices(self._name, rank, at.t(), shape)
            touched.append(numbered(at.t(), table).cpu().numpy())
            check_numbers(self._name, rank, touched[-1], table)
        own = self._members.index(contexts.current().session.rank)
        owners = RowOwners(touched, machines, own)
        row = math.prod(values.shape[1:]) * values.itemsize
        nbytes = RowBytes(row, row)
        if len(set(tables)) == 1 and can_pay(counts, machines, nbytes) and owners.pays(nbytes):
            sums = self._sums_of_owners(owners, values, own)
        else:
            parts = self._gather(values, "values").split(counts)
            sums = self._how.combine(owners.places, parts, len(owners.rows))
        at = indices_of(torch.from_numpy(owners.rows), table).to(sums.device)
        return torch.sparse_coo_tensor(at, sums, shape, is_coalesced=True, check_invariants=False, device=sums.device)

    def _sums_of_owners(self, owners: RowOwners, values: torch.Tensor, own: int) -> torch.Tensor:
        members = range(len(self._members))
        given = [owners.given_to(p) for p in members]
        taken = [owners.taken_from(p) for p in members]
        order = torch.from_numpy(np.concatenate([rows for p, rows in enumerate(given) if p != own]))
        splits = [len(rows) if p != own else 0 for p, rows in enumerate(given)]
        name = f"{self._name}.pushed"
        handle = start_alltoall(values[order.to(values.device)], splits, name, self._group, background=False)
        received, _ = result_of(handle)
        parts = list(received.split([len(rows) if p != own else 0 for p, rows in enumerate(taken)]))
        parts[own] = values[torch.from_numpy(given[own]).to(values.device)]
        sums = self._gather(self._how.combine(taken, parts, owners.counts[own]), "sums")
        return sums[torch.from_numpy(owners.places_of_sums).to(sums.device)]

    def _gather(self, rows: torch.Tensor, what: str) -> torch.Tensor:
        found: torch.Tensor = result_of(start_gather([rows], f"{self._name}.{what}", self._group, background=False))
        return found
