"""Sums by name that all ranks wait for: added by the ranks, without the communication service.

Votes decide for each round whether all ranks wait for it. Small tensors travel with the votes, from every rank to every
other. Large tensors are added in shares (large.py), one at a time: a rank that has offered one offers no other before
it is over. So large sums that all ranks offer never overlap, and have one order on all ranks. All other sums go through
the service.

Names may be called in any order, and need not be waited for, so no rank knows what the others do next. But most ranks
do what they did in the previous round. So a rank tells the others that it waits for a round. If all have waited for a
round, each offers to add the next one, and every rank that has waited votes on the next one in any case. All ranks
count as having waited before the first round. A rank that has not waited, and does not wait now, casts no vote: a round
for which no rank waits costs no message.

    in the previous round                   in this round           vote
    -------------------------------------   ---------------------   ---------------
    all have waited                         waits, is able          an offer
    a rank has not waited; or not able      waits                   WAITS
    this rank has waited                    does not wait           IS_ABSENT
    this rank has not waited                does not wait           none

If all ranks make the same offer, they add the round themselves. Otherwise all go through the service. A rank that has
not offered may do so at once. A rank that has offered receives a vote of every other: as they have waited, each casts
one. A vote on a round is sent before its rank's contribution to the round, so it has arrived when the next round
begins. Where it has not, the rank merely does not offer.

Any thread; ``OfferVotes`` is pure, for one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Self, cast

import torch

from byteps_py.errors import JoinedError
from byteps_py.session import Slot
from byteps_py.session.peers import PeerTransport
from byteps_py.tensors import TensorSpec, key_of
from byteps_py.torch.collectives.all_reduce.large import LargeSum, LargeSums
from byteps_py.torch.collectives.all_reduce.shared_memory import SharedMemorySum
from byteps_py.torch.collectives.all_reduce.shares import add_by_machine
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import is_plain
from byteps_py.torch.collectives.router import Route
from byteps_py.torch.collectives.work import Attempt

#: The service ends waits that exceed the stall limit; a rank gives it this much time before it gives up itself.
_PATIENCE_S = 10.0
_FOREVER_S = 1e9  # no limit
#: Votes on a round. An offer is a number from 0 on that identifies the sum.
IS_ABSENT, WAITS = -1, -2


class OfferVotes:
    """The rounds of one name, as one rank sees them. ``others``: the other ranks."""

    def __init__(self, others: Collection[int]) -> None:
        self._others = others
        self.number = 0  # of the latest round
        self._has_waited = True
        self._offer = -1  # of this rank, in that round; -1: none

    def begin(self, offer: int, is_waiting: bool, is_able: bool, votes: Mapping[int, int]) -> int | None:
        """Begin the next round. Returns the vote for all others, or None. ``votes``: those of the others on the
        previous round. ``is_able``: this rank can add it."""
        self.number += 1
        has_waited, self._has_waited = self._has_waited, is_waiting
        self._offer = -1
        if not is_waiting:
            return IS_ABSENT if has_waited else None
        if not (is_able and has_waited and (self.number == 1 or self._all_waited(votes))):
            return WAITS
        self._offer = offer
        return offer

    def verdict(self, joined: Collection[int], votes: Mapping[int, int]) -> bool | None:
        """True if the ranks add this round, in which this rank has offered; None: votes are missing. ``joined``: ranks
        that cast no more votes. ``votes``: those on this round, read after ``joined``."""
        answers = [votes.get(other) for other in self._others]
        offers, missing = answers.count(self._offer), answers.count(None)
        if not missing or offers + missing < len(answers):
            return offers == len(answers)
        if not joined:
            return None
        return False if any(other in joined for other in self._others if other not in votes) else None

    def _all_waited(self, votes: Mapping[int, int]) -> bool:
        return all(votes.get(other, IS_ABSENT) != IS_ABSENT for other in self._others)


class SumOffer(NamedTuple):
    """A sum that ranks may add. ``route``: ONE_SHOT, SHARED_MEMORY, DIRECT or HIERARCHICAL."""

    spec: TensorSpec
    route: Route


class NegotiatedAllReduce:
    """The sums by name of one context, until it ends or all ranks have joined."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._session = context.session
        self._peers = cast(PeerTransport, context.session.peers)
        self._peers.directory.wait_for_all()
        limit_s = context.settings.stall_limit_s
        self._timeout_s = limit_s + _PATIENCE_S if limit_s else _FOREVER_S
        self._groups: dict[Sequence[int], NegotiatedGroup] = {}
        self._names: dict[tuple[str, Sequence[int]], _NegotiatedRounds] = {}

    @classmethod
    def of(cls, context: Context) -> Self:
        """That of ``context``. Called with the context's lock held. Raises StallError and what ends the session."""
        return cast(Self, context.belongings.get(cls) or context.belongings.setdefault(cls, cls(context)))

    def begin(
        self,
        name: str,
        group: Sequence[int],
        offer: SumOffer | None,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        fallback: Callable[[], Attempt],
    ) -> Attempt:
        """Begin the sum of all ranks' ``sources`` into ``targets``, which may be the same tensors.

        ``offer``: the sum, if there is only one, the router lets ranks add it, and the caller is about to wait;
        otherwise None. ``fallback`` begins the sum through the service; it is called here or by
        ``complete``. Called with the context's lock held.
        """
        self._session.check_open()  # before any vote is cast
        sum_group = self._groups.get(group)
        if sum_group is None:
            ranks = group or range(self._session.size)
            sum_group = self._groups[group] = NegotiatedGroup(self._context, self._peers, ranks, self._timeout_s)
        entry = self._names.get((name, group))
        if entry is None:
            entry = self._names[name, group] = _NegotiatedRounds(sum_group, name)
        if offer is None or not (is_plain(sources[0]) and is_plain(targets[0])):
            entry.begin_elsewhere()
            return fallback()
        add_up = entry.begin(offer, sources[0], targets[0])
        if add_up is None:
            return fallback()

        def complete() -> None:
            if not add_up():
                with self._context.lock:
                    rest = fallback()
                rest.complete()

        return Attempt(lambda: False, complete)

    def close(self) -> None:
        """See Closable. After a join the session stays open."""
        if self._context.is_open and self._context.session is self._session:
            for sum_group in self._groups.values():
                sum_group.large_sums.retire()


class NegotiatedGroup:
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
        on_machines = self.machines or (tuple(range(self.count)),)
        name = f"sums in shares among ranks {self.text}#{session.incarnation}"
        self.large_sums = LargeSums(peers, name, ranks, self.own, on_machines)
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
        """The sum of flat and plain tensors; in shared memory, its first step is written. The caller has acquired the
        large sums."""
        all_reduce = self.large_sums.all_reduce
        if all_reduce is None:
            raise RuntimeError(f"{name}: as many ranks on each machine are needed")
        # Between machines, streams have the name: other groups may have a tensor of the same name.
        stream = f"{name} among ranks {self.text}#{self.session.incarnation}" if len(self.machines) > 1 else name
        large_sum = all_reduce.start(source, target, average, stream)
        if isinstance(large_sum, SharedMemorySum):
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


class _NegotiatedRounds:
    """The rounds of one name, one at a time."""

    def __init__(self, group: NegotiatedGroup, name: str) -> None:
        self._group = group
        self._name = name
        others = tuple(group.others.values())
        self._rounds = OfferVotes(others)
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
        is_small = offer.route is Route.ONE_SHOT
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
