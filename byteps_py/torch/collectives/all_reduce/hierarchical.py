"""One large sum of a group with several members on each of several machines, as many on each:

    add on the machine     each member adds a share of the tensor, in shared memory (shared_memory.py)
    add between machines   the members that have the same share add it over connections (direct.py)
    give on the machine    each member gives its share of the result to the others

So a byte leaves a machine as seldom as with one member on each, and all members send. The order of the additions and
the precision are those of the services, so the result has the same bits.

One thread at a time.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence

import torch

from byteps_py.session.peers import PeerTransport, SharedSlots, StreamReceipt
from byteps_py.torch.collectives.all_reduce.direct import DirectAllReduce
from byteps_py.torch.collectives.all_reduce.shared_memory import SharedMemoryAllReduce
from byteps_py.torch.collectives.all_reduce.shares import Chunks
from byteps_py.torch.collectives.router import Route


class HierarchicalAllReduce:
    """The sums of one group, one at a time. ``ranks``: of the members, by position. ``machines``: the positions of the
    members on each machine, the same number on each. ``own``: this member's position. ``slots``: of the members of
    its machine."""

    route = Route.HIERARCHICAL

    def __init__(
        self,
        transport: PeerTransport,
        ranks: Sequence[int],
        machines: Sequence[Sequence[int]],
        own: int,
        slots: SharedSlots,
    ) -> None:
        self.transport, self.machines = transport, machines
        self.machine = next(number for number, some in enumerate(machines) if own in some)
        near = machines[self.machine]
        #: This member's position among those of its machine.
        self.place = near.index(own)
        self.near = {place: ranks[position] for place, position in enumerate(near) if position != own}
        column = {number: ranks[some[self.place]] for number, some in enumerate(machines) if number != self.machine}
        on_machine = {place: ranks[position] for place, position in enumerate(near)}
        self.shared_memory = SharedMemoryAllReduce(slots, self.place, on_machine)
        self.direct = DirectAllReduce(transport, self.machine, column, len(ranks))
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        #: The members that neither share memory with this one nor add the same share.
        self.far = [rank for rank in ranks if rank not in (ranks[own], *self.near.values(), *column.values())]

    def start(
        self, source: torch.Tensor, target: torch.Tensor | None, average: bool, name: str, scatters: bool = False
    ) -> HierarchicalSum:
        """See SharedMemorySum and DirectAllReduce.start."""
        return HierarchicalSum(self, name, source, target, average, scatters)

    def memory(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for the sum on this machine, of the size and dtype of ``like``."""
        if self._memory.numel() < like.nbytes:
            self._memory = torch.empty(like.nbytes, dtype=torch.uint8, device="cpu")
        return self._memory[: like.nbytes].view(like.dtype)

    def by_place(self, source: torch.Tensor) -> torch.Tensor:
        """The even shares of all positions, those of the members with the same place next to each other: a copy."""
        shares = source.chunk(sum(map(len, self.machines)))
        return torch.cat([shares[some[place]] for place in range(len(self.near) + 1) for some in self.machines])


class _Phase(enum.Enum):
    ON_MACHINE = "members of each machine add"
    AWAITS_ALL = "is certain to be begun by all members"
    BETWEEN_MACHINES = "members of different machines add"
    GIVES = "members of each machine give each other the result"
    DONE = "complete"


class HierarchicalSum:
    """Adds every member's ``source``, a flat and contiguous tensor, into ``target``: see SharedMemorySum."""

    def __init__(
        self,
        sums: HierarchicalAllReduce,
        name: str,
        source: torch.Tensor,
        target: torch.Tensor | None,
        average: bool,
        scatters: bool,
    ) -> None:
        self._sums, self._transport = sums, sums.transport
        self._begun = sums.transport.stream(f"{name}.begun", sums.far)
        self._given = sums.transport.stream(f"{name}.given", sums.near.values())
        source = sums.by_place(source) if scatters else source
        # A member that does not need the result takes it all the same: the others do not know.
        self._target = torch.empty_like(source) if target is None else target
        self._shares = Chunks(
            source.numel(), source.itemsize, len(sums.near) + 1, sums.shared_memory.slots.slot_bytes, scatters=True
        )
        first, count = self._shares.share_of(sums.place)
        # Not to the target, which may be the source: if a member has joined instead, the source is needed once more.
        share = sums.memory(source[:count])
        self._result = self._target if scatters else self._target[first : first + count]
        self._machine_sum = sums.shared_memory.start(source, share, False, f"{name}.machine", scatters=True)
        self._direct_sum = sums.direct.start(share, self._result, average, name, scatters)
        self._scatters = scatters
        # Those that add the same share need this member's part of it, which it sends once all others have sent.
        self._receipt = StreamReceipt(
            self._begun, is_mutual=True, owner=self, dependents=tuple(sums.direct.others.values())
        )
        self._phase = _Phase.ON_MACHINE
        self._steps: dict[_Phase, Callable[[float], _Phase]] = {
            _Phase.ON_MACHINE: self._add_on_machine,
            _Phase.AWAITS_ALL: self._await_all,
            _Phase.BETWEEN_MACHINES: self._add_between_machines,
            _Phase.GIVES: self._take,
        }
        self.has_begun = False

    def run(self, deadline: float) -> None:
        """See LargeSum."""
        if not self.has_begun:
            self._begin()
        while self._phase is not _Phase.DONE:
            self._phase = self._steps[self._phase](deadline)

    def _begin(self) -> None:
        """Each member hears from each other one, so that it knows if a member has joined instead: from those that it
        adds with, and from the ``far`` ones by an empty message.

        The other members may know of that before, and then do not begin. So this member, whomever of them it waits for,
        gives up as soon as it is told that any member has joined instead."""
        sums, transport = self._sums, self._transport
        everybody = (*sums.near.values(), *sums.direct.others.values(), *sums.far)
        if joined := transport.joined_among(everybody):
            raise transport.joined_error(self._begun, joined)
        self.has_begun = True
        for rank in sums.far:
            self._receipt.expect(rank, (), 0)
        if sums.far:
            transport.send(self._begun, sums.far, ((0, 0),), is_led=False)

    def _add_on_machine(self, deadline: float) -> _Phase:
        self._machine_sum.run(deadline, lambda: self._transport.absent(self._receipt))
        return _Phase.AWAITS_ALL

    def _await_all(self, deadline: float) -> _Phase:
        self._transport.collect(self._receipt, deadline - time.monotonic())
        return _Phase.BETWEEN_MACHINES

    def _add_between_machines(self, deadline: float) -> _Phase:
        self._direct_sum.run(deadline)
        if self._scatters:
            return _Phase.DONE
        sums, target = self._sums, self._target
        self._receipt = StreamReceipt(self._given, owner=self)
        for place, rank in sums.near.items():
            first, count = self._shares.share_of(place)
            nbytes = count * target.itemsize
            self._receipt.expect(rank, ((target.data_ptr() + first * target.itemsize, nbytes),), nbytes)
        span = self._result.data_ptr(), self._result.nbytes
        self._transport.send(self._given, tuple(sums.near.values()), (span,), is_led=False)
        return _Phase.GIVES

    def _take(self, deadline: float) -> _Phase:
        self._transport.collect(self._receipt, deadline - time.monotonic())
        return _Phase.DONE
