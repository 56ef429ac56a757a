"""allgather and alltoall in their forms, and allgather_object, with Horovod's names and arguments. Any thread.

Bytes per machine: see collectives/gather.py and collectives/alltoall.py. Tensors: dense, on cpu or cuda, of any dtype
but quantized ones, of 1 to 13 dimensions; ranks may differ in the first. They must not change before the operation is
synchronized.

All raise NotInitializedError outside init() … shutdown(), UsageError (a ValueError) for misuse, and when waited for
MismatchError, StallError or PeerLostError (HorovodInternalError all of them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from byteps_py.errors import CommunicationError
from byteps_py.torch.engine import context as contexts
from byteps_py.torch.horovod.allgather import start_gather
from byteps_py.torch.horovod.alltoall import Splits, start_alltoall
from byteps_py.torch.horovod.api import result_of
from byteps_py.torch.horovod.ops import Average, listed
from byteps_py.torch.horovod.pickling import NotPickledError, check_lengths, packed, unpacked
from byteps_py.torch.horovod.plans import ReductionOptions
from byteps_py.torch.horovod.process_sets import ProcessSet, global_process_set, group_of, members_of
from byteps_py.torch.horovod.reductions import start_reduction

# ---- allgather ---------------------------------------------------------------------------------------------


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin to put all ranks' tensors one after the other, along the first dimension; ``synchronize`` gives the
    result, a new tensor. The first dimension may be 0."""
    return start_gather(contexts.current(), [tensor], name, group_of(process_set))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """All ranks' tensors, one after the other. Differentiable: the gradient is the average of all ranks' for
    its rows.

    >>> import torch, byteps_py as hvd
    >>> hvd.init()
    >>> hvd.allgather(torch.tensor([[1, 2]]))  # a job of one rank
    tensor([[1, 2]])
    >>> hvd.shutdown()
    """
    (result,) = _Allgather.apply(name, process_set, False, tensor)  # type: ignore[no-untyped-call]
    gathered: torch.Tensor = result
    return gathered


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to gather each of ``tensors``, all or none; ``synchronize`` gives a tuple of new tensors."""
    return start_gather(contexts.current(), listed(tensors), name, group_of(process_set), is_group=True)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Each of ``tensors`` of all ranks, one after the other, in a tuple. Differentiable, see allgather."""
    results: tuple[torch.Tensor, ...] = _Allgather.apply(name, process_set, True, *listed(tensors))  # type: ignore[no-untyped-call]
    return results


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, is_group: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        context = contexts.current()
        ctx.arguments = context, name, process_set, [tensor.shape[:1] for tensor in tensors]
        group = group_of(process_set)
        result = result_of(start_gather(context, tensors, name, group, is_group, background=False))
        return result if is_group else (result,)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        context, name, process_set, rows = ctx.arguments
        with contexts.use(context):  # autograd may run this on a thread of its own
            members = members_of(process_set)
            own = None if name is None else f"{name}.grad"
            options = ReductionOptions(Average, "allgather.grad", group_of(process_set))
            means = result_of(start_reduction(context, grads, None, own, options, is_group=True))
            dimensions = torch.tensor([[shape[0] for shape in rows]])
            handle = start_gather(context, [dimensions], own and f"{own}.rows", group_of(process_set), background=False)
            before = result_of(handle)[: members.index(context.session.rank)].sum(0).tolist()
        mine = [mean.narrow(0, first, shape[0]) for mean, first, shape in zip(means, before, rows, strict=True)]
        return None, None, None, *mine


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's ``obj``, in a list in the order of the ranks: pickled by its rank, unpickled by the others.

    Raises CommunicationError on every rank, with the reason, if a rank can't pickle its own.
    """
    context = contexts.current()
    members = members_of(process_set)
    payload, failure = packed(obj)
    both = [torch.frombuffer(bytearray(payload), dtype=torch.uint8), torch.tensor([len(payload)])]
    own = f"allgather_object.{name or 'noname'}"
    handle = start_gather(context, both, own, group_of(process_set), is_group=True, background=False)
    data, said = result_of(handle)
    lengths = said.tolist()
    check_lengths(lengths, len(members), len(data))
    objects = []
    for rank, piece in zip(members, data.split(lengths), strict=True):
        try:
            objects.append(unpacked(piece.numpy().tobytes()))
        except NotPickledError as reason:
            raise CommunicationError(f"rank {rank} could not pickle its object to gather: {reason}") from failure
    return objects


# ---- alltoall ----------------------------------------------------------------------------------------------


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to give each rank its rows of ``tensor``; ``synchronize`` gives (rows received, received_splits).

    splits: how many rows go to each rank, in order: a list or an int32 tensor; without, all get equally many. What
    is left of the tensor goes to nobody. received_splits: int32, how many rows came from each rank.
    """
    return start_alltoall(contexts.current(), tensor, splits, name, group_of(process_set))


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The rows that the ranks have for this one, in their order; with ``splits`` (rows, received_splits), see
    alltoall_async. Differentiable: gradients go back where the rows came from."""
    return _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet) -> Any:
        context = contexts.current()
        handle = start_alltoall(context, tensor, splits, name, group_of(process_set), background=False)
        output, received = result_of(handle)
        ctx.arguments = context, received.tolist(), name, process_set, tensor.shape[:1]
        if splits is None:
            return output
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        context, received, name, process_set, (rows,) = ctx.arguments
        own = None if name is None else f"{name}.grad"
        with contexts.use(context):  # autograd may run this on a thread of its own
            handle = start_alltoall(context, grads[0], received, own, group_of(process_set), background=False)
            gradient, _ = result_of(handle)
        if gradient.shape[0] < rows:  # rows that went to nobody
            nothing = gradient.new_zeros((rows - gradient.shape[0], *gradient.shape[1:]))
            gradient = torch.cat([gradient, nothing])
        return gradient, None, None, None
