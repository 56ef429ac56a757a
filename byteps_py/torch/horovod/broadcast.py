"""Broadcast of one tensor: every rank gets the root's, bit by bit. Names and arguments as in Horovod. Any thread.

Bytes, for a tensor of M bytes and n machines: M out of the root's machine and M into each other machine. The other
machines pass parts on: each sends at most (n-2)/(n-1) · M.

All functions raise NotInitializedError outside init() … shutdown() and UsageError (a ValueError) for misuse. Waiting
for the result raises MismatchError, StallError or PeerLostError (each a HorovodInternalError).
"""

from __future__ import annotations

from typing import Any

import torch

from byteps_py.errors import UsageError
from byteps_py.tensors import Op, TensorSpec
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import bits_of, check_are_tensors, check_dense, check_result, wire_dtype
from byteps_py.torch.collectives.slot_view import TensorRequest
from byteps_py.torch.collectives.work import Attempt, NamedWork
from byteps_py.torch.horovod.allreduce import allreduce
from byteps_py.torch.horovod.api import rank, result_of
from byteps_py.torch.horovod.operation_names import kind_in_group, named_work, start_when_name_is_free
from byteps_py.torch.horovod.ops import Average
from byteps_py.torch.horovod.process_sets import ProcessSet, global_process_set, group_of

# ---- public functions --------------------------------------------------------------------------------------


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to copy the root's ``tensor`` to all ranks. ``synchronize(handle)`` returns a new tensor.

    tensor: dense, on cpu or cuda, of any dtype; the same shape and dtype on all ranks.
    root_rank: a global rank, also with a process set.
    """
    check_are_tensors((tensor,), name)
    return _start(tensor, torch.empty_like(tensor, requires_grad=False), root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Like broadcast_async, but ``synchronize`` writes the result into ``tensor``."""
    return _start(tensor, tensor, root_rank, name, process_set)


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
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return result


def _start(
    tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> int:
    context = contexts.current()
    request = broadcast_request(context, tensor, root_rank, name, group_of(process_set))
    return start_broadcast(context, request, tensor, output, name)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.arguments = contexts.current(), root_rank, name, process_set
        result: torch.Tensor = result_of(broadcast_async(tensor, root_rank, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        context, root_rank, name, process_set = ctx.arguments
        with contexts.use(context):  # autograd may run this on a thread of its own
            mean = allreduce(
                grads[0], op=Average, name=None if name is None else f"broadcast.{name}.grad", process_set=process_set
            )
            return mean if rank() == root_rank else torch.zeros_like(mean), None, None, None


# ---- requests and handles ----------------------------------------------------------------------------------


def check_root(context: Context, root_rank: int, group: tuple[int, ...] = ()) -> None:
    """Raises UsageError unless ``root_rank``, a global rank, is in ``group`` (empty: all ranks)."""
    size = context.session.size
    if not 0 <= root_rank < size:
        raise UsageError(f"invalid root rank: {root_rank} does not exist, ranks go from 0 to {size - 1}")
    if group and root_rank not in group:
        raise UsageError(
            f"broadcast received invalid root rank {root_rank} for provided process set of ranks {list(group)}; it is "
            "a global rank, and must be in the set"
        )


def broadcast_request(
    context: Context, tensor: torch.Tensor, root_rank: int, name: str | None, group: tuple[int, ...] = ()
) -> TensorRequest:
    """The declaration that a broadcast of ``tensor`` needs. Raises UsageError."""
    check_root(context, root_rank, group)
    check_dense(tensor, name)
    bits = bits_of(tensor)
    wire, shape = wire_dtype(bits.dtype, name), tuple(bits.shape)
    terms = "" if bits.dtype is tensor.dtype else str(tensor.dtype).removeprefix("torch.")
    kind = kind_in_group(group, "broadcast")
    if name is None:
        full_name = context.names.next(kind, (root_rank, wire, shape, terms), bits.nbytes)
    else:
        full_name = f"{kind}.{name}"
    spec = TensorSpec(full_name, wire, shape, Op.BROADCAST, root=root_rank, group=group, terms=terms)
    return TensorRequest(spec, bits.dtype, (shape,), tensor.device)


def start_broadcast(
    context: Context, request: TensorRequest, tensor: torch.Tensor, output: torch.Tensor, name: str | None
) -> int:
    """Begin to broadcast the root's ``tensor`` into ``output`` (may be the same tensor). Returns a handle."""
    check_result(output, name)

    def begin() -> NamedWork:
        (slot_view,) = context.slot_views([request])
        is_root = context.session.rank == request.spec.root
        if not is_root:
            slot_view.contribute_input()
        else:
            if output is not tensor:
                output.detach().copy_(tensor.detach())
            slot_view.contribute([bits_of(tensor)])

        def complete() -> torch.Tensor:
            slot_view.wait()
            if not is_root:
                slot_view.fetch([bits_of(output)])
            return output

        return named_work(context, request.spec.name, name is None, Attempt(lambda: slot_view.is_done, complete))

    return start_when_name_is_free(context, request.spec.name, name, begin)
