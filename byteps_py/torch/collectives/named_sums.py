"""Sums by name that all ranks wait for: added by the ranks, without the communication service.

Votes decide for each round whether all ranks wait for it (sum_offers.py). Small tensors travel with the votes, from
every rank to every other. Large tensors are added in shares (large_sum.py), one at a time: a rank that has offered one
offers no other before it is over. So large sums that all ranks offer never overlap, and have one order on all ranks.
All other sums go through the service.

Any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self, cast

import torch

from byteps_py.errors import JoinedError
from byteps_py.session import Slot
from byteps_py.session.peers import PeerTransport, Ring
from byteps_py.tensors import TensorSpec, key_of
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import is_plain
from byteps_py.torch.collectives.large_sum import LargeSum, LargeSums, large_sums_among
from byteps_py.torch.collectives.named_work import Attempt
from byteps_py.torch.collectives.ring.adding import add_by_machine
from byteps_py.torch.collectives.ring.ring_sum import RingSum
from byteps_py.torch.collectives.router import Route
from byteps_py.torch.collectives.sum_offers import IS_ABSENT, SharedRounds

#: The service ends waits that exceed the stall limit; a rank gives it this much time before it gives up itself.
_PATIENCE_S = 10.0
_FOREVER_S = 1e9  # no limit


class SumOffer(NamedTuple):
    """A sum that ranks may add. ``route``: PEERS, RING or SHARES."""

    spec: TensorSpec
    route: Route


class NamedSums:
    """The sums by name of one context, until it ends or all ranks have joined."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._session = context.session
        self._peers = cast(PeerTransport, context.session.peers)
        self._peers.directory.wait_for_all()
        limit_s = context.settings.stall_limit_s
        self._timeout_s = limit_s + _PATIENCE_S if limit_s else _FOREVER_S
        self._groups: dict[Sequence[int], NamedSumGroup] = {}
        self._names: dict[tuple[str, Sequence[int]], _NamedRounds] = {}

    @classmethod
    def of(cls, context: Context) -> Self:
        """The NamedSums of ``context``. Called with the context's lock held. Raises StallError and what ends the
        session."""
        return cast(Self, context.belongings.get(cls) or context.belongings.setdefault(cls, cls(context)))

    def begin(
        self,
        name: str,
        group: Sequence[int],
        offer: SumOffer | None,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        through_the_service: Callable[[], Attempt],
    ) -> Attempt:
        """Begin the sum of all ranks' ``sources`` into ``targets``, which may be the same tensors.

        ``offer``: the sum, if there is only one, the router lets ranks add it, and the caller is about to wait;
        otherwise None. ``through_the_service`` begins the sum through the service; it is called here or by
        ``complete``. Called with the context's lock held.
        """
        self._session.check_open()  # before any vote is cast
        sum_group = self._groups.get(group)
        if sum_group is None:
            ranks = group or range(self._session.size)
            sum_group = self._groups[group] = NamedSumGroup(self._context, self._peers, ranks, self._timeout_s)
        entry = self._names.get((name, group))
        if entry is None:
            entry = self._names[name, group] = _NamedRounds(sum_group, name)
        if offer is None or not (is_plain(sources[0]) and is_plain(targets[0])):
            entry.begin_elsewhere()
            return through_the_service()
        add_up = entry.begin(offer, sources[0], targets[0])
        if add_up is None:
            return through_the_service()

        def complete() -> None:
            if not add_up():
                with self._context.lock:
                    rest = through_the_service()
                rest.complete()

        return Attempt(lambda: False, complete)

    def close(self) -> None:
        """See Closable. After a join the session stays open."""
        if self._context.is_open and self._context.session is self._session:
            for sum_group in self._groups.values():
                sum_group.retire()


class NamedSumGroup:
    """The ranks of one group, and their large sums: one at a time."""

    def __init__(self, context: Context, peers: PeerTransport, ranks: Sequence[int], timeout_s: float) -> None:
        self.session = session = context.session
        self.peers, self.timeout_s = peers, timeout_s
        machines = context.connections.machines if context.connections is not None else None
        #: The positions on each machine; empty: all are on one.
        self.machines = machines.of(ranks).positions if machines is not None else ()
        self.own = ranks.index(session.rank)
        self.count = len(ranks)
        #: The ranks of the other members, by position.
        self.others = {p: rank for p, rank in enumerate(ranks) if p != self.own}
        self.text = ", ".join(map(str, ranks))
        self._name = f"sums in shares among ranks {self.text}#{session.incarnation}"
        on_machines = self.machines or (tuple(range(self.count)),)
        self._near = [ranks[p] for some in on_machines if self.own in some for p in some if p != self.own]
        self._large_sums: LargeSums | None = None
        self._ring: Ring | None = None
        if len(set(map(len, on_machines))) == 1:
            self._large_sums, self._ring = large_sums_among(peers, self._name, ranks, self.own, on_machines)
        self._is_taken = False
        self._is_broken = False  # a sum was begun and abandoned here, which others may have continued

    def acquire(self) -> bool:
        """Reserve the large sums for one, until ``release``. False if they are reserved. Called with the context's lock
        held."""
        is_free = not (self._is_taken or self._is_broken)
        if is_free:
            self._is_taken = True
        return is_free

    def release(self) -> None:
        """The sum is over, or was not begun. Any thread."""
        self._is_taken = False

    def start(self, source: torch.Tensor, target: torch.Tensor, average: bool, name: str) -> LargeSum:
        """The sum of flat and plain tensors; in the ring, its first step is written. The caller has acquired the large
        sums."""
        if self._large_sums is None:
            raise RuntimeError(f"{name}: as many ranks on each machine are needed")
        # Between machines, streams have the name: other groups may have a tensor of the same name.
        stream = f"{name} among ranks {self.text}#{self.session.incarnation}" if len(self.machines) > 1 else name
        large_sum = self._large_sums.start(source, target, average, stream)
        if isinstance(large_sum, RingSum):
            large_sum.write_first_step()
        return large_sum

    def finish(self, large_sum: LargeSum) -> None:
        """Complete a sum that all other ranks complete, too. Raises StallError, JoinedError and what ends the
        session."""
        try:
            large_sum.run(time.monotonic() + self.timeout_s)
        except JoinedError:  # no member has begun
            raise
        except BaseException:  # for example an interrupt that the program survives
            self._is_broken = True
            raise

    def retire(self) -> None:
        """The large sums are not used any more on this rank."""
        if self._ring is not None:
            self.peers.retire(self._ring, self.peers.stream(f"{self._name}.ring.over", self._near))


class _NamedRounds:
    """The rounds of one name, one at a time."""

    def __init__(self, group: NamedSumGroup, name: str) -> None:
        self._group = group
        self._name = name
        others = tuple(group.others.values())
        self._rounds = SharedRounds(others)
        stream = f"{name} among ranks {group.text}#{group.session.incarnation}"
        self._votes = group.peers.votes(stream, others)
        self._spec: TensorSpec | None = None  # of the latest round for which this rank has waited
        self._offer = 0  # the vote that offers it
        self._buffers: dict[int, torch.Tensor] = {}  # for the others' tensors, by position

    def begin_elsewhere(self) -> None:
        """Begin the next round, in which this rank goes through the service without waiting."""
        vote = self._rounds.begin(IS_ABSENT, is_waiting=False, is_able=False, votes={})
        if vote is not None:
            self._votes.cast(self._rounds.number, vote)
        self._votes.forget(self._rounds.number - 1)

    def begin(self, offer: SumOffer, source: torch.Tensor, target: torch.Tensor) -> Callable[[], bool] | None:
        """Begin the next round, for which the caller is about to wait. Returns a function that completes the sum; it
        returns False if the sum has to go through the service. None: that is known already."""
        group, rounds, votes, spec = self._group, self._rounds, self._votes, offer.spec
        is_small = offer.route is Route.PEERS
        is_taken = not is_small and group.acquire()
        is_under_way = False
        try:
            if spec is not self._spec:
                self._spec, self._offer = spec, _offer_of(spec)
            vote = rounds.begin(
                self._offer, is_waiting=True, is_able=is_small or is_taken, votes=self._previous_votes()
            )
            has_offered = vote == self._offer
            mine, total = source.detach().view(-1), target.detach().view(-1)
            large_sum = group.start(mine, total, spec.average, self._name) if is_taken and has_offered else None
            if vote is not None:
                votes.cast(rounds.number, vote, source.data_ptr(), spec.nbytes if is_small and has_offered else 0)
            votes.forget(rounds.number - 1)
            is_under_way = has_offered
        finally:
            if is_taken and not is_under_way:
                group.release()
        since_ns = time.perf_counter_ns()

        def settle() -> bool:
            try:
                if not self._is_offered_by_all():
                    return False
                if large_sum is None:
                    with torch.no_grad():
                        self._add_all(mine, total, spec.average)
                else:
                    group.finish(large_sum)
                torch.autograd.graph.increment_version(target)
                self._report(spec, since_ns)
                return True
            finally:
                if is_taken:
                    group.release()

        return settle if is_under_way else None

    def _previous_votes(self) -> dict[int, int]:
        """The others' votes on the previous round."""
        votes = self._votes.received(self._rounds.number)
        if len(votes) < len(self._group.others) and self._rounds.number:
            self._group.peers.take_messages()
            votes = self._votes.received(self._rounds.number)
        return votes

    def _is_offered_by_all(self) -> bool:
        """Wait for the result of the vote on this round, in which this rank has offered."""
        votes, number = self._votes, self._rounds.number

        found: bool | None = None

        def is_known() -> bool:
            nonlocal found
            found = self._rounds.verdict(votes.joined, votes.received(number))
            return found is not None

        votes.wait_until_known(number, is_known, self._name, self._group.timeout_s)
        return bool(found)

    def _report(self, spec: TensorSpec, since_ns: int) -> None:
        observer = self._group.session.observer
        if observer is not None:
            slot = Slot(spec, (), memoryview(b""), round=self._rounds.number)
            observer.begun(slot, since_ns)
            observer.delivered(slot)

    def _add_all(self, mine: torch.Tensor, total: torch.Tensor, average: bool) -> None:
        """Add the tensors of all ranks."""
        group, buffers = self._group, self._buffers
        for position, rank in group.others.items():
            buffer = buffers.get(position)
            if buffer is None or buffer.dtype is not mine.dtype or buffer.numel() != mine.numel():
                buffer = buffers[position] = torch.empty_like(mine)
            self._votes.fetch(self._rounds.number, rank, buffer.data_ptr(), buffer.nbytes)
        # The result may overwrite the own tensor only if it is one of the first two rows, read before a write.
        own = mine if group.own < 2 else mine.clone()
        add_by_machine([buffers.get(position, own) for position in range(group.count)], group.machines, total, average)


def _offer_of(spec: TensorSpec) -> int:
    """A vote that identifies the sum, whatever its name."""
    return key_of(repr(spec.signature())) >> 1
