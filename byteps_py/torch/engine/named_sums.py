"""Sums by name among ranks of one machine that all wait for them: added up there, without the communication service.

Of small tensors everybody gets everybody's, with what is said about the round (offers.py); large ones go in shares
(ring_sum.py), one at a time: who has offered one offers no other before it is over. So large sums that all offer never
overlap, and come in one order on all ranks. Everything else goes through the service.

Any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self, cast

import torch

from byteps_py.errors import JoinedError
from byteps_py.session import Session, Slot
from byteps_py.session.peers import LocalPeers
from byteps_py.tensors import TensorSpec, key_of
from byteps_py.torch.engine.context import Context
from byteps_py.torch.engine.dtypes import is_plain
from byteps_py.torch.engine.offers import IS_ABSENT, SharedRounds
from byteps_py.torch.engine.ring.adding import add_up
from byteps_py.torch.engine.ring.ring_sum import SLOT_BYTES, RingSum, RingSums
from byteps_py.torch.engine.router import Route
from byteps_py.torch.engine.work import Attempt

#: The service ends the waits of who is kept waiting for longer than the stall limit: after that it has had the time to.
_PATIENCE_S = 10.0
_FOREVER_S = 1e9  # without a limit


class SumOffer(NamedTuple):
    """A sum that the ranks of a machine may add up. ``route``: how, PEERS or RING."""

    spec: TensorSpec
    route: Route


class NamedSums:
    """Those of one context, until it ends, or all ranks have joined."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._session = context.session
        self._peers = cast(LocalPeers, context.session.peers)
        self._peers.directory.wait_for_all()
        limit_s = context.settings.stall_limit_s
        self._timeout_s = limit_s + _PATIENCE_S if limit_s else _FOREVER_S
        self._circles: dict[Sequence[int], _Circle] = {}
        self._names: dict[tuple[str, Sequence[int]], _NamedRounds] = {}

    @classmethod
    def of(cls, context: Context) -> Self:
        """With the context's lock held. Raises StallError and what ends the session."""
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
        """``sources`` of all ranks into ``targets``, which may be the same. ``offer``: the only sum of them, if the
        router lets ranks add it up and the caller is about to wait; else None. With the context's lock held, as
        ``through_the_service`` is called here or by ``complete``."""
        self._session.check_open()  # before anything is said
        circle = self._circles.get(group)
        if circle is None:
            ranks = group or range(self._session.size)
            circle = self._circles[group] = _Circle(self._session, self._peers, ranks, self._timeout_s)
        entry = self._names.get((name, group))
        if entry is None:
            entry = self._names[name, group] = _NamedRounds(circle, name)
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
        """See Closable. After a join the session goes on."""
        if self._context.is_open and self._context.session is self._session:
            for circle in self._circles.values():
                circle.retire()


class _Circle:
    """The ranks of one group; one large sum at a time."""

    def __init__(self, session: Session, peers: LocalPeers, ranks: Sequence[int], timeout_s: float) -> None:
        self.session, self.peers, self.timeout_s = session, peers, timeout_s
        first, self.own = session.rank - session.local_rank, ranks.index(session.rank)
        self.count = len(ranks)
        #: Local ranks of the others, by position.
        self.others = {p: rank - first for p, rank in enumerate(ranks) if p != self.own}
        self.text = ", ".join(map(str, ranks))
        self._all = tuple(self.others.values())
        self._name = f"sums in shares among ranks {self.text}#{session.incarnation}"
        ring = peers.ring(peers.stream(self._name, self._all), SLOT_BYTES)
        self._sums = RingSums(ring, self.own, {self.own: session.local_rank, **self.others})
        self._is_taken = False
        self._is_broken = False  # a sum was begun and given up, which others may have carried on

    def take(self) -> bool:
        """For one large sum, until ``give_back``. False if there is one already. With the context's lock held."""
        is_free = not (self._is_taken or self._is_broken)
        if is_free:
            self._is_taken = True
        return is_free

    def give_back(self) -> None:
        self._is_taken = False

    def shares(self, source: torch.Tensor, target: torch.Tensor, average: bool, name: str) -> RingSum:
        """Of flat and plain tensors, for who has taken the circle. Its first chunk is given."""
        work = RingSum(self._sums, source, target, average, name)
        work.give()
        return work

    def add_shares(self, work: RingSum) -> None:
        """All others do the same. Raises StallError, JoinedError and what ends the session."""
        try:
            work.run(time.monotonic() + self.timeout_s)
        except JoinedError:  # nobody has begun
            raise
        except BaseException:  # an interrupt, say, that the program lives on with
            self._is_broken = True
            raise

    def retire(self) -> None:
        self.peers.retire(self._sums.ring, self.peers.stream(f"{self._name}, over", self._all))


class _NamedRounds:
    """The rounds of one name: one at a time."""

    def __init__(self, circle: _Circle, name: str) -> None:
        self._circle = circle
        self._name = name
        others = tuple(circle.others.values())
        self._rounds = SharedRounds(others)
        stream = f"{name} among ranks {circle.text}#{circle.session.incarnation}"
        self._votes = circle.peers.votes(stream, others)
        self._spec: TensorSpec | None = None  # of the latest round that was waited for
        self._offer = 0  # what says so
        self._rooms: dict[int, torch.Tensor] = {}  # for what others send, by position

    def begin_elsewhere(self) -> None:
        """This rank takes part in the next round through the service, and does not wait."""
        word = self._rounds.begin(IS_ABSENT, is_waiting=False, is_able=False, said={})
        if word is not None:
            self._votes.say(self._rounds.number, word)
        self._votes.forget(self._rounds.number - 1)

    def begin(self, offer: SumOffer, source: torch.Tensor, target: torch.Tensor) -> Callable[[], bool] | None:
        """The next round, which the caller is about to wait for. Returns what adds it up, or tells by False that it has
        to go through the service; None if that is known already."""
        circle, rounds, votes, spec = self._circle, self._rounds, self._votes, offer.spec
        is_small = offer.route is Route.PEERS
        is_taken = not is_small and circle.take()
        is_under_way = False
        try:
            if spec is not self._spec:
                self._spec, self._offer = spec, _offer_of(spec)
            word = rounds.begin(self._offer, is_waiting=True, is_able=is_small or is_taken, said=self._said_before())
            has_offered = word == self._offer
            mine, total = source.detach().view(-1), target.detach().view(-1)
            shares = circle.shares(mine, total, spec.average, self._name) if is_taken and has_offered else None
            if word is not None:
                votes.say(rounds.number, word, source.data_ptr(), spec.nbytes if is_small and has_offered else 0)
            votes.forget(rounds.number - 1)
            is_under_way = has_offered
        finally:
            if is_taken and not is_under_way:
                circle.give_back()
        since_ns = time.perf_counter_ns()

        def settle() -> bool:
            try:
                if not self._is_offered_by_all():
                    return False
                if shares is None:
                    with torch.no_grad():
                        self._add_all(mine, total, spec.average)
                else:
                    circle.add_shares(shares)
                torch.autograd.graph.increment_version(target)
                self._report(spec, since_ns)
                return True
            finally:
                if is_taken:
                    circle.give_back()

        return settle if is_under_way else None

    def _said_before(self) -> dict[int, int]:
        """What others have said of the round before."""
        said = self._votes.heard(self._rounds.number)
        if len(said) < len(self._circle.others) and self._rounds.number:
            self._circle.peers.take_messages()
            said = self._votes.heard(self._rounds.number)
        return said

    def _is_offered_by_all(self) -> bool:
        """Returns when that is known of this round, for which this rank has offered."""
        votes, number = self._votes, self._rounds.number

        found: bool | None = None

        def is_known() -> bool:
            nonlocal found
            found = self._rounds.verdict(votes.joined, votes.heard(number))
            return found is not None

        votes.await_words(number, is_known, self._name, self._circle.timeout_s)
        return bool(found)

    def _report(self, spec: TensorSpec, since_ns: int) -> None:
        observer = self._circle.session.observer
        if observer is not None:
            slot = Slot(spec, (), memoryview(b""), round=self._rounds.number)
            observer.begun(slot, since_ns)
            observer.delivered(slot)

    def _add_all(self, mine: torch.Tensor, total: torch.Tensor, average: bool) -> None:
        """Of what everybody has sent."""
        circle, rooms = self._circle, self._rooms
        for position, local_rank in circle.others.items():
            room = rooms.get(position)
            if room is None or room.dtype is not mine.dtype or room.numel() != mine.numel():
                room = rooms[position] = torch.empty_like(mine)
            self._votes.fetch(self._rounds.number, local_rank, room.data_ptr(), room.nbytes)
        # The result may lie where the own tensor does: the first two are read before anything is written.
        own = mine if circle.own < 2 else mine.clone()
        add_up([rooms.get(position, own) for position in range(circle.count)], total, average)


def _offer_of(spec: TensorSpec) -> int:
    """A number that says what is added up, whatever its name."""
    return key_of(repr(spec.signature())) >> 1
