"""Broadcasts of one tensor: every rank gets the root's, bit by bit. Names and arguments as in Horovod. Any thread.

Moves, of M bytes with n machines: out of the root's machine M, into each other one M, and out of these, which hand
their parts on, at most (n-2)/(n-1) · M.

All raise NotInitializedError outside init() … shutdown(), UsageError (a ValueError) for misuse, and when waited for
MismatchError, StallError or PeerLostError (HorovodInternalError all of them).
"""

from __future__ import annotations

from typing import Any

import torch

from byteps_py.torch.engine import context as contexts
from byteps_py.torch.horovod.allreduce import allreduce
from byteps_py.torch.horovod.api import rank, result_of
from byteps_py.torch.horovod.ops import Average, broadcast_request, start_broadcast
from byteps_py.torch.horovod.process_sets import ProcessSet, global_process_set, group_of


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to copy the root's ``tensor`` to all ranks; ``synchronize`` gives a new tensor.

    root_rank: a global rank, also with a process set. Any dtype; the same shape and dtype on all ranks.
    """
    return _start(tensor, torch.empty_like(tensor, requires_grad=False), root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Like broadcast_async, but the result goes into ``tensor`` when it is synchronized."""
    return _start(tensor, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Copy the root's ``tensor`` into every rank's, and return it."""
    result: torch.Tensor = result_of(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """A copy of the root's ``tensor``. Differentiable: the root's gradient is the average of all ranks'."""
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
