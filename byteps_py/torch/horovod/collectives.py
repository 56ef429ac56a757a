"""Broadcast, allgather, alltoall and reducescatter with Horovod's names and arguments.

All ranks of the process set make every call, with the same name (calls without a name are matched in order). A tensor
of an allgather or an alltoall must not change before the operation is synchronized. Rows of a reducescatter are divided
among the ranks in order, as evenly as possible: the first ranks get one more if the division leaves a remainder.

Bytes: of allgather and alltoall, see operations/gathers.py, of broadcast operations/broadcasts.py. A reducescatter of M
bytes moves (n-1)/n · M out of each of n machines with equal numbers of ranks, and as many in: a machine first sums its
own ranks' tensors, and the machine of the rank that gets the rows sums them.

All functions raise NotInitializedError outside init() … shutdown() and UsageError (a ValueError) for misuse. Waiting
for the result raises MismatchError, StallError or PeerLostError (each a HorovodInternalError). Any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from byteps_py.errors import UnsupportedError
from byteps_py.torch.collectives.dtypes import check_are_tensors
from byteps_py.torch.compression import Compression
from byteps_py.torch.horovod.allreduce import compressed, tensor_list
from byteps_py.torch.horovod.differentiable import broadcast_from, exchange, gather, reduce_scatter, start_broadcast_of
from byteps_py.torch.operations.gathers import Splits, start_alltoall, start_gather
from byteps_py.torch.operations.handles import result_of
from byteps_py.torch.operations.process_sets import ProcessSet, global_process_set, group_of
from byteps_py.torch.operations.reductions import Average, ReduceOp, ReductionOptions, Sum, start_reduction

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]

# ---- broadcast ---------------------------------------------------------------------------------------------


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to copy the root's ``tensor`` to all ranks. ``synchronize(handle)`` returns a new tensor.

    tensor: dense, on cpu or cuda, of any dtype; the same shape and dtype on all ranks.
    root_rank: a global rank, also with a process set.
    """
    check_are_tensors((tensor,), name)
    return start_broadcast_of(tensor, torch.empty_like(tensor, requires_grad=False), root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Like broadcast_async, but ``synchronize`` writes the result into ``tensor``."""
    return start_broadcast_of(tensor, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Copy the root's ``tensor`` into every rank's ``tensor``, and return it. See broadcast_async."""
    result: torch.Tensor = result_of(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """A copy of the root's ``tensor``. Differentiable: the root's gradient is the average of all ranks' gradients.

    tensor: dense, on cpu or cuda, of any dtype; the same shape and dtype on all ranks.
    root_rank: a global rank, also with a process set.
    Any thread may call it. Raises NotInitializedError, UsageError (a ValueError), and MismatchError, StallError or
    PeerLostError (each a HorovodInternalError).

    >>> import torch, byteps_py as hvd
    >>> hvd.init()
    >>> hvd.broadcast(torch.tensor([1, 2]), root_rank=0)  # a job of one rank
    tensor([1, 2])
    >>> hvd.shutdown()
    """
    return broadcast_from(root_rank, tensor, name, process_set)


# ---- allgather ---------------------------------------------------------------------------------------------


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin to concatenate the tensors of all ranks along the first dimension. ``synchronize(handle)`` returns the
    result, a new tensor. See allgather."""
    return start_gather([tensor], name, group_of(process_set))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensors of all ranks, concatenated along the first dimension in rank order.

    tensor: dense, on cpu or cuda, of any dtype but quantized ones, of 1 to 13 dimensions. Ranks may differ in the first
    dimension, which may be 0; the other dimensions and the dtype are the same on all ranks.
    Differentiable: a rank's gradient is the average of all ranks' gradients of its rows.
    Any thread may call it. Raises NotInitializedError, UsageError (a ValueError), and MismatchError, StallError or
    PeerLostError (each a HorovodInternalError).

    >>> import torch, byteps_py as hvd
    >>> hvd.init()
    >>> hvd.allgather(torch.tensor([[1, 2]]))  # a job of one rank
    tensor([[1, 2]])
    >>> hvd.shutdown()
    """
    check_are_tensors((tensor,), name)
    (result,) = gather([tensor], name, process_set)
    return result


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to gather each of ``tensors`` as one operation. ``synchronize(handle)`` returns a tuple of new tensors."""
    return start_gather(tensor_list(tensors), name, group_of(process_set), is_group=True)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """The allgather of each of ``tensors``, as one operation. Differentiable; see allgather."""
    return gather(tensor_list(tensors), name, process_set, is_group=True)


# ---- alltoall ----------------------------------------------------------------------------------------------


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to send each rank its rows of ``tensor``. ``synchronize(handle)`` returns (received rows, received_splits).

    splits: the number of rows for each rank, in rank order: a list or an int32 tensor; by default all ranks get equally
    many. Rows beyond the sum of the splits are not sent. received_splits: int32, the number of rows from each rank.
    """
    return start_alltoall(tensor, splits, name, group_of(process_set))


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The rows that all ranks send to this one, in rank order. With ``splits``: (rows, received_splits).

    tensor: dense, on cpu or cuda, of any dtype but quantized ones, of 1 to 13 dimensions. Ranks may differ in the first
    dimension; the other dimensions and the dtype are the same on all ranks. splits: see alltoall_async.
    Differentiable: a gradient goes back to the rank that sent the row.
    Any thread may call it. Raises NotInitializedError, UsageError (a ValueError), and MismatchError, StallError or
    PeerLostError (each a HorovodInternalError).

    >>> import torch, byteps_py as hvd
    >>> hvd.init()
    >>> hvd.alltoall(torch.tensor([1, 2, 3]), splits=[2])  # a job of one rank
    (tensor([1, 2]), tensor([2], dtype=torch.int32))
    >>> hvd.shutdown()
    """
    output, received = exchange(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


# ---- reducescatter -----------------------------------------------------------------------------------------


def reducescatter_async(
    tensor: torch.Tensor, name: str | None = None, op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Begin to reduce ``tensor`` and scatter its rows. ``synchronize(handle)`` returns this rank's rows, a new tensor.
    See reducescatter."""
    options = _options_of(op, process_set, prescale_factor, postscale_factor, [tensor], name)
    return start_reduction([tensor], None, name, options)


def reducescatter(
    tensor: torch.Tensor, name: str | None = None, compression: Any = Compression.none, op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> torch.Tensor:  # fmt: skip
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
    options = _options_of(op, process_set, prescale_factor, postscale_factor, [tensor], name)
    (result,) = compressed(compression, [tensor], lambda given: reduce_scatter(given, name, options, process_set))
    return result


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Begin the reducescatter of each of ``tensors`` as one operation. ``synchronize`` returns a tuple of tensors."""
    options = _options_of(op, process_set, prescale_factor, postscale_factor, tensor_list(tensors), name, is_group=True)
    return start_reduction(list(tensors), None, name, options)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor], name: str | None = None, compression: Any = Compression.none,
    op: ReduceOp = Average, process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:  # fmt: skip
    """This rank's rows of the reduction of each of ``tensors``, in a list. Differentiable; see reducescatter."""
    options = _options_of(op, process_set, prescale_factor, postscale_factor, tensor_list(tensors), name, is_group=True)
    return compressed(compression, tensors, lambda given: reduce_scatter(given, name, options, process_set))


def _options_of(
    op: ReduceOp, process_set: ProcessSet, before: float, after: float, tensors: Sequence[torch.Tensor],
    name: str | None, is_group: bool = False,
) -> ReductionOptions:  # fmt: skip
    if op not in (Average, Sum):
        raise UnsupportedError(f"reducescatter takes op=Average or op=Sum, got {op!r}")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise UnsupportedError(f"reducescatter: tensor {name!r} has no first dimension whose rows could be scattered")
    group = group_of(process_set)
    return ReductionOptions(op, "reducescatter", group, is_group, float(before), float(after), scatters=True)
