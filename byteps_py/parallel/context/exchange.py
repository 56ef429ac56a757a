"""Moves sequences between the ranks of a context-parallel group: all-gather, reduce-scatter, and one hop on a ring.

Tensors go as they are: the dtype of the caller, one collective for all tensors of a call. Any backend of
torch.distributed; one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from byteps_py.errors import UsageError
from byteps_py.parallel.collectives import all_gather_single, reduce_scatter_single


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(own rank in the group, its size); (0, 1) without a group. Raises UsageError on a rank outside the group."""
    if group is None:
        return 0, 1
    if not isinstance(group, dist.ProcessGroup | int):  # an int stands for a group without this rank
        raise UsageError(f"group is a {type(group).__name__}: give a process group, as mesh.get_group('cp'), or None")
    if isinstance(group, int) or (rank := dist.get_rank(group)) < 0:
        raise UsageError(
            f"rank {dist.get_rank()} is not in the context-parallel group: give the group that has it, or None for no "
            "context parallelism"
        )
    return rank, dist.get_world_size(group)


def all_gather_sequences(tensors: Sequence[torch.Tensor], dim: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The whole sequences of which each rank holds its two chunks along ``dim``, by one collective."""
    size = dist.get_world_size(group)
    own = torch.cat([tensor.reshape(-1) for tensor in tensors])
    gathered = own.new_empty(size * own.numel())
    all_gather_single(gathered, own, group)
    by_rank = gathered.view(size, -1).split([tensor.numel() for tensor in tensors], dim=1)
    return [
        in_order([piece.view(tensor.shape) for piece in pieces], dim)
        for pieces, tensor in zip(by_rank, tensors, strict=True)
    ]


def reduce_scatter_sequences(tensors: Sequence[torch.Tensor], dim: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """This rank's two chunks of the sums over all ranks of whole sequences, by one collective."""
    size = dist.get_world_size(group)
    pieces = [by_rank(tensor, dim, size) for tensor in tensors]
    whole = torch.cat([piece.reshape(-1) for rank in range(size) for piece in (one[rank] for one in pieces)])
    own = whole.new_empty(whole.numel() // size)
    reduce_scatter_single(own, whole, group)
    parts = own.split([one[0].numel() for one in pieces])
    return [part.view(one[0].shape) for part, one in zip(parts, pieces, strict=True)]


def in_order(by_ranks: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The whole sequence from the two chunks of each rank."""
    halves = [tensor.chunk(2, dim) for tensor in by_ranks]
    return torch.cat([*(head for head, _ in halves), *(tail for _, tail in reversed(halves))], dim)


def by_rank(tensor: torch.Tensor, dim: int, size: int) -> list[torch.Tensor]:
    """The two chunks of each rank from the whole sequence."""
    chunks = tensor.chunk(2 * size, dim)
    return [torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim) for rank in range(size)]


@dataclass(frozen=True, slots=True)
class RingHop:
    """A tensor on its way to the next rank, and one that comes from the rank before."""

    works: Sequence[dist.Work]
    sent: torch.Tensor  # kept until it has left
    received: torch.Tensor

    @classmethod
    def start(cls, tensor: torch.Tensor, group: dist.ProcessGroup, tag: int) -> RingHop:
        """All ranks call it, in one order. ``tag``: tells apart the hops that are under way together."""
        rank, size = place_in(group)
        sent, received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        send = dist.P2POp(dist.isend, sent, group=group, tag=tag, group_peer=(rank + 1) % size)
        receive = dist.P2POp(dist.irecv, received, group=group, tag=tag, group_peer=(rank - 1) % size)
        # Odd ranks receive first: a backend that carries out one operation after the other does not wait in a circle.
        return cls(dist.batch_isend_irecv([send, receive] if rank % 2 == 0 else [receive, send]), sent, received)

    def finish(self) -> torch.Tensor:
        """The tensor that the rank before has sent. Raises the errors of the backend."""
        for work in self.works:
            work.wait()
        return self.received
