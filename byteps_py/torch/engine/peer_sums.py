"""Sums among members on one machine. Of small tensors everybody gets everybody's, and adds them all by itself; of large
ones everybody adds a share (near_rings.py).

The former is more bytes, and a wake-up less: below some size it is the time of the wake-ups that counts. Where members
have to share cores, sums go through the service: it wakes fewer, and nobody waits for the last of all at every step (3
and 4 ranks on 2 cores: 4 bytes 340 to 366 instead of 447 to 459, and 441 to 463 instead of 562 to 738 µs). The order of
the additions and the precision are those of the service's kernels (the local ranks in their order; half precision in
float32, rounded once, before the division of an average), so the result has the same bits, whichever way it takes.

Any thread; operations go in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from byteps_py.tensors import Op
from byteps_py.torch.engine.dtypes import is_plain
from byteps_py.torch.engine.fallbacks import Fallback
from byteps_py.torch.engine.members import Members
from byteps_py.torch.engine.operation_kind import OperationKind
from byteps_py.torch.engine.peer_collectives import span, spans
from byteps_py.torch.engine.peer_ring_sums import NearRings, NearSum
from byteps_py.torch.engine.peer_streams import Near
from byteps_py.torch.engine.ring.adding import add_up
from byteps_py.torch.engine.ring.ring_sum import is_able
from byteps_py.torch.engine.suiting import has_cores, may_share
from byteps_py.torch.engine.work import Call, CompletedWork, Pending
from byteps_py.torch.process_group.arguments import check_writable

#: What comes from all others together. With 2 ranks on 2 cores 16 KB take 62 µs this way and 59 in shares, 32 KB 65 and
#: 62, 64 KB 82 and 67, 128 KB 91 and 70; a tensor's first sum in shares has to be agreed on.
MOST_BYTES = 32 << 10

Tensors = Sequence[torch.Tensor]


class NearSumOptions(NamedTuple):
    """``otherwise`` begins the same through the service. ``is_awaited``: the caller is about to wait for it.
    ``agreement``: what has to come before, if it goes in shares."""

    otherwise: Callable[[], Pending]
    is_awaited: bool
    agreement: Pending | None


class NearReductions:
    def __init__(self, members: Members, near: Near) -> None:
        self._near = near
        self._own = members.position
        self._count = members.count
        self._rings = NearRings(members, near)

    def finish(self) -> None:
        """Complete what is under way. Raises StallError."""
        self._rings.finish()

    def suits(self, kind: OperationKind, tensors: Tensors) -> bool:
        """All members answer alike, but for memory that is laid out unusually: theirs must be laid out alike."""
        coming = self._coming(kind, tensors)
        is_exact = tensors[0].is_floating_point() or not kind.average
        if kind.op is not Op.SUM or not is_exact or not coming or not all(tensor.is_cpu for tensor in tensors):
            return False
        if coming <= MOST_BYTES:
            return has_cores(self._count)
        return may_share(self._count, sum(tensor.nbytes for tensor in tensors)) and is_able()

    def goes_in_shares(self, kind: OperationKind, tensors: Tensors) -> bool:
        """Of what suits: everybody adds a share."""
        return self._coming(kind, tensors) > MOST_BYTES

    def _coming(self, kind: OperationKind, tensors: Tensors) -> int:
        """Bytes that come from all others, if everybody is to get all it needs for adding by itself."""
        share = self._count if kind.scatters else 1
        return sum(tensor.nbytes for tensor in tensors) * (self._count - 1) // share

    def reduce(
        self,
        place: int,
        kind: OperationKind,
        call: Call,
        contributions: Tensors,
        targets: Tensors,
        options: NearSumOptions,
    ) -> Fallback | CompletedWork:
        """``contributions`` of all, summed to ``targets``, which are as many or none."""
        for target in targets:
            check_writable(target)
        mine = _plain(contributions)
        if self.goes_in_shares(kind, contributions):
            whole = _end_to_end(mine)
            work = self._in_shares(place, kind, call, whole, whole, targets, options.agreement)
            return self._behind_a_fallback(call, work, options)
        rooms = self._rooms(sum(tensor.numel() for tensor in mine), mine[0].dtype)

        # The result may lie where the own tensor does: the first two are read before anything is written.
        is_direct = len(targets) == 1 and is_plain(targets[0]) and self._own < 2

        def finish() -> None:
            if is_direct:
                self._sum(_end_to_end(mine), rooms, targets[0].view(-1), kind.average)
            elif targets:
                whole = _end_to_end(mine)
                total = torch.empty_like(whole)
                self._sum(whole, rooms, total, kind.average)
                _lay_out(total, targets)

        near, stream = self._near, f"sum.{place}"
        receives = {position: (span(room),) for position, room in rooms.items()}
        call = call._replace(finish=finish, kind=kind)
        if options.is_awaited and len(mine) == 1:
            rest = near.swap(stream, call, span(mine[0]), receives)
            if rest is None:
                return CompletedWork(near.around, call.what, call.outputs)
            return Fallback(near.fallbacks, call, rest, options.otherwise)
        passage = near.to_all(stream, call, spans(mine), receives, together=True)
        return Fallback(near.fallbacks, call, passage, options.otherwise)

    def _in_shares(
        self,
        place: int,
        kind: OperationKind,
        call: Call,
        source: torch.Tensor,
        own: torch.Tensor,
        targets: Tensors,
        agreement: Pending | None,
    ) -> NearSum:
        """``own``: that part of ``source`` whose sum this member is to have."""
        target, finish = None, None
        # What the others are to have of this member's has to stay until they do.
        if len(targets) == 1 and is_plain(targets[0]) and (_is_same(targets[0], own) or _is_apart(targets[0], source)):
            target = targets[0].view(-1)
        elif targets:
            whole = target = torch.empty_like(own)

            def finish() -> None:
                _lay_out(whole, targets)

        return self._rings.add_up(place, kind, call._replace(finish=finish), source, target, agreement)

    def _behind_a_fallback(self, call: Call, work: NearSum, options: NearSumOptions) -> Fallback:
        fallback = Fallback(self._near.fallbacks, call, work, options.otherwise)
        if not options.is_awaited:
            fallback.go_on_by_itself()
        return fallback

    def reduce_scatter(
        self,
        place: int,
        kind: OperationKind,
        call: Call,
        contributions: Tensors,
        target: torch.Tensor,
        options: NearSumOptions,
    ) -> Fallback:
        """Of ``contributions``, end to end, each member gets an even share of the sum."""
        check_writable(target)
        whole = _end_to_end(_plain(contributions))
        shares = whole.chunk(self._count)
        if self.goes_in_shares(kind, contributions):
            own = shares[self._own]
            work = self._in_shares(place, kind, call, whole, own, [target], options.agreement)
            return self._behind_a_fallback(call, work, options)
        rooms = self._rooms(target.numel(), whole.dtype)

        def finish() -> None:
            total = torch.empty_like(shares[self._own])
            self._sum(shares[self._own], rooms, total, kind.average)
            target.copy_(total.view(target.shape))

        near, stream = self._near, f"scattered.{place}"
        receives = {position: (span(room),) for position, room in rooms.items()}
        sends = {position: (span(shares[position]),) for position in near.others}
        passage = near.begin(stream, call._replace(finish=finish, kind=kind), sends, receives, together=True)
        return Fallback(near.fallbacks, call, passage, options.otherwise)

    def _rooms(self, count: int, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """For what comes, by position of the member."""
        return {position: torch.empty(count, dtype=dtype) for position in self._near.others}

    def _sum(self, own: torch.Tensor, rooms: dict[int, torch.Tensor], total: torch.Tensor, average: bool) -> None:
        """In the order of the members, as the service's kernels add."""
        add_up([own if position == self._own else rooms[position] for position in range(self._count)], total, average)


def _plain(tensors: Tensors) -> list[torch.Tensor]:
    return [tensor if is_plain(tensor) else tensor.contiguous() for tensor in tensors]


def _end_to_end(tensors: Tensors) -> torch.Tensor:
    return tensors[0].view(-1) if len(tensors) == 1 else torch.cat([tensor.view(-1) for tensor in tensors])


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()


def _is_apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """They share no memory."""
    return one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def _lay_out(whole: torch.Tensor, targets: Tensors) -> None:
    """Copy a flat tensor to ``targets``, one after the other."""
    first = 0
    for target in targets:
        target.copy_(whole[first : first + target.numel()].view(target.shape))
        first += target.numel()
