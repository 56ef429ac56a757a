"""Pairs of machines whose direct way is slow while their links are not: ranks reach each other through a third machine
as well. Pure: time is an argument.

    DIRECT ──slow for HOLD_S, and both links have room──► TRYING ──together no faster──► DIRECT, and again much later
                                                            └─faster──► CONFIRMING ──alone as fast──► DIRECT, likewise
                                                                          └─slower──► RELAYED
    RELAYED ──the direct way looks fast──► CHECKING ──alone it is fast──► DIRECT
                                             └─it is not──► RELAYED, and again later

Ranks report what they send to ranks of other machines, and for how long any of it was on its way. A pair's direct way
is slow if it carries less than half of what both links have left beside what else they carry: a full link is slow for
all pairs, and no third machine helps. Whether one does help is tried, as nobody can know: the way to it may be as slow.
Both ways are used together, each for as much as it carries (session/peers/peer_connection.py), so a bad guess costs
little. Ranks that compute and send a little again and again show a rate that changes by itself: so the direct way alone
is compared once more, after the trial.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from byteps_py.scheduler.rate_watch import MBIT, Usage

#: Reports of so many seconds are judged together, every so many seconds.
WINDOW_S = 3.0
EVERY_S = 0.5
#: A direct way that carries less than the one part of what its links have left for it is slow, than the other is fast.
SLOW, FAST = 0.5, 0.8
#: While a third machine helps, both ways share the sender's link: if the direct one carries so much, it may be fast.
_MAYBE_FAST = 0.35
#: For how long it must be slow, or look fast.
HOLD_S = 5.0
#: After a change connections are made, and reports are of both times.
SETTLE_S = WINDOW_S + 1.5
#: Two ways must carry so many times what one did.
LEAST_GAIN = 1.2
#: Judgements that decide a trial or a check.
_ENOUGH = 3
#: After a trial that failed, or a check that did: so many seconds until the next one, twice as many each time.
RETRY_S = 30.0
_MOST_DOUBLINGS = 6
#: Less is no evidence: the part of the time in which anything was on its way.
_LEAST_BUSY = 0.3

#: The lesser member id first.
Pair = tuple[int, int]


class PairUsage(NamedTuple):
    """The bytes that ranks of the machine ``source`` have lately sent to ranks of ``target``, directly and through a
    third one, and for how long any of them were on their way. Member ids of their workers."""

    source: int
    target: int
    nbytes: int
    busy_s: float
    unread_s: float
    relayed_bytes: int = 0
    relayed_busy_s: float = 0.0

    def plus(self, other: PairUsage) -> PairUsage:
        """This one and a later one of the same two machines."""
        return PairUsage(
            self.source,
            self.target,
            self.nbytes + other.nbytes,
            self.busy_s + other.busy_s,
            self.unread_s + other.unread_s,
            self.relayed_bytes + other.relayed_bytes,
            self.relayed_busy_s + other.relayed_busy_s,
        )

    @property
    def pair(self) -> Pair:
        return min(self.source, self.target), max(self.source, self.target)


class Ways(NamedTuple):
    """The rates of a pair's ways in Mbit/s, in the direction in which more time passes."""

    direct_mbit: float
    total_mbit: float
    busy_s: float
    carried_mbit: float  # both ways together, on average, also when nothing was on its way
    is_unread: bool  # the receiver's programs held it up
    source: int
    target: int


class RelayState(enum.Enum):
    """See the module."""

    DIRECT = enum.auto()
    TRYING = enum.auto()
    CONFIRMING = enum.auto()
    RELAYED = enum.auto()
    CHECKING = enum.auto()


_NEXT = {
    RelayState.DIRECT: {RelayState.TRYING},
    RelayState.TRYING: {RelayState.DIRECT, RelayState.CONFIRMING},
    RelayState.CONFIRMING: {RelayState.DIRECT, RelayState.RELAYED},
    RelayState.RELAYED: {RelayState.DIRECT, RelayState.CHECKING},
    RelayState.CHECKING: {RelayState.DIRECT, RelayState.RELAYED},
}


@dataclass(slots=True)
class _PairState:
    state: RelayState = RelayState.DIRECT
    relay: int = -1  # the member id of the third machine
    since_s: float = 0.0  # of the state
    held_s: float = 0.0  # for how long there was evidence that asks for another state
    judged_s: float = -math.inf  # the latest evidence
    seen: list[float] = field(default_factory=list)  # rates, or parts of them, since the state began
    before_mbit: float = 0.0  # of the direct way, before the trial
    total_mbit: float = 0.0  # of both ways, as the trial has shown
    failures: int = 0
    not_before_s: float = -math.inf  # the next trial, or check

    def go(self, state: RelayState, now_s: float) -> None:
        if state not in _NEXT[self.state]:
            raise ValueError(f"a pair of machines can't go from {self.state.name} to {state.name}")
        self.state, self.since_s, self.held_s, self.seen = state, now_s, 0.0, []

    def hold(self, holds: bool, now_s: float) -> bool:
        """True once evidence has held for long enough."""
        gap_s, self.judged_s = now_s - self.judged_s, now_s
        self.held_s = self.held_s + min(gap_s, 2 * EVERY_S) if holds else 0.0
        return holds and self.held_s >= HOLD_S

    def fail(self, now_s: float) -> None:
        self.not_before_s = now_s + RETRY_S * 2 ** min(_MOST_DOUBLINGS, self.failures)
        self.failures += 1


class RelayChange(NamedTuple):
    """A pair of machines has a third one between them from now on, or no longer has. ``direct_mbit``, ``total_mbit``:
    the rates without it, and with it if that is known."""

    pair: Pair
    state: RelayState
    relay: int
    direct_mbit: float
    total_mbit: float
    is_news: bool = False  # it has a third machine that has proved to be faster, or needs none any more


class PairWatch:
    """The pairs of a group's machines, by the member ids of their workers."""

    def __init__(self) -> None:
        self._known_mbit: dict[int, float] = {}
        self._candidates: tuple[int, ...] = ()
        self._pairs: dict[Pair, _PairState] = {}
        self._sent: deque[tuple[float, PairUsage]] = deque()  # when each report came
        self._others: deque[tuple[float, Sequence[Usage]]] = deque()  # of services; one entry for each report
        self._judged_s = -EVERY_S

    def set_machines(self, known_mbit: Mapping[int, float], candidates: Iterable[int]) -> list[RelayChange]:
        """The rates of the machines' links, 0 if one is not known, and the machines that may relay. Pairs whose relay
        is none of these any more go directly."""
        self._known_mbit, self._candidates = dict(known_mbit), tuple(candidates)
        found = []
        for pair, each in self._pairs.items():
            if each.state is not RelayState.DIRECT and each.relay not in self._candidates:
                found.append(RelayChange(pair, RelayState.DIRECT, each.relay, each.before_mbit, 0.0))
        for change in found:
            del self._pairs[change.pair]
        return found

    def report(self, pairs: Iterable[PairUsage], others: Sequence[Usage], now_s: float) -> None:
        """A machine has reported what its ranks sent to other ranks, and what its services sent."""
        self._sent.extend((now_s, usage) for usage in pairs if usage.source != usage.target)
        if others:
            self._others.append((now_s, others))
        for reports in (self._sent, self._others):
            while reports and reports[0][0] < now_s - WINDOW_S:
                reports.popleft()

    def is_due(self, now_s: float) -> bool:
        """True if ``changes`` would judge now."""
        return now_s - self._judged_s >= EVERY_S and bool(self._sent or self._pairs)

    def strays(self, now_s: float) -> list[Pair]:
        """Pairs whose ranks still use a third machine although none is theirs: an earlier scheduler gave it to them."""
        found = {usage.pair for _, usage in self._sent if usage.relayed_bytes} - self.relays.keys()
        return [pair for pair in found if pair not in self._pairs or now_s - self._pairs[pair].since_s >= SETTLE_S]

    @property
    def relays(self) -> dict[Pair, int]:
        """The member id of the third machine of each pair that uses one now."""
        used = RelayState.TRYING, RelayState.RELAYED
        return {pair: each.relay for pair, each in self._pairs.items() if each.state in used}

    def kept(self) -> list[RelayChange]:
        """The pairs whose third machine has proved to be faster, as the changes that they were."""
        return [
            RelayChange(pair, RelayState.RELAYED, each.relay, each.before_mbit, each.total_mbit, True)
            for pair, each in self._pairs.items()
            if each.state in (RelayState.RELAYED, RelayState.CHECKING)
        ]

    def changes(self, now_s: float) -> list[RelayChange]:
        """The pairs that change their ways now. Call it often."""
        if now_s - self._judged_s < EVERY_S:
            return []
        self._judged_s = now_s
        self.report((), (), now_s)
        if not self._sent:
            return []
        used_mbit = self._used_mbit()
        found = []
        for pair, ways in self._ways().items():
            each = self._pairs.setdefault(pair, _PairState())
            if now_s - each.since_s >= SETTLE_S or each.state is RelayState.DIRECT:
                found += self._judge(pair, each, ways, used_mbit, now_s)
        return found

    def _judge(
        self, pair: Pair, each: _PairState, ways: Ways, used_mbit: Mapping[int, tuple[float, float]], now_s: float
    ) -> list[RelayChange]:
        left_mbit = self._left_mbit(ways, used_mbit)
        if ways.busy_s < _LEAST_BUSY * WINDOW_S and each.state is RelayState.DIRECT:
            each.hold(False, now_s)
            return []
        if each.state is RelayState.DIRECT:
            relay = self._best_relay(ways, used_mbit)
            is_slow = not ways.is_unread and ways.direct_mbit < SLOW * left_mbit and relay is not None
            if each.hold(is_slow, now_s) and now_s >= each.not_before_s and relay is not None:
                each.before_mbit, each.relay = ways.total_mbit, relay
                each.go(RelayState.TRYING, now_s)
                return [RelayChange(pair, each.state, each.relay, ways.direct_mbit, 0.0)]
        elif each.state is RelayState.TRYING:
            each.seen.append(ways.total_mbit)
            if len(each.seen) >= _ENOUGH:
                total_mbit = each.total_mbit = statistics.median(each.seen)
                is_faster = total_mbit >= LEAST_GAIN * each.before_mbit
                if not is_faster:
                    each.fail(now_s)
                each.go(RelayState.CONFIRMING if is_faster else RelayState.DIRECT, now_s)
                return [RelayChange(pair, each.state, each.relay, each.before_mbit, total_mbit)]
        elif each.state is RelayState.CONFIRMING:
            each.seen.append(ways.direct_mbit)
            if len(each.seen) >= _ENOUGH:
                each.before_mbit = statistics.median(each.seen)
                is_slower = each.total_mbit >= LEAST_GAIN * each.before_mbit
                if not is_slower:
                    each.fail(now_s)
                each.go(RelayState.RELAYED if is_slower else RelayState.DIRECT, now_s)
                return [RelayChange(pair, each.state, each.relay, each.before_mbit, each.total_mbit, is_slower)]
        elif each.state is RelayState.RELAYED:
            # If the faster way takes all messages, nothing shows the rate of the other.
            is_unseen = not ways.direct_mbit and now_s >= each.since_s + RETRY_S
            looks_fast = (is_unseen or ways.direct_mbit >= _MAYBE_FAST * left_mbit) and now_s >= each.not_before_s
            if each.hold(looks_fast, now_s):
                each.go(RelayState.CHECKING, now_s)
                return [RelayChange(pair, each.state, each.relay, ways.direct_mbit, ways.total_mbit)]
        else:
            each.seen.append(ways.direct_mbit / left_mbit if left_mbit else 1.0)
            if len(each.seen) >= _ENOUGH:
                direct_mbit = ways.direct_mbit
                is_fast = statistics.median(each.seen) >= FAST
                if is_fast:
                    each.failures, each.not_before_s = 0, -math.inf
                else:
                    each.fail(now_s)
                each.go(RelayState.DIRECT if is_fast else RelayState.RELAYED, now_s)
                return [RelayChange(pair, each.state, each.relay, direct_mbit, direct_mbit, is_fast)]
        return []

    def _ways(self) -> dict[Pair, Ways]:
        """Of each pair, in the direction in which more time passes."""
        sums: dict[tuple[int, int], PairUsage] = {}
        for _, usage in self._sent:
            known = sums.get(usage[:2])
            sums[usage[:2]] = usage if known is None else known.plus(usage)
        found: dict[Pair, Ways] = {}
        for usage in sums.values():
            busy_s = max(usage.busy_s, usage.relayed_busy_s)
            if busy_s <= 0 or ((known_ways := found.get(usage.pair)) is not None and known_ways.busy_s >= busy_s):
                continue
            found[usage.pair] = Ways(
                usage.nbytes * MBIT / usage.busy_s if usage.busy_s else 0.0,
                (usage.nbytes + usage.relayed_bytes) * MBIT / busy_s,
                busy_s,
                (usage.nbytes + usage.relayed_bytes) * MBIT / WINDOW_S,
                usage.unread_s > usage.busy_s / 2,
                usage.source,
                usage.target,
            )
        return found

    def _used_mbit(self) -> dict[int, tuple[float, float]]:
        """The rates that each machine's link carries: out, in."""
        out: dict[int, float] = {}
        into: dict[int, float] = {}
        transfers = [(each.source, each.target, each.nbytes) for _, usages in self._others for each in usages]
        for _, usage in self._sent:
            transfers.append((usage.source, usage.target, usage.nbytes))
            if usage.relayed_bytes and (pair := self._pairs.get(usage.pair)) is not None:
                transfers.append((usage.source, pair.relay, usage.relayed_bytes))
                transfers.append((pair.relay, usage.target, usage.relayed_bytes))
        for source, target, nbytes in transfers:
            out[source] = out.get(source, 0.0) + nbytes * MBIT / WINDOW_S
            into[target] = into.get(target, 0.0) + nbytes * MBIT / WINDOW_S
        return {machine: (out.get(machine, 0.0), into.get(machine, 0.0)) for machine in self._known_mbit}

    def _left_mbit(self, ways: Ways, used_mbit: Mapping[int, tuple[float, float]]) -> float:
        """The rate that the links at both ends have left for a pair, beside what else they carry meanwhile."""
        part = min(1.0, ways.busy_s / WINDOW_S)
        left = math.inf
        for machine, direction in ((ways.source, 0), (ways.target, 1)):
            used = used_mbit.get(machine, (0.0, 0.0))[direction]
            left = min(left, self._known_mbit.get(machine, 0.0) - max(0.0, used - ways.carried_mbit) / part)
        return max(0.0, left)

    def _best_relay(self, ways: Ways, used_mbit: Mapping[int, tuple[float, float]]) -> int | None:
        """The third machine with the most room. None: it has none for as much again as the direct way carries."""
        room_mbit = {
            machine: known - max(used_mbit[machine]) for machine, known in self._known_mbit.items() if known > 0
        }
        able = [c for c in self._candidates if c not in (ways.source, ways.target) and c in room_mbit]
        best = max(able, key=lambda machine: (room_mbit[machine], -machine), default=None)
        return best if best is not None and room_mbit[best] >= ways.direct_mbit else None
