"""Sums of small tensors among ranks of one machine: every member gets all members' tensors, and adds them by itself.

That is more bytes than in the ring (group_ring_sums.py), and a wake-up less: below some size the time of the wake-ups
counts. The order of the additions and the precision are those of the service's kernels (the local ranks in their order;
half precision in float32, rounded once, before the division of an average), so the result has the same bits, whichever
way it takes.

Any thread; operations go in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from byteps_py.torch.engine.dtypes import is_plain
from byteps_py.torch.engine.group_work import CompletedWork, FallbackWork, GroupWork
from byteps_py.torch.engine.members import Members
from byteps_py.torch.engine.peer_collectives import span, spans
from byteps_py.torch.engine.peer_streams import PeerStreams
from byteps_py.torch.engine.ring.adding import add_up
from byteps_py.torch.engine.tensor_bytes import check_writable
from byteps_py.torch.engine.work import Call, OperationKind, Work

Tensors = Sequence[torch.Tensor]


class LocalSum(NamedTuple):
    """A sum among ranks of one machine. ``place``: of its kind, on which all members have agreed, or are about to in
    ``agreement``. ``otherwise`` begins the same through the service. ``is_awaited``: the caller is about to wait."""

    call: Call
    kind: OperationKind
    place: int
    otherwise: Callable[[], Work]
    is_awaited: bool
    agreement: GroupWork | None = None


class PeerSums:
    def __init__(self, members: Members, streams: PeerStreams) -> None:
        self._streams = streams
        self._own = members.position
        self._count = members.count

    def reduce(self, what: LocalSum, contributions: Tensors, targets: Tensors) -> FallbackWork | CompletedWork:
        """``contributions`` of all, summed to ``targets``, which are as many or none."""
        kind = what.kind
        for target in targets:
            check_writable(target)
        mine = plain(contributions)
        rooms = self._rooms(sum(tensor.numel() for tensor in mine), mine[0].dtype)

        # The result may lie where the own tensor does: the first two are read before anything is written.
        is_direct = len(targets) == 1 and is_plain(targets[0]) and self._own < 2

        def finish() -> None:
            if is_direct:
                self._sum(joined(mine), rooms, targets[0].view(-1), kind.average)
            elif targets:
                whole = joined(mine)
                total = torch.empty_like(whole)
                self._sum(whole, rooms, total, kind.average)
                lay_out(total, targets)

        streams, stream = self._streams, f"sum.{what.place}"
        receives = {position: (span(room),) for position, room in rooms.items()}
        call = what.call._replace(finish=finish, kind=kind)
        if what.is_awaited and len(mine) == 1:
            rest = streams.swap(stream, call, span(mine[0]), receives)
            if rest is None:
                return CompletedWork(streams.around, call)
            return FallbackWork(streams.fallbacks, call, rest, what.otherwise)
        work = streams.to_all(stream, call, spans(mine), receives, together=True)
        return FallbackWork(streams.fallbacks, call, work, what.otherwise)

    def reduce_scatter(self, what: LocalSum, contributions: Tensors, target: torch.Tensor) -> FallbackWork:
        """Of ``contributions``, end to end, each member gets an even share of the sum."""
        check_writable(target)
        whole = joined(plain(contributions))
        shares = whole.chunk(self._count)
        rooms = self._rooms(target.numel(), whole.dtype)

        def finish() -> None:
            total = torch.empty_like(shares[self._own])
            self._sum(shares[self._own], rooms, total, what.kind.average)
            target.copy_(total.view(target.shape))

        streams = self._streams
        receives = {position: (span(room),) for position, room in rooms.items()}
        sends = {position: (span(shares[position]),) for position in streams.others}
        call = what.call._replace(finish=finish, kind=what.kind)
        work = streams.begin(f"scattered.{what.place}", call, sends, receives, together=True)
        return FallbackWork(streams.fallbacks, call, work, what.otherwise)

    def _rooms(self, count: int, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """For what the others send, by position of the member."""
        return {position: torch.empty(count, dtype=dtype) for position in self._streams.others}

    def _sum(self, own: torch.Tensor, rooms: dict[int, torch.Tensor], total: torch.Tensor, average: bool) -> None:
        """In the order of the members, as the service's kernels add."""
        add_up([own if position == self._own else rooms[position] for position in range(self._count)], total, average)


def plain(tensors: Tensors) -> list[torch.Tensor]:
    """Contiguous, copied where they are not."""
    return [tensor if is_plain(tensor) else tensor.contiguous() for tensor in tensors]


def joined(tensors: Tensors) -> torch.Tensor:
    """End to end, as one flat tensor."""
    return tensors[0].view(-1) if len(tensors) == 1 else torch.cat([tensor.view(-1) for tensor in tensors])


def lay_out(whole: torch.Tensor, targets: Tensors) -> None:
    """Copy a flat tensor to ``targets``, one after the other."""
    first = 0
    for target in targets:
        target.copy_(whole[first : first + target.numel()].view(target.shape))
        first += target.numel()
