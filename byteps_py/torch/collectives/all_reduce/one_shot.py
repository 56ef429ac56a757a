"""Sums of small tensors among ranks that reach each other directly: every member receives all members' tensors and adds
them itself.

That moves more bytes than adding in shares (large.py) and needs one wake-up less: below some size the wake-ups
dominate. The order of the additions and the precision are those of the services: the ranks of a machine in order, then
the machines in order, half precision in float32, rounded once for each of the two and before the division of an
average. So the result has the same bits on every route.

Any thread; operations run in the order of the calls.
"""

from __future__ import annotations

import torch

from byteps_py.torch.collectives.all_reduce import GroupSum
from byteps_py.torch.collectives.all_reduce.shares import add_by_machine
from byteps_py.torch.collectives.dtypes import is_plain
from byteps_py.torch.collectives.fallback_work import FallbackWork
from byteps_py.torch.collectives.group_work import CompletedWork
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.peer_streams import PeerStreams
from byteps_py.torch.collectives.tensor_bytes import check_writable, concatenated, contiguous, span, spans, split_into


class OneShotAllReduce:
    """The small sums of one group."""

    def __init__(self, members: Members, streams: PeerStreams) -> None:
        self._streams = streams
        self._machines = streams.machines.positions if streams.machines is not None else ()
        self._own = members.position
        self._count = members.count

    def begin(self, what: GroupSum) -> FallbackWork | CompletedWork:
        """See AllReduce."""
        for target in what.targets:
            check_writable(target)
        mine = contiguous(what.contributions)
        return self._begin_scattered(what, mine) if what.kind.scatters else self._begin(what, mine)

    def finish(self) -> None:
        """See AllReduce."""
        self._streams.finish()

    def _begin(self, what: GroupSum, mine: list[torch.Tensor]) -> FallbackWork | CompletedWork:
        targets, average = what.targets, what.kind.average
        buffers = self._buffers(sum(tensor.numel() for tensor in mine), mine[0].dtype)

        # The result may overwrite the own tensor only if it is one of the first two rows, read before a write.
        is_direct = len(targets) == 1 and is_plain(targets[0]) and self._own < 2

        def finish() -> None:
            if is_direct:
                self._sum(concatenated(mine), buffers, targets[0].view(-1), average)
            elif targets:
                whole = concatenated(mine)
                total = torch.empty_like(whole)
                self._sum(whole, buffers, total, average)
                split_into(total, targets)

        streams, stream = self._streams, f"sum.{what.place}"
        receives = {position: (span(buffer),) for position, buffer in buffers.items()}
        call = what.call._replace(finish=finish, kind=what.kind, inputs=mine)
        if what.is_awaited and len(mine) == 1:
            rest = streams.swap(stream, call, span(mine[0]), receives)
            if rest is None:
                return CompletedWork(streams.group_context, call)
            return FallbackWork(streams.fallbacks, call, rest, what.fallback)
        work = streams.to_all(stream, call, spans(mine), receives, together=True)
        return FallbackWork(streams.fallbacks, call, work, what.fallback)

    def _begin_scattered(self, what: GroupSum, mine: list[torch.Tensor]) -> FallbackWork:
        (target,) = what.targets
        whole = concatenated(mine)
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
        return FallbackWork(streams.fallbacks, call, work, what.fallback)

    def _buffers(self, count: int, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """Buffers for the others' tensors, by position of the member."""
        return {position: torch.empty(count, dtype=dtype, device="cpu") for position in self._streams.others}

    def _sum(self, own: torch.Tensor, buffers: dict[int, torch.Tensor], total: torch.Tensor, average: bool) -> None:
        """Add in the order of the members, machine by machine, as the services do."""
        rows = [own if position == self._own else buffers[position] for position in range(self._count)]
        add_by_machine(rows, self._machines, total, average)
