"""Links whose rate changes while a job trains, as the traffic of all machines shows it. Pure: time is an argument.

Every service reports, for each machine that it sends to, the bytes and the time in which any of them were on their way
(dataplane/link_usage.py). Of one machine, the bytes over that time are the rate of its link, as long as nothing else
holds the transfers up. But transfers to a slow machine are slow on every sender. So machines are judged one after the
other, the slowest for its link first, and its transfers are no evidence about the others:

    machines 0, 1, 2, links of 400; that of 1 carries 200     0→1 and 2→1 take as long as 1→0 and 1→2
    1 is the slowest: all its transfers are slow              without 1, 0→2 and 2→0 carry 400

A rank that computes slowly has nothing on its way meanwhile, and slows no link down. A program that does not read what
arrives does: then TCP says that the receiver's window was full, and the machine is called slow, not its link. The
summation service of a CPU machine whose processors are busy reads what arrives and answers late. The time of its
answers, relative to what its link needs for the bytes on their way (worker/core/pace.py), says which rate a link would
have that took as long.

A machine that was slow has little to send, and so shows no higher rate once its link is fast again. So it is probed:
it sends filler for a moment, and the counters of its interface show what its link carries (dataplane/link_burst.py).
Two other kinds of links are probed as well:

- a link that looks slow, before anything follows: one that carries a little again and again, while ranks compute, looks
  slow too, since each piece is confirmed late;
- a link that was measured to be slower than others' at the start, a few times, later and later: images, data sets and
  starting processes may have used it, or the processors, while it was measured.

A rate counts as changed once it has been another one for several seconds, longer the more often it has changed lately:
a link that changes all the time is left alone. The shares of the servers follow (placement/link_optimum.py) if that
saves time; if all links have become slow alike, it does not.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from byteps_py.config import tuning
from byteps_py.placement.link_optimum import classes

#: Reports of so many seconds are judged together, every so many seconds.
WINDOW_S = 2.0
EVERY_S = 0.5
#: A rate is another one if it differs by more than this from the one that is known. Measurements scatter by a tenth.
SLOWER, FASTER = 0.8, 1.25
#: After a change of the shares, partitions move, and what is sent is no evidence for so long.
SETTLE_S = 1.5
#: For how long, and in how many judgements, a rate must be another one.
HOLD_S = 2.5
_HOLDS = 4
_LATEST = 3
#: With each change of a link's rate in the last minutes, the next one must last twice as long.
REMEMBERED_S = 300.0
_MOST_DOUBLINGS = 5
#: The same with each time that shares followed in the last minutes, on whichever link, beyond so many.
_MOST_EPOCHS = 4
#: So many changes that did not last, in so many seconds: the link changes all the time.
RESTLESS = 8
_RESTLESS_S = 60.0
#: Links are not told apart from noise if all but one of so many have had as many such changes.
_FEW_QUIET, _BRIEF_BY_CHANCE = 4, 2
#: Less than this is no evidence: the part of the link's rate that was used, and the seconds in which it was.
_LEAST_USED, _LEAST_BUSY_S = 0.05, 0.1
#: A machine that waits for others, or computes most of the time, sends little at a time, and the receiver's kernel
#: confirms each piece late: that takes long, and shows no rate. A machine counts as slow only if its transfers in one
#: direction take this part of the longest transfers of all machines, and this part of the time.
_WAITED_FOR, _LEAST_PART = 0.6, 0.25
#: Transfers of a machine for which others do not wait may be one after the other: together, they take so much longer
#: than the longest.
_APART = 1.3
#: Bytes that are reported in a window may have been sent in one that is so much longer.
_REPORTED_LATE = 1.4
#: A link that carries this part of its known rate is full.
_FULL = 0.85
#: Of more machines that are slow at a time, the others need not be told apart.
_MOST_SLOW = 16
#: A judgement without evidence (a long backward pass) breaks no row, for so many seconds.
_SILENT_S = 30.0
#: A machine that is known to be slow is probed so often: its link is then full for a tenth of a second, and longer
#: only if it is fast. A probe that finds it fast is repeated after this part of the time that a rate must hold.
PROBE_EVERY_S = 5.0
_PROBE_AGAIN = 0.4
#: A probe shares the other machines' links with transfers: what shows this part of the usual rate is taken for it.
_PROBED_USUAL = 0.65
#: A measurement of the start that is lower than another machine's is in doubt for so many probes. Each comes twice as
#: long after the one before: ten minutes in all. What it may carry is at most so many times the known rate: a probe has
#: as much on its way as suits that.
_DOUBTS, _MOST_OVER_KNOWN = 8, 8.0
#: An answer that takes longer is lost: the machine has left, or has too much to do.
_PROBE_LIMIT_S = 8.0
#: A link that looks slow is probed once it has looked so for this long. If nothing has come of it for so long after the
#: time in which a rate must hold, it counts as slow.
_SUSPECT_S, _CONFIRM_LIMIT_S = 1.0, 3.0
#: A probe that shows no more than so many times the rate that is suspected proves it. One that shows more is repeated,
#: up to so many times: it had to share other machines' links.
_PROVEN, _MOST_SUSPECT_PROBES = 1.1, 3
#: A machine with a share so small that nothing shows its rate, while others show theirs, is tried again after so many
#: seconds.
RETRY_S = 20.0
#: The same for a machine without a share whose transfers all wait for others: they show no rate above the known one.
UNBOUND_S = 60.0
#: Other shares must save this part of the time of a sum: they make the next one longer, once.
LEAST_GAIN = 0.04
#: The same if links are only as fast as at the start again.
LEAST_RETURN = 0.01
MBIT = 8e-6


class Usage(NamedTuple):
    """The latest transfers of the service ``sender``: ``nbytes`` from one machine to another took ``busy_s``; in
    ``unread_s`` of these the receiver did not read. All are member ids, of machines those of their links' owners."""

    sender: int
    source: int
    target: int
    nbytes: int
    busy_s: float
    unread_s: float


class Sign(enum.Enum):
    """The evidence for the rate of a machine's link."""

    SENDS = "as seen by what it sends"
    RECEIVES = "as seen by what it receives"
    READS = "its programs read slowly what arrives"
    ANSWERS = "its summation service answers late: its processors are busy"


class Seen(NamedTuple):
    """The rate of a machine's link in Mbit/s, in the slower direction: between ``least`` and ``most``, which are equal
    if all transfers wait for this link; ``most`` is infinite if it waits for others."""

    most_mbit: float
    least_mbit: float
    sign: Sign


def seen_rates(usages: Sequence[Usage], known_mbit: Mapping[int, float]) -> dict[int, Seen]:
    """The rate of each machine's link of which ``usages``, one for each connection, are evidence. ``known_mbit``: what
    they are known to carry.

    >>> pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    >>> slow = [Usage(a, a, b, 25_000_000, 2.0 if 1 in (a, b) else 0.7, 0.0) for a, b in pairs]
    >>> {machine: round(seen.least_mbit) for machine, seen in seen_rates(slow, dict.fromkeys(range(3), 400.0)).items()}
    {1: 200, 0: 297, 2: 297}
    """
    evidence = _Evidence(usages, known_mbit)
    found: dict[int, Seen] = {}
    left = dict(known_mbit)
    while left and len(found) < _MOST_SLOW:
        judged = {machine: seen for machine in left if (seen := evidence.of(machine, left)) is not None}
        if not judged:
            # All that these send and receive is held up by slower ones, or as slow as these are: that can't be told.
            judged = {machine: seen for machine in left if (seen := evidence.of(machine, known_mbit)) is not None}
            return found | judged
        slowest = min(judged, key=lambda machine: (judged[machine].most_mbit / left[machine], machine))
        if judged[slowest].most_mbit >= SLOWER * left[slowest]:
            return found | judged
        found[slowest] = judged[slowest]
        del left[slowest]
    return found


class _Evidence:
    """The transfers of a window, by the machines at both ends."""

    def __init__(self, usages: Sequence[Usage], known_mbit: Mapping[int, float]) -> None:
        self._known_mbit = known_mbit
        self._longest_s = max((usage.busy_s for usage in usages), default=0.0)
        self._sent: dict[int, list[tuple[int, Usage]]] = {}  # with the machine at the other end
        self._received: dict[int, list[tuple[int, Usage]]] = {}
        for usage in usages:
            self._sent.setdefault(usage.source, []).append((usage.target, usage))
            self._received.setdefault(usage.target, []).append((usage.source, usage))
        self._full_sending, self._full_receiving = self._full(self._sent), self._full(self._received)

    def of(self, machine: int, left: Mapping[int, float]) -> Seen | None:
        """``left``: the machines that hold no transfer up, as far as is known. None: there is no evidence."""
        directions = [
            seen
            for is_sending, ends in ((True, self._sent), (False, self._received))
            if (seen := self._direction(machine, ends.get(machine, ()), left, is_sending)) is not None
        ]
        if not directions:
            return None
        slowest = min(directions, key=lambda seen: seen[:2])
        slow = [seen for seen in directions if seen.most_mbit < SLOWER * self._known_mbit[machine]]
        return slowest._replace(sign=Sign.READS) if any(seen.sign is Sign.READS for seen in slow) else slowest

    def _direction(
        self, machine: int, ends: Sequence[tuple[int, Usage]], left: Mapping[int, float], is_sending: bool
    ) -> Seen | None:
        full = self._full_receiving if is_sending else self._full_sending
        there = [(other, usage) for other, usage in ends if other in left]
        free = [usage for other, usage in there if other not in full]
        if there and not free:
            return self._waiting([usage for _, usage in there], machine, is_sending)
        total = sum(usage.nbytes for usage in free)
        if not total:
            return None
        busy_s = sum(usage.nbytes * usage.busy_s for usage in free) / total
        unread_s = sum(usage.nbytes * usage.unread_s for usage in free) / total
        # Transfers to and from slow machines take their part of the link meanwhile.
        held_up = [usage for other, usage in ends if other not in left or other in full]
        total += int(sum(usage.nbytes * min(1.0, busy_s / (usage.busy_s or busy_s or 1.0)) for usage in held_up))
        megabits = total * MBIT
        if busy_s < _LEAST_BUSY_S or megabits < _LEAST_USED * self._known_mbit[machine] * WINDOW_S:
            return None
        longest_s = max(usage.busy_s for usage in free)
        sign = Sign.SENDS if is_sending else Sign.RECEIVES
        if busy_s < max(_WAITED_FOR * self._longest_s, _LEAST_PART * WINDOW_S):
            return Seen(math.inf, megabits / longest_s / _APART, sign)
        # Transfers that are often held up are on their way for long, and together they may fill the link all the same.
        carried_mbit = sum(usage.nbytes for _, usage in ends) * MBIT / (_REPORTED_LATE * WINDOW_S)
        sign = Sign.READS if unread_s > busy_s / 2 else sign
        return Seen(max(carried_mbit, megabits / busy_s), megabits / longest_s, sign)

    def _full(self, ends: Mapping[int, Sequence[tuple[int, Usage]]]) -> set[int]:
        """The machines whose links carry about as much as they can in one direction: transfers wait for each other
        there."""
        carried_mbit = {machine: sum(usage.nbytes for _, usage in of) * MBIT / WINDOW_S for machine, of in ends.items()}
        return {
            machine for machine, mbit in carried_mbit.items() if mbit >= _FULL * self._known_mbit.get(machine, math.inf)
        }

    def _waiting(self, usages: Sequence[Usage], machine: int, is_sending: bool) -> Seen | None:
        """All of the transfers of ``machine`` wait for links that are full."""
        megabits = sum(usage.nbytes for usage in usages) * MBIT
        longest_s = max(usage.busy_s for usage in usages)
        if longest_s < _LEAST_BUSY_S or megabits < _LEAST_USED * self._known_mbit[machine] * WINDOW_S:
            return None
        sign = Sign.SENDS if is_sending else Sign.RECEIVES
        return Seen(math.inf, megabits / longest_s / _APART, sign)


class ProbeReason(enum.IntEnum):
    """Why a link is probed, the most urgent reason first."""

    LOOKS_SLOW = enum.auto()
    WAS_SLOW = enum.auto()
    IN_DOUBT = enum.auto()  # its measurement at the start


class ProbeOrder(NamedTuple):
    """A link to probe: its machine, what it seems to carry now, and what it may carry, in Mbit/s."""

    number: int
    machine: int
    known_mbit: float
    usual_mbit: float
    reason: ProbeReason


class UsageWindow:
    """The reports of the last ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._reports: deque[tuple[float, Sequence[Usage]]] = deque()  # when each came

    def add(self, usages: Sequence[Usage], now_s: float) -> None:
        """A service has reported."""
        if usages:
            self._reports.append((now_s, usages))
        while self._reports and self._reports[0][0] < now_s - self._seconds:
            self._reports.popleft()

    def since_s(self, now_s: float) -> float:
        """When the first of the reports came that are not too old; ``now_s`` if there is none."""
        self.add((), now_s)
        return self._reports[0][0] if self._reports else now_s

    def connections(self, now_s: float) -> list[Usage]:
        """The sum of each connection's reports."""
        self.add((), now_s)
        found: dict[tuple[int, int], Usage] = {}
        for _, usages in self._reports:
            for usage in usages:
                key = usage.sender, usage.target
                if (known := found.get(key)) is not None:
                    nbytes, busy_s = usage.nbytes + known.nbytes, usage.busy_s + known.busy_s
                    usage = usage._replace(nbytes=nbytes, busy_s=busy_s, unread_s=usage.unread_s + known.unread_s)
                found[key] = usage
        return list(found.values())

    def clear(self) -> None:
        """Forget all reports."""
        self._reports.clear()


class _Lately(NamedTuple):
    """Of all links, in the last minutes: how often shares have followed, and how often one looked slow and was not. In
    a job in which one link looks slower than it is, all may."""

    epochs: int
    cleared: int


class Trend(enum.Enum):
    """The judgement of a link, against the rate that it is known to have."""

    SAME = enum.auto()
    SLOWER = enum.auto()
    FASTER = enum.auto()


@dataclass(slots=True)
class _Link:
    """One link. Each kind of evidence has its method."""

    usual_mbit: float  # at the start; if that is in doubt, what it may carry
    known_mbit: float
    sign: Sign | None = None  # what showed that rate; None: that of the start
    unseen_s: float = 0.0  # for how long others showed their rates, and this one did not
    has_share: bool = True
    unbound_s: float = 0.0  # for how long, without a share, its transfers waited for others
    retries: int = 0  # for that reason, since it had its usual rate for long
    trend: Trend = Trend.SAME
    held_s: float = 0.0  # for how long there was evidence of this trend
    seen_s: float = 0.0  # the latest evidence
    seen: list[Seen] = field(default_factory=list)  # since the trend began
    changes_s: list[float] = field(default_factory=list)
    brief_s: deque[float] = field(default_factory=lambda: deque(maxlen=RESTLESS))  # ends of changes that did not last
    told_restless_s: float = -math.inf
    probe_due_s: float = 0.0
    probed_mbit: float = 0.0  # what the last probe has shown
    probed_until_s: float = 0.0  # for how long that is evidence
    doubts: int = 0  # the probes that are still to show whether it was measured too low
    shown_mbit: list[float] = field(default_factory=list)  # it looks slow, and probes showed this much

    @classmethod
    def of(cls, usual_mbit: float, known_mbit: float) -> _Link:
        """A link that nobody has watched here. If it is slow, nobody knows here what showed it."""
        return cls(usual_mbit, known_mbit, Sign.SENDS if known_mbit < SLOWER * usual_mbit else None)

    def doubt(self, fastest_mbit: float) -> None:
        """Nobody has said what it carries, and it was measured at the start. ``fastest_mbit``: of all links."""
        if self.known_mbit < SLOWER * fastest_mbit:
            self.doubts = _DOUBTS
            self.usual_mbit = min(fastest_mbit, _MOST_OVER_KNOWN * self.known_mbit)
        else:
            self.doubts, self.usual_mbit = 0, self.known_mbit

    def follow(self, change: Change, fastest_mbit: float, now_s: float) -> None:
        """The shares follow ``change``."""
        self.changes_s.append(now_s)
        if self.doubts and change.mbit > self.known_mbit:
            self.known_mbit, self.trend, self.seen = change.mbit, Trend.SAME, []
            self.doubt(fastest_mbit)
            return
        if self.doubts:  # it carried what was measured, and no longer does
            self.doubts, self.usual_mbit = 0, self.known_mbit
        self.sign = change.sign if change.mbit < SLOWER * self.usual_mbit else None

    def is_shown_by(self, seen: Seen) -> bool:
        """That what arrives is fast does not mean that it is answered soon: if answers were what was slow, only they
        show that they no longer are."""
        return self.sign is not Sign.ANSWERS or seen.sign is Sign.ANSWERS or seen.most_mbit < SLOWER * self.known_mbit

    def slower(self, seen: Seen, answers: Seen) -> Seen:
        """The evidence that counts. A slow link makes answers late as well."""
        if seen.sign in (Sign.SENDS, Sign.RECEIVES) and seen.most_mbit < SLOWER * self.known_mbit:
            return seen
        return answers if answers.most_mbit < seen.most_mbit or not self.is_shown_by(seen) else seen

    @property
    def needs_probes(self) -> bool:
        """No probe of a link shows that a machine's processors are busy."""
        return self.doubts > 0 or (self.sign is not None and self.sign is not Sign.ANSWERS)

    def probed(self, mbit: float, now_s: float, hold_s: float) -> None:
        """A probe has shown what the link carries. 0: it has shown nothing."""
        again_s = _PROBE_AGAIN * hold_s
        self.probed_mbit, self.probed_until_s = mbit, now_s + again_s + _PROBE_LIMIT_S / 2
        if mbit > FASTER * self.known_mbit:
            self.probe_due_s = now_s + again_s
        elif self.doubts:
            self.probe_due_s = now_s + PROBE_EVERY_S * 2.0 ** (_DOUBTS - self.doubts)
            self.doubts -= 1
            self.usual_mbit = self.usual_mbit if self.doubts else self.known_mbit
        if _FULL * self.known_mbit <= mbit <= FASTER * self.known_mbit:
            self.unseen_s = self.unbound_s = 0.0  # it is as slow as before: there is nothing to try

    def with_probe(self, seen: Seen | None, now_s: float) -> Seen | None:
        """The evidence that counts: transfers show what a link has carried, a probe what it can carry."""
        if not (self.needs_probes and now_s < self.probed_until_s and self.probed_mbit > FASTER * self.known_mbit):
            # Transfers of a link that is idle now and then look fast: they don't show that a measurement was too low.
            if seen is None or not self.doubts:
                return seen
            return seen._replace(least_mbit=min(seen.least_mbit, self.known_mbit))
        if seen is not None and seen.most_mbit < SLOWER * self.known_mbit:
            return seen
        mbit = self.usual_mbit if self.probed_mbit > _PROBED_USUAL * self.usual_mbit else self.probed_mbit
        return Seen(mbit, mbit, self.sign or Sign.SENDS)

    def judge(self, seen: Seen, now_s: float) -> None:
        self.unseen_s = 0.0
        is_slower = seen.most_mbit < SLOWER * self.known_mbit
        # A link that is idle now and then shows no rate, but it may show that it is as fast as at the start.
        fastest_mbit = min(seen.least_mbit, self.usual_mbit)
        is_faster = fastest_mbit > FASTER * self.known_mbit
        trend = Trend.SLOWER if is_slower else Trend.FASTER if is_faster else Trend.SAME
        if trend is Trend.SAME and self.trend is not Trend.SAME:
            self.brief_s.append(now_s)
        if trend is not self.trend or now_s - self.seen_s > _SILENT_S:
            self.trend, self.held_s, self.seen, self.shown_mbit = trend, 0.0, [], []
        else:
            self.held_s += min(now_s - self.seen_s, 2 * EVERY_S)
        self.seen.append(seen)
        del self.seen[: -2 * _HOLDS]
        self.seen_s = now_s
        is_unbound = not self.has_share and math.isinf(seen.most_mbit) and trend is Trend.SAME
        self.unbound_s = self.unbound_s + EVERY_S if is_unbound else 0.0
        if self.unbound_s >= UNBOUND_S * 2 ** min(_MOST_DOUBLINGS, self.retries):
            self._try_usual_rate(now_s, self.sign)

    def miss(self, now_s: float) -> None:
        """Others showed their rates. A link of a rate that was seen while training is then taken to be as at the
        start: nothing would ever show that it is, as long as nothing is sent."""
        self.unseen_s += EVERY_S
        if self.unseen_s >= RETRY_S * 2 ** min(_MOST_DOUBLINGS, self.retries):
            self._try_usual_rate(now_s, self.sign)

    def _try_usual_rate(self, now_s: float, sign: Sign | None) -> None:
        """If it has another one, as ``sign`` showed, take it to be as at the start: if it is not, that will be seen."""
        if sign is not None:
            self.trend, self.held_s, self.seen_s = Trend.FASTER, math.inf, now_s
            self.seen = [Seen(math.inf, self.usual_mbit, sign)] * _HOLDS
            self.unseen_s, self.unbound_s, self.retries = 0.0, 0.0, self.retries + 1

    @property
    def is_suspected(self) -> bool:
        """It looks slow, and a probe can show whether it is."""
        if self.trend is not Trend.SLOWER or len(self.seen) < _HOLDS:
            return False
        is_proven = bool(self.shown_mbit) and self.shown_mbit[-1] <= _PROVEN * self._seen_mbit
        is_open = not is_proven and len(self.shown_mbit) < _MOST_SUSPECT_PROBES
        return is_open and self.seen[-1].sign in (Sign.SENDS, Sign.RECEIVES)

    def probe_reason(self, now_s: float, lately: _Lately) -> ProbeReason | None:
        """Why to probe it now; None: nothing asks for that yet."""
        if self.is_suspected and self.held_s >= self.hold_s(lately) - HOLD_S + _SUSPECT_S:
            return ProbeReason.LOOKS_SLOW
        if not self.needs_probes or self.probe_due_s > now_s:
            return None
        return ProbeReason.IN_DOUBT if self.doubts else ProbeReason.WAS_SLOW

    def order(self, number: int, machine: int, reason: ProbeReason) -> ProbeOrder:
        """The probe for that ``reason``."""
        rates = self.known_mbit, self.usual_mbit
        if reason is ProbeReason.LOOKS_SLOW:
            rates = self.new_mbit, self.known_mbit
        return ProbeOrder(number, machine, *rates, reason)

    def answer_suspicion(self, mbit: float) -> bool:
        """A probe has shown that it carries this much, or more: probes do not fill very fast links. True if it is not
        slow."""
        is_cleared = self.is_suspected and mbit >= SLOWER * self.known_mbit
        if is_cleared:
            self.trend, self.held_s, self.seen = Trend.SAME, 0.0, []
        elif self.is_suspected:
            self.shown_mbit.append(mbit)
        return is_cleared

    def is_due(self, now_s: float, lately: _Lately) -> bool:
        self.changes_s = [at_s for at_s in self.changes_s if now_s - at_s < REMEMBERED_S]
        if self.sign is None and not self.changes_s:
            self.retries = 0
        return self.trend is not Trend.SAME and len(self.seen) >= _HOLDS and self.held_s >= self.hold_s(lately)

    def hold_s(self, lately: _Lately) -> float:
        """For how long a rate must be another one."""
        doublings = max(0, len(self.changes_s) - 1, lately.epochs - _MOST_EPOCHS) + lately.cleared
        return HOLD_S * float(2 ** min(_MOST_DOUBLINGS, doublings))

    def brief_changes(self, now_s: float) -> int:
        """How many changes of the last minute did not last."""
        return sum(now_s - at_s < _RESTLESS_S for at_s in self.brief_s)

    def take_restless(self, now_s: float) -> bool:
        """True once, while it changes all the time."""
        is_restless = len(self.brief_s) == RESTLESS and now_s - self.brief_s[0] < _RESTLESS_S
        is_new = is_restless and now_s - self.told_restless_s >= REMEMBERED_S
        if is_restless:
            self.told_restless_s = now_s
        return is_new

    @property
    def _seen_mbit(self) -> float:
        """The rate that transfers show, of a time when all reports were of the new one."""
        return statistics.median(seen.most_mbit for seen in self.seen[-_LATEST:])

    @property
    def new_mbit(self) -> float:
        """The rate as it is now. A link that has become faster than its share needs waits for the others, and shows no
        rate: it is taken to be as fast as at the start."""
        mbit = self._seen_mbit
        if self.trend is Trend.SLOWER:
            return max(mbit, max(self.shown_mbit, default=0.0))
        return self.usual_mbit if self.trend is Trend.FASTER and mbit > SLOWER * self.usual_mbit else mbit


@dataclass(frozen=True, slots=True)
class Change:
    """The link of a machine has another rate. ``sign``: of the latest judgement."""

    machine: int
    before_mbit: float
    mbit: float
    sign: Sign


class RateWatch:
    """The links of a job's machines, by the member id of their worker, or of their server on a CPU machine. It has a
    method for each event and for each question of health.py."""

    def __init__(self) -> None:
        self._links: dict[int, _Link] = {}
        self._usages = UsageWindow(WINDOW_S)
        self._judged_s = -EVERY_S
        self._settled_s = 0.0
        self._epochs_s: list[float] = []  # when shares followed
        self._cleared_s: list[float] = []  # when a link looked slow and was not
        self._told: dict[int, float] = {}  # of changes that need no other shares: the rate
        self._probes = 0  # so far
        self._probe: ProbeOrder | None = None  # that has no answer yet
        self._probe_until_s = 0.0

    def set_rates(
        self,
        known_mbit: Mapping[int, float],
        now_s: float,
        idle: Collection[int] = (),
        usual_mbit: Mapping[int, float] | None = None,
        measured: Collection[int] = (),
    ) -> None:
        """The links that there are, with the rates by which the shares are from now on. Transfers before these are in
        use are no evidence. ``idle``: the machines without a share; ``usual_mbit``: the rates before a link became
        slow, where they have changed: an earlier scheduler may have seen it, or this one, with the group before;
        ``measured``: the machines that have not said what their links carry."""
        self._settled_s = now_s + SETTLE_S
        before, self._links = self._links, {}
        usual_mbit, fastest_mbit = usual_mbit or {}, max(known_mbit.values(), default=0.0)
        for machine, mbit in known_mbit.items():
            if (link := before.get(machine)) is None:
                link = _Link.of(usual_mbit.get(machine, mbit), mbit)
                if machine in measured and machine not in usual_mbit:
                    link.doubt(fastest_mbit)
            self._links[machine] = link
            link.known_mbit, link.trend, link.seen = mbit, Trend.SAME, []
            link.has_share, link.unseen_s, link.unbound_s = machine not in idle, 0.0, 0.0
            link.probed_mbit, link.probe_due_s = 0.0, self._settled_s
        self._usages.clear()
        self._probe = None

    def report(self, usages: Sequence[Usage], now_s: float) -> None:
        """A service has reported its latest transfers."""
        if now_s >= self._settled_s:
            self._usages.add(usages, now_s)

    def changes(self, now_s: float, answer_rates: Callable[[], Mapping[int, float]] = dict) -> list[Change]:
        """The links that have other rates now, those that are due and those that changed with them. Call it often.

        ``answer_rates``: those at which CPU machines' summation services answer, as parts of the known rates.
        """
        if now_s - self._judged_s < EVERY_S:
            return []
        self._judged_s = now_s
        known = {machine: link.known_mbit for machine, link in self._links.items()}
        found = seen_rates(self._usages.connections(now_s), known)
        for machine, rate in answer_rates().items() if now_s >= self._settled_s else ():
            if (link := self._links.get(machine)) is not None:
                answers = Seen(rate * link.known_mbit, rate * link.known_mbit, Sign.ANSWERS)
                found[machine] = link.slower(found.get(machine, answers), answers)
        found = {machine: seen for machine, seen in found.items() if self._is_judged(machine)}
        for machine, link in self._links.items():
            seen = link.with_probe(found.get(machine), now_s)
            if found and seen is not None and link.is_shown_by(seen):
                link.judge(seen, now_s)
            elif found:
                link.miss(now_s)
        self._epochs_s = [at_s for at_s in self._epochs_s if now_s - at_s < REMEMBERED_S]
        self._cleared_s = [at_s for at_s in self._cleared_s if now_s - at_s < REMEMBERED_S]
        lately = self._lately
        due = [link for link in self._links.values() if link.is_due(now_s, lately)]
        changed = {
            machine: link
            for machine, link in self._links.items()
            if link.trend is not Trend.SAME and len(link.seen) >= _HOLDS
        }
        if not due or self._awaits_probes(due, changed.values()):
            return []
        new = {machine: link.new_mbit for machine, link in changed.items()}
        rates = {machine: new.get(machine, link.known_mbit) for machine, link in self._links.items()}
        evened = dict(zip(rates, classes(list(rates.values())), strict=True))
        return [
            Change(machine, link.known_mbit, evened[machine], link.seen[-1].sign) for machine, link in changed.items()
        ]

    def _awaits_probes(self, due: Sequence[_Link], changed: Collection[_Link]) -> bool:
        """Some links look slow, and may not be. If most do, it is the network, and no probe would tell more."""
        is_everywhere = 2 * sum(link.trend is Trend.SLOWER for link in changed) > len(self._links)
        longest_s = max(link.held_s - link.hold_s(self._lately) for link in due)
        return not is_everywhere and longest_s < _CONFIRM_LIMIT_S and any(link.is_suspected for link in changed)

    @property
    def _lately(self) -> _Lately:
        return _Lately(len(self._epochs_s), len(self._cleared_s))

    def _is_judged(self, machine: int) -> bool:
        return machine in self._links and self._links[machine].usual_mbit >= tuning.SLOW_MBIT

    def take_probe(self, now_s: float) -> ProbeOrder | None:
        """The link to probe now; None while none is due, or the last probe is still awaited: two at a time would share
        what they measure. Tell ``probed`` of the result."""
        if now_s < self._settled_s or (self._probe is not None and now_s < self._probe_until_s):
            return None
        lately = self._lately
        due = [
            (reason, link.probe_due_s, machine)
            for machine, link in self._links.items()
            if (reason := link.probe_reason(now_s, lately)) is not None
        ]
        if not due:
            return None
        reason, _, machine = min(due)
        link, self._probes = self._links[machine], self._probes + 1
        if reason is not ProbeReason.LOOKS_SLOW:
            link.probe_due_s = now_s + PROBE_EVERY_S
        self._probe, self._probe_until_s = link.order(self._probes, machine, reason), now_s + _PROBE_LIMIT_S
        return self._probe

    def probed(self, machine: int, number: int, mbit: float, now_s: float) -> None:
        """A probe has shown what the link of ``machine`` carries in Mbit/s. That of an earlier epoch is ignored."""
        if self._probe is None or (self._probe.machine, self._probe.number) != (machine, number):
            return
        reason, self._probe = self._probe.reason, None
        link, mbit = self._links[machine], mbit if 0 < mbit < math.inf else 0.0
        if reason is not ProbeReason.LOOKS_SLOW:
            link.probed(mbit, now_s, link.hold_s(self._lately))
        elif link.answer_suspicion(mbit):
            self._cleared_s.append(now_s)

    def restless(self, now_s: float) -> list[int]:
        """Machines whose links change all the time, so that no share follows; each is told once. None where nearly all
        links look so: the machines are busy then, or what they send is too little to show rates."""
        changes = sorted(link.brief_changes(now_s) for link in self._links.values())
        if changes and changes[len(changes) // _FEW_QUIET] >= _BRIEF_BY_CHANCE:
            return []
        return [machine for machine, link in self._links.items() if link.take_restless(now_s)]

    def is_everywhere(self, changes: Iterable[Change]) -> bool:
        """More than half of all machines are slower than before: the network is, or the machines are busy, and no share
        of theirs is at fault."""
        return 2 * sum(change.mbit < change.before_mbit for change in changes) > len(self._links)

    def corrects(self, changes: Iterable[Change]) -> bool:
        """Some links carry more than was measured at the start. That is known once, whatever it saves now."""
        return any(change.mbit > change.before_mbit and self._links[change.machine].doubts for change in changes)

    def accept(self, changes: Iterable[Change], now_s: float) -> None:
        """The shares follow these changes."""
        self._epochs_s.append(now_s)
        fastest_mbit = max(link.known_mbit for link in self._links.values())
        for change in changes:
            self._links[change.machine].follow(change, max(fastest_mbit, change.mbit), now_s)
        self._told.clear()

    def is_known(self, machine: int) -> bool:
        """That its link is slow was said, with the time that it costs: it changed the shares."""
        link = self._links.get(machine)
        return link is not None and link.sign is not None

    def untold(self, changes: Sequence[Change]) -> list[Change]:
        """Those of ``changes``, which need no other shares, that were not told yet; now they are."""
        new = [each for each in changes if not SLOWER < each.mbit / self._told.get(each.machine, 1e-9) < FASTER]
        self._told.update((each.machine, each.mbit) for each in new)
        return new
