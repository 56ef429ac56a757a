"""Sums of small tensors among ranks that reach each other directly: every member receives all members'
tensors and adds them itself.

That moves more bytes than the ring (group_large_sums.py) and needs one wake-up less: below some size the wake-ups
dominate. The order of the additions and the precision are
those of the services: the ranks of a machine in order, then the machines in order, half precision in float32, rounded
once for each of the two and before the division of an average. So the result has the same bits on every route.

Any thread; operations run in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from byteps_py.torch.collectives.dtypes import is_plain
from byteps_py.torch.collectives.group_work import CompletedWork, FallbackWork, GroupWork
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.peer_collectives import span, spans
from byteps_py.torch.collectives.peer_streams import PeerStreams
from byteps_py.torch.collectives.ring.adding import add_by_machine
from byteps_py.torch.collectives.tensor_bytes import check_writable
from byteps_py.torch.collectives.work import Call, OperationKind, Work

Tensors = Sequence[torch.Tensor]


class LocalSum(NamedTuple):
    """A sum among ranks that reach each other without the servers. ``place``: of its kind, on which all members have
    agreed, or will agree in ``agreement``. ``otherwise`` begins the same sum through the service.
    ``is_awaited``: the caller is about to wait.
    """

    call: Call
    kind: OperationKind
    place: int
    otherwise: Callable[[], Work]
    is_awaited: bool
    agreement: GroupWork | None = None


class PeerSums:
    """The small sums of one group."""

    def __init__(self, members: Members, streams: PeerStreams) -> None:
        self._streams = streams
        self._machines = streams.machines.positions if streams.machines is not None else ()
        self._own = members.position
        self._count = members.count

    def reduce(self, what: LocalSum, contributions: Tensors, targets: Tensors) -> FallbackWork | CompletedWork:
        """Sum the ``contributions`` of all members, concatenated, to ``targets``: the same number of tensors, or
        none."""
        kind = what.kind
        for target in targets:
            check_writable(target)
        mine = contiguous(contributions)
        buffers = self._buffers(sum(tensor.numel() for tensor in mine), mine[0].dtype)

        # The result may overwrite the own tensor only if it is one of the first two rows, read before a write.
        is_direct = len(targets) == 1 and is_plain(targets[0]) and self._own < 2

        def finish() -> None:
            if is_direct:
                self._sum(concatenated(mine), buffers, targets[0].view(-1), kind.average)
            elif targets:
                whole = concatenated(mine)
                total = torch.empty_like(whole)
                self._sum(whole, buffers, total, kind.average)
                split_into(total, targets)

        streams, stream = self._streams, f"sum.{what.place}"
        receives = {position: (span(buffer),) for position, buffer in buffers.items()}
        call = what.call._replace(finish=finish, kind=kind, inputs=mine)
        if what.is_awaited and len(mine) == 1:
            rest = streams.swap(stream, call, span(mine[0]), receives)
            if rest is None:
                return CompletedWork(streams.group_context, call)
            return FallbackWork(streams.fallbacks, call, rest, what.otherwise)
        work = streams.to_all(stream, call, spans(mine), receives, together=True)
        return FallbackWork(streams.fallbacks, call, work, what.otherwise)

    def reduce_scatter(self, what: LocalSum, contributions: Tensors, target: torch.Tensor) -> FallbackWork:
        """Sum the concatenated ``contributions`` of all members; ``target`` receives this member's even share."""
        check_writable(target)
        whole = concatenated(contiguous(contributions))
        shares = whole.chunk(self._count)
        buffers = self._buffers(target.numel(), whole.dtype)

        def finish() -> None:
            total = torch.empty_like(shares[self._own])
            self._sum(shares[self._own], buffers, total, what.kind.average)
            target.copy_(total.view(target.shape))

        streams = self._streams
        receives = {position: (span(buffer),) for position, buffer in buffers.items()}
        sends = {position: (span(shares[position]),) for position in streams.others}
        call = what.call._replace(finish=finish, kind=what.kind, inputs=whole)
        work = streams.begin(f"scattered.{what.place}", call, sends, receives, together=True)
        return FallbackWork(streams.fallbacks, call, work, what.otherwise)

    def _buffers(self, count: int, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """Buffers for the others' tensors, by position of the member."""
        return {position: torch.empty(count, dtype=dtype, device="cpu") for position in self._streams.others}

    def _sum(self, own: torch.Tensor, buffers: dict[int, torch.Tensor], total: torch.Tensor, average: bool) -> None:
        """Add in the order of the members, machine by machine, as the services do."""
        rows = [own if position == self._own else buffers[position] for position in range(self._count)]
        add_by_machine(rows, self._machines, total, average)


def contiguous(tensors: Tensors) -> list[torch.Tensor]:
    """The tensors, copied where they are not contiguous in the host's memory."""
    return [tensor if is_plain(tensor) else tensor.contiguous() for tensor in tensors]


def concatenated(tensors: Tensors) -> torch.Tensor:
    """The tensors as one flat tensor."""
    return tensors[0].view(-1) if len(tensors) == 1 else torch.cat([tensor.view(-1) for tensor in tensors])


def split_into(whole: torch.Tensor, targets: Tensors) -> None:
    """Copy consecutive parts of a flat tensor to ``targets``."""
    first = 0
    for target in targets:
        target.copy_(whole[first : first + target.numel()].view(target.shape))
        first += target.numel()
