"""Names ranks, and machines' links, that make a running job slow: why, and at what price. Pure: time is an argument.

Ranks report what part of the time they did their own work, by kinds of operations that followed it, and services what
they sent to whom (see RankSpans and LinkUsage in the protocol). Ranks that wait for each other take equally long, so:

    the price of a rank = its own work, minus that of the ranks of its stage, as shares of the time
    reason              = in all kinds of work; only before a step's first operation; or in few long pieces
    the price of a link = the share of the time in which what it carries would already be there, at the rate of others

A link is compared with others that lead to the same machine (what it sends), or come from the same one (what it
receives). If only one direction is slow, acknowledgements make the other one look slow as well: which it is, the
counters of its machine's interface show (dataplane/link_rate.py). A rank or link is named once it has been slow for a
while, and is free again once it has been quick for longer.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.rate_watch import MBIT, Usage, UsageWindow

COMPUTES, DATA, PAUSES = "computes slowly", "waits for data", "pauses now and then"
LINK, LINK_OUT, LINK_IN = "has a slow link", "sends slowly", "receives slowly"
#: Reports of so many seconds are judged together; less than the second is no evidence.
WINDOW_S = 2.5
_LEAST_S = 1.2
#: Less than this is not worth a warning; and a rank must be this many deviations of its peers slower, and that many
#: times as far from them as the next one.
LEAST_PRICE = 0.08
_DEVIATIONS = 5.0
_AHEAD = 1.5
#: And so many deviations of what chance makes: pieces of work of a quiet job may differ much, as packed sequences do.
#: Of more ranks, the one that differs most by chance differs by more: with each doubling, by so many deviations more.
_CHANCE_DEVIATIONS, _CHANCE_RANKS, _CHANCE_DOUBLING = 6.0, 16, 1.5
#: So many judgements in a row name it; so many, below the part of the price, free it.
_NAMED_AFTER, _FREE_AFTER, _FREE_PART = 3, 12, 0.5
#: Its price is known once it is no more than so many times what it was before, or after so many judgements.
_STEADY, _NAMED_AT_LAST = 1.1, 7
_EVERY_S = 0.4
#: It waits for data if this share of what it takes longer lies before the first operation of steps, and other parts
#: are longer by less than that part of what the first one is.
_FIRST_SHARE, _REST = 0.75, 0.3
#: It pauses if fewer than this share of the pieces of its work make it slow.
_PAUSE_PIECES = 0.65
#: Fewer long pieces are an accident. So are those of one step, as a batch of long documents has a long forward pass and
#: a long backward pass: reports so far apart must each have this part of what they take longer.
_LEAST_PAUSES = 1.7
_PAUSES_APART_S, _PAUSE_PART = 0.45, 0.2
#: One long piece is none, either, if it is the second of its rank within so many seconds: some pauses fall into waits
#: for others, and are seen in no rank's own work.
_PAUSES_WITHIN_S = 6.0
_FIRST = 0  # the kind of work before a step's first operation
#: A slow link takes that many times as long as others, and so many times as long as the next slowest in its direction:
#: acknowledgements are late on busy machines. It is named after as many judgements as a price that is not known yet.
_SLOW_LINK = 2.0
_SLOW_LINK_AHEAD = 1.4
#: One direction is slow if it is so many times as slow as the other one.
_ONE_WAY = 2.0
_SLOW_WAY = 1.5
_LEAST_BUSY = 0.02  # of the time
#: Fewer bytes in a window show no rate: TCP sends as many at once, and so little may be requests alone, which wait for
#: their acknowledgements behind what is sent to others.
_LEAST_BYTES = 14_600
#: The other end of a Usage that is about all that a machine's link has sent, or received.
NETWORK = -1


@dataclass(frozen=True, slots=True)
class Straggler:
    """``who``: a rank, or the member id of a link's machine. ``price``: the share of the time that it costs."""

    who: int
    is_rank: bool
    reason: str
    price: float
    detail: str


@dataclass(slots=True)
class _Suspicion:
    straggler: Straggler  # as it was judged last
    most: float  # its highest price so far
    rows: int = 0
    quick: int = 0
    is_named: bool = False


class _PartSums(NamedTuple):
    pieces: int
    own_s: float
    squares_s2: float


_NOTHING = _PartSums(0, 0.0, 0.0)


class _Window:
    """A rank's latest reports. The parts are summed when they are asked for: of many ranks few are suspected."""

    def __init__(self) -> None:
        self._reports: deque[tuple[float, float, float, pb.RankSpans]] = deque()  # when it came, elapsed, own
        self.elapsed_s = self.own_s = 0.0
        self._parts: dict[int, _PartSums] | None = None

    def add(self, report: pb.RankSpans, now_s: float) -> None:
        elapsed_s, own_s = report.elapsed_s, report.own_s
        self._reports.append((now_s, elapsed_s, own_s, report))
        self.elapsed_s += elapsed_s
        self.own_s += own_s
        self._parts = None

    def forget(self, before_s: float) -> bool:
        """The reports that came earlier. False: there are no others."""
        if self._reports and self._reports[0][0] < before_s:
            while self._reports and self._reports[0][0] < before_s:
                self._reports.popleft()
            self.elapsed_s = self.own_s = 0.0
            for _, elapsed_s, own_s, _ in self._reports:
                self.elapsed_s += elapsed_s
                self.own_s += own_s
            self._parts = None
        return bool(self._reports)

    @property
    def stage(self) -> int:
        return self._reports[-1][3].stage if self._reports else 0

    @property
    def parts(self) -> Mapping[int, _PartSums]:
        """By kind."""
        if self._parts is None:
            self._parts = _summed(report for *_, report in self._reports)
        return self._parts

    def longest_at_s(self, usual_s: Mapping[int, float]) -> float:
        """When the report came whose pieces took longer than usual ones by the most."""
        return max((_longer_s(report, usual_s), at_s) for at_s, *_, report in self._reports)[1]

    def longer_for_s(self, usual_s: Mapping[int, float], part: float) -> float:
        """In how many seconds pieces took longer than usual ones, but for this part at the begin and at the end."""
        longer = [(at_s, max(_longer_s(report, usual_s), 0.0)) for at_s, *_, report in self._reports]
        sums_s = list(itertools.accumulate(longer_s for _, longer_s in longer))
        first = bisect.bisect_left(sums_s, part * sums_s[-1])
        last = bisect.bisect_left(sums_s, (1 - part) * sums_s[-1])
        return longer[last][0] - longer[first][0]


def _summed(reports: Iterable[pb.RankSpans]) -> dict[int, _PartSums]:
    parts: dict[int, _PartSums] = {}
    for part in (part for report in reports for part in report.parts):
        before = parts.get(part.kind, _NOTHING)
        parts[part.kind] = _PartSums(
            before.pieces + part.count, before.own_s + part.own_s, before.squares_s2 + part.squares_s2
        )
    return parts


class SlowRankWatch:
    """See the module. Times in seconds of any steady clock."""

    def __init__(self) -> None:
        self._windows: dict[int, _Window] = {}  # by rank
        self._machines: dict[int, int | None] = {}  # by rank
        self._usages = UsageWindow(WINDOW_S)
        self._suspicions: dict[tuple[bool, int], _Suspicion] = {}
        self._long_s: dict[int, list[float]] = {}  # by rank: when the reports of its latest long pieces came
        self._judged_s = -float("inf")

    def report(
        self, spans: Iterable[pb.RankSpans], usages: Sequence[Usage], now_s: float, machine: int | None = None
    ) -> None:
        """The report of a member. ``machine``: of its ranks, as in ``usages``."""
        for each in spans:
            if (window := self._windows.get(each.rank)) is None:
                window = self._windows[each.rank] = _Window()
            window.add(each, now_s)
            self._machines[each.rank] = machine
        self._usages.add(usages, now_s)

    def new(self, now_s: float) -> list[Straggler]:
        """Those that are named now, and were not before. Call it often."""
        if now_s - self._judged_s < _EVERY_S:
            return []
        self._judged_s = now_s
        self._forget(now_s)
        ranks = self._slow_ranks()
        # A rank that comes late sends and receives at the same time, and neither is quick then: its link is no reason.
        late = {self._machines.get(each.who) for each in ranks}
        links = [each for each in self._slow_links(now_s) if each.who not in late]
        found = {(each.is_rank, each.who): each for each in (*ranks, *links)}
        named = []
        for key, straggler in found.items():
            known = self._suspicions.setdefault(key, _Suspicion(straggler, straggler.price))
            is_same = known.straggler.reason == straggler.reason
            # Another reason is not named at once: of the first long pieces it is not known yet how many there will be.
            known.rows, known.quick = known.rows + 1 if is_same else min(known.rows, _NAMED_AFTER - 1), 0
            is_steady = straggler.price <= _STEADY * known.most
            known.straggler, known.most = straggler, max(known.most, straggler.price)
            least = _NAMED_AFTER if is_steady and straggler.is_rank else _NAMED_AT_LAST
            if not known.is_named and known.rows >= least:
                known.is_named = True
                named.append(straggler)
        for key, known in list(self._suspicions.items()):
            if key not in found:
                known.quick += 1
                # A pause that falls into a wait for others is seen in no rank's own work.
                known.rows = max(known.rows - 1, 0) if known.straggler.reason == PAUSES else 0
                if not (known.is_named or known.rows) or known.quick >= _FREE_AFTER:
                    del self._suspicions[key]
        return named

    def named(self) -> list[Straggler]:
        """All that are slow now, the dearest first."""
        slow = [known.straggler for known in self._suspicions.values() if known.is_named]
        return sorted(slow, key=lambda each: -each.price)

    def suspected_links(self) -> set[int]:
        """The machines whose links are named, or may soon be."""
        return {who for is_rank, who in self._suspicions if not is_rank}

    def _forget(self, now_s: float) -> None:
        for rank in [rank for rank, window in self._windows.items() if not window.forget(now_s - WINDOW_S)]:
            del self._windows[rank], self._machines[rank]
        for rank, times_s in list(self._long_s.items()):
            if times_s[-1] < now_s - _PAUSES_WITHIN_S:
                del self._long_s[rank]

    # ---- ranks -----------------------------------------------------------------------------------------------

    def _slow_ranks(self) -> list[Straggler]:
        stages: dict[int, dict[int, _Window]] = defaultdict(dict)
        for rank, window in self._windows.items():
            if window.elapsed_s >= _LEAST_S:
                stages[window.stage][rank] = window
        found = []
        for ranks in stages.values():
            if len(ranks) >= 3:
                found += self._slow_of_stage(ranks)
        return found

    def _slow_of_stage(self, ranks: Mapping[int, _Window]) -> list[Straggler]:
        shares = {rank: min(window.own_s / window.elapsed_s, 1.0) for rank, window in ranks.items()}
        usual = statistics.median_low(shares.values())
        deviation = 1.4826 * statistics.median(abs(share - usual) for share in shares.values())
        ordered = sorted(shares, key=lambda rank: -shares[rank])
        slow: list[Straggler] = []
        doublings = max(math.log2(len(self._windows) / _CHANCE_RANKS), 0.0)
        chance = _CHANCE_DEVIATIONS + _CHANCE_DOUBLING * doublings
        for rank, following in itertools.pairwise(ordered):
            price, next_price = shares[rank] - usual, max(shares[following] - usual, 0.0)
            known = self._suspicions.get((True, rank))
            least = LEAST_PRICE * (_FREE_PART if known is not None and known.is_named else 1.0)
            if price < max(least, _DEVIATIONS * deviation) or len(slow) >= max(1, len(ranks) // 4):
                break
            if price < chance * _chance_deviation(rank, ranks):
                break
            if (straggler := _explained(rank, price, ranks, self._long_s)) is None:
                continue
            slow.append(straggler)
            if price >= _AHEAD * next_price:
                return slow
        return []  # many are about equally far from the others: their data differ

    # ---- links -----------------------------------------------------------------------------------------------

    def _slow_links(self, now_s: float) -> list[Straggler]:
        elapsed_s = now_s - self._usages.since_s(now_s)
        if elapsed_s < _LEAST_S:
            return []
        totals: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
        connections = self._usages.connections(now_s)
        ways = _ways(connections)
        for usage in connections:
            if NETWORK in (usage.source, usage.target):
                continue
            total = totals[usage.source, usage.target]
            total[0] += usage.nbytes
            total[1] += max(usage.busy_s - usage.unread_s, 0.0)
        least_busy_s = _LEAST_BUSY * elapsed_s
        # While all wait for one link, the others carry what they have in no time: at least at this rate.
        known = {
            way: (nbytes, max(busy_s, least_busy_s))
            for way, (nbytes, busy_s) in totals.items()
            if nbytes >= _LEAST_BYTES
        }
        to, of = _rates(known, 1), _rates(known, 0)
        slower: dict[tuple[int, bool], list[tuple[float, float]]] = defaultdict(list)  # machine, sends: ratio, lost
        for (source, target), (nbytes, busy_s) in known.items():
            if totals[source, target][1] < least_busy_s:
                continue
            rate = nbytes / busy_s
            for machine, sends, rates in ((source, True, to[target]), (target, False, of[source])):
                if len(rates) >= 3:
                    ratio = _median_of_others(rates, rate) / rate
                    slower[machine, sends].append((ratio, busy_s * (1 - 1 / ratio) if ratio > 1 else 0.0))
        found: dict[int, Straggler] = {}
        least = {key: min(ratio for ratio, _ in each) for key, each in slower.items()}
        largest = {
            sends: heapq.nlargest(2, (ratio for (_, same), ratio in least.items() if same == sends))
            for sends in (True, False)
        }
        for (machine, sends), each in slower.items():
            ratio = least[machine, sends]
            first, second = heapq.nlargest(2, [1.0, 1.0, *largest[sends]])
            if ratio < _SLOW_LINK_AHEAD * (second if ratio == first else first):
                continue
            price = min(max(lost for _, lost in each) / elapsed_s, 1.0)
            if ratio < _SLOW_LINK or price < LEAST_PRICE:
                continue
            detail = f"at 1/{ratio:.2g} of the rate of other machines"
            reason, other_way = LINK_OUT if sends else LINK_IN, least.get((machine, not sends), 1.0)
            if (way := ways.get(machine)) is not None:
                detail = f"its link carries {way.sent_mbit:.3g} Mbit/s out and {way.received_mbit:.3g} in, {detail}"
            if way is not None and way.is_one_way:
                if sends != (way.slower_sending > way.slower_receiving):
                    continue  # only acknowledgements are late
            elif (way is not None and way.is_slow_both_ways) or (
                other_way >= _SLOW_LINK and _ONE_WAY * ratio > other_way > ratio / _ONE_WAY
            ):
                reason = LINK
            elif other_way > ratio:
                continue  # acknowledgements of the slow direction are late, so that this one is slow, too
            found[machine] = Straggler(machine, False, reason, price, detail)
        return list(found.values())


class _Way(NamedTuple):
    """How fast a machine's link carries data, in each direction: and how many times as slow as others' links."""

    sent_mbit: float
    received_mbit: float
    slower_sending: float
    slower_receiving: float

    @property
    def is_slow_both_ways(self) -> bool:
        return min(self.slower_sending, self.slower_receiving) >= _SLOW_WAY

    @property
    def is_one_way(self) -> bool:
        quick, slow = sorted((self.sent_mbit, self.received_mbit))
        less, more = sorted((self.slower_sending, self.slower_receiving))
        return slow >= _ONE_WAY * quick and more >= _SLOW_WAY * less


def _ways(usages: Iterable[Usage]) -> dict[int, _Way]:
    """Of the machines that have counted what their links carry."""
    mbit: dict[bool, dict[int, float]] = {True: {}, False: {}}  # whether they send: by machine
    for usage in usages:
        if NETWORK in (usage.source, usage.target):
            sends = usage.target == NETWORK
            mbit[sends][usage.source if sends else usage.target] = usage.nbytes * MBIT / usage.busy_s
    usual = {sends: statistics.median(rates.values()) for sends, rates in mbit.items() if len(rates) >= 3}
    both = mbit[True].keys() & mbit[False].keys() if len(usual) == 2 else ()
    return {
        each: _Way(
            mbit[True][each], mbit[False][each], usual[True] / mbit[True][each], usual[False] / mbit[False][each]
        )
        for each in both
    }


def _rates(known: Mapping[tuple[int, int], Sequence[float]], end: int) -> dict[int, list[float]]:
    """The rates of all transfers, in order, by the machine at this end: 0 sends, 1 receives."""
    found: dict[int, list[float]] = defaultdict(list)
    for way, (nbytes, busy_s) in known.items():
        found[way[end]].append(nbytes / busy_s)
    return {machine: sorted(rates) for machine, rates in found.items()}


def _median_of_others(ordered: Sequence[float], one: float) -> float:
    """The median of ``ordered`` without ``one`` of its values."""
    place, count = bisect.bisect_left(ordered, one), len(ordered) - 1
    low, high = ((count - 1) // 2, count // 2)
    return (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2


def _chance_deviation(rank: int, ranks: Mapping[int, _Window]) -> float:
    """By how much chance makes the share of the rank's own work differ, if its pieces scatter as its peers' do."""
    own, variance_s2 = ranks[rank], 0.0
    for kind, part in own.parts.items():
        peers = [window.parts[kind] for other, window in ranks.items() if other != rank and kind in window.parts]
        scatter = [each.squares_s2 / each.pieces - (each.own_s / each.pieces) ** 2 for each in peers if each.pieces]
        variance_s2 += part.pieces * max(statistics.fmean(scatter) if scatter else 0.0, 0.0)
    return math.sqrt(variance_s2) / own.elapsed_s


def _explained(
    rank: int, price: float, ranks: Mapping[int, _Window], long_s: dict[int, list[float]]
) -> Straggler | None:
    """Why it is slow, by the parts of its own work. None: it has had one long piece, or some at one time. ``long_s``:
    when ranks had long pieces, to which this one's is added."""
    own, others = ranks[rank], [window for other, window in ranks.items() if other != rank]
    usual_s: dict[int, float] = {}  # of one piece
    longer_s: dict[int, float] = {}  # of all pieces
    for kind, part in own.parts.items():
        pieces = [window.parts[kind] for window in others if kind in window.parts]
        usual_s[kind] = statistics.median(each.own_s / each.pieces for each in pieces) if pieces else 0.0
        longer_s[kind] = part.own_s - part.pieces * usual_s[kind]
    total = max(sum(longer_s.values()), 1e-9)
    share = min(own.own_s / own.elapsed_s, 1.0)
    detail = f"its own work takes {share:.0%} of the time, that of the others {share - price:.0%}"
    long, count = _long_pieces(own.parts, usual_s, longer_s, total)
    if count and long < _PAUSE_PIECES * count:
        at_s, times_s = own.longest_at_s(usual_s), long_s.setdefault(rank, [])
        if not times_s or at_s >= times_s[-1] + _PAUSES_APART_S:
            times_s[:] = [*(each for each in times_s if each >= at_s - _PAUSES_WITHIN_S), at_s]
        is_one = long < _LEAST_PAUSES or own.longer_for_s(usual_s, _PAUSE_PART) < _PAUSES_APART_S
        if is_one and len(times_s) < 2:
            return None
        return Straggler(rank, True, PAUSES, price, detail)
    first_s = longer_s.get(_FIRST, 0.0)
    rest_usual_s = sum(own.parts[kind].pieces * usual_s[kind] for kind in usual_s if kind != _FIRST)
    first_usual_s = own.parts[_FIRST].pieces * usual_s[_FIRST] if _FIRST in own.parts else 0.0
    rest_ratio, first_ratio = (total - first_s) / max(rest_usual_s, 1e-6), first_s / max(first_usual_s, 1e-6)
    if first_s >= _FIRST_SHARE * total and rest_usual_s >= 0.1 * first_usual_s and rest_ratio < _REST * first_ratio:
        return Straggler(rank, True, DATA, price, f"{detail}: the difference lies before a step's first operation")
    return Straggler(rank, True, COMPUTES, price, detail)


def _longer_s(report: pb.RankSpans, usual_s: Mapping[int, float]) -> float:
    """By how much the pieces take longer than as many usual ones."""
    return sum(part.own_s - part.count * usual_s[part.kind] for part in report.parts)


def _long_pieces(
    parts: Mapping[int, _PartSums], usual_s: Mapping[int, float], longer_s: Mapping[int, float], total_s: float
) -> tuple[float, float]:
    """Of the pieces in the kinds that are longer, how many make them so, and how many there are: they are equal if all
    are longer alike."""
    count = squares = longer = 0.0
    for kind in sorted(longer_s, key=lambda kind: -longer_s[kind]):
        if longer >= _FIRST_SHARE * total_s:
            break
        part, usual = parts[kind], usual_s[kind]
        longer += longer_s[kind]
        count += part.pieces
        squares += part.squares_s2 - 2 * usual * part.own_s + part.pieces * usual * usual
    return (longer * longer / squares if squares > 0 else count), count


def straggler_sentence(straggler: Straggler, name: str) -> str:
    """``name``: of the rank's process, or of the machine.

    >>> straggler_sentence(Straggler(3, True, COMPUTES, 0.31, "its own work takes longer"), "worker 1, host gpu1")
    'rank 3 (worker 1, host gpu1) computes slowly: 31% of the time; its own work takes longer'
    """
    who = f"rank {straggler.who} ({name})" if straggler.is_rank else name
    return f"{who} {straggler.reason}: {straggler.price:.0%} of the time; {straggler.detail}"
