"""How local ranks, and the summation services of other machines, keep up. Pure; time is an argument.

What is measured leaves out the time that a rank or a server waits for others, so that one that is slow can be told from
one that waits:

    a rank's step:      from one hand-over to the next, but for the time when it has handed over all that it had
                        and has not got all of it back
    a server's answer:  from the push to the answer, of pushes that others had not to be waited for much longer: what
                        a server does while it waits can't be told; also relative to what the link needs for the
                        bytes that are on their way to this server

Whether it is much slower than the others is decided where all of them are known (scheduler/health.py).

OwnTimes are what a rank does between its operations, by the spans of its flight recorder. From one operation's end to
the next one's begin a rank does its own work; the rest of the time others, or the network, hold it up. An operation
that is still going on when the next one begins has not held it up. An operation through the service ends when the
service delivers its result: a rank that is suspended and takes it late has held itself up. Whether a rank is slow is
decided where all of them are known (scheduler/slow_ranks.py).
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from byteps_py.config.tuning import ANSWER_BASE_S
from byteps_py.proto import control_pb2 as pb
from byteps_py.system.flight_recorder import FlightSpan
from byteps_py.tensors import TensorSpec
from byteps_py.wording import operation_text
from byteps_py.worker.core.tensor import Part

#: Values of so many seconds count as one, their mean, weighted by how long each took: of a server that stands still
#: nine tenths of the time, most answers come at once, but a rank that waits for one mostly waits long.
SPAN_S = 0.5
#: The median of the latest spans is typical, of those of so many seconds: what is shorter may be the operating system's
#: doing. At least two: a single long one is a checkpoint, or an accident. (A rank that is very much slower is named
#: after two.)
WINDOW_S = 3.0
_MOST = 16
_LEAST_WEIGHT_S = 1e-6
#: What is slow in each step of so many seconds is slow: an operating system keeps a process waiting, or a link is full,
#: now and then only. A rank needs two steps; a server three, as the first and the last may be incomplete.
ROW_S = 0.5
_ROW_MOST = 64  # steps
_MOST_DELIVERIES = 8192  # between two reports, to a rank
#: The first steps of a process are no measure: libraries load what they need, and memory is touched for the first time.
WARM_UP_STEPS = 2
#: What an answer takes at its best, however small it is.
_BEST_S = 0.002
#: Others are waited for this long as a matter of course.
_LEAST_WAIT_S = 0.005


class Typical:
    """The latest values. They come in tuples; each position is judged by itself."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float, tuple[float, ...]]] = deque(maxlen=_MOST)  # how long, weight, means
        self._weight = 0.0
        self._sums: list[float] = []
        self._since: float | None = None
        self._closed = 0.0

    def add(self, since: float, now: float, *values: float) -> None:
        """``values`` are about the time from ``since`` to ``now``. The first says how long something took."""
        if since < self._closed:
            return  # of what the last span has seen it is no evidence of its own
        if self._since is None:
            self._since, self._weight, self._sums = since, 0.0, [0.0] * len(values)
        weight = max(values[0], _LEAST_WEIGHT_S)
        self._weight += weight
        self._sums = [total + weight * value for total, value in zip(self._sums, values, strict=True)]
        if now - self._since >= SPAN_S:
            means = tuple(total / self._weight for total in self._sums)
            self._spans.append((now - self._since, self._weight, means))
            self._since, self._closed = None, now

    def values(self) -> tuple[float, ...] | None:
        """None before there are enough; of an even number of spans the lower median."""
        latest: list[tuple[float, ...]] = []
        left_s = WINDOW_S
        for span_s, _, means in reversed(self._spans):
            if left_s <= 0 and len(latest) >= 2:
                break
            latest.append(means)
            left_s -= span_s
        if left_s > 0 or len(latest) < 2:
            return None
        return tuple(statistics.median_low(column) for column in zip(*latest, strict=True))

    def latest(self) -> tuple[float, ...] | None:
        """The least of the last two spans; None before there are two."""
        if len(self._spans) < 2:
            return None
        return tuple(min(column) for column in zip(self._spans[-2][2], self._spans[-1][2], strict=True))

    @property
    def awaited(self) -> float:
        """Of what took a time: so much was going on at a time, on average. 0 before the first span is over."""
        span_s = sum(span_s for span_s, _, _ in self._spans)
        return sum(weight for _, weight, _ in self._spans) / span_s if span_s else 0.0


class RecentSteps:
    """The least values of each of the last steps. Known when there are ``least`` steps."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._steps: deque[tuple[int, float, tuple[float, ...]]] = deque(maxlen=_ROW_MOST)  # number, since when, least
        self._until = 0.0

    def add(self, step: int, since: float, now: float, *values: float) -> None:
        """``values`` are about the time from ``since`` to ``now``."""
        self._until = now
        if self._steps and self._steps[-1][0] == step:
            _, first, before = self._steps.pop()
            since, values = min(since, first), tuple(map(min, before, values))
        self._steps.append((step, since, values))

    def values(self) -> list[tuple[float, ...]] | None:
        """Those of the latest in a row; None before there are enough."""
        latest: list[tuple[float, ...]] = []
        for _, since, values in reversed(self._steps):
            latest.append(values)
            if len(latest) >= self._least and (self._until - since >= ROW_S or len(latest) == _ROW_MOST):
                return latest
        return None


class DeliveredResult(NamedTuple):
    """A rank was told of its result of the tensor ``spec``."""

    spec: TensorSpec
    at_s: float


class _Rank:
    def __init__(self) -> None:
        self.pid = 0
        self.pending: set[int] = set()  # slots
        self.pending_since = math.inf  # since then there have been some
        self.step = 0  # rounds of the tensor that has most
        self.steps = 0  # that are over
        self.since = 0.0  # when this step began
        self.mark = 0.0  # of the last hand-over, or of the last delivery if nothing is pending
        self.own_s = self.wait_s = 0.0  # of this step
        self.typical = Typical()
        self.row = RecentSteps(2)
        self.delivered: deque[DeliveredResult] = deque(maxlen=_MOST_DELIVERIES)

    def end_step(self, now: float) -> None:
        """The next one begins."""
        self.typical.add(self.since, now, self.own_s, self.wait_s)
        self.row.add(self.step, self.since, now, self.own_s, self.wait_s)


class RankPace:
    """The local ranks. ``first_rank``: the global rank of the first."""

    def __init__(self, first_rank: int) -> None:
        self._first_rank = first_rank
        self._ranks: dict[int, _Rank] = {}
        self.step = 0  # the latest that any of them has begun

    def ready(self, local_rank: int, pid: int, slot: int, round_: int, now: float) -> None:
        """A rank has handed over (part of) its own round number ``round_``."""
        rank = self._ranks.get(local_rank)
        if rank is None or rank.pid != pid:
            rank = self._ranks[local_rank] = _Rank()
            rank.pid, rank.mark = pid, now
        rank.own_s += now - rank.mark
        rank.mark = now
        if not rank.pending:
            rank.pending_since = now
        rank.pending.add(slot)
        if round_ > rank.step:
            if rank.step:
                rank.steps += 1
                if rank.steps > WARM_UP_STEPS:
                    rank.end_step(now)
            rank.own_s = rank.wait_s = 0.0
            rank.step, rank.since = round_, now
            self.step = max(self.step, round_)

    def done(self, local_rank: int, slot: int, now: float) -> None:
        """It has got its result, or an error."""
        rank = self._ranks.get(local_rank)
        if rank is not None and slot in rank.pending:
            rank.pending.remove(slot)
            if not rank.pending:
                rank.wait_s += now - rank.mark
                rank.mark, rank.pending_since = now, math.inf

    def delivered(self, local_rank: int, spec: TensorSpec, now: float) -> None:
        """It was told of a result."""
        if (rank := self._ranks.get(local_rank)) is not None:
            rank.delivered.append(DeliveredResult(spec, now))

    def take_deliveries(self, local_rank: int) -> list[DeliveredResult]:
        """Since this was called before; the latest ones, if there were very many."""
        rank = self._ranks.get(local_rank)
        if rank is None:
            return []
        found = list(rank.delivered)
        rank.delivered.clear()
        return found

    def is_pending_since(self, time: float) -> bool:
        """A rank has had something to wait for all the time since then, if not the same."""
        return any(rank.pending_since <= time for rank in self._ranks.values())

    def report(self, here: Iterable[int]) -> list[pb.RankPace]:
        """Those of the local ranks ``here`` that have made steps."""
        found = []
        for local_rank in here:
            rank = self._ranks.get(local_rank)
            if rank is not None and (row := rank.row.values()) is not None:
                pace = pb.RankPace(rank=self._first_rank + local_rank, pid=rank.pid)
                pace.row_step_s = min(own_s for own_s, _ in row)
                pace.row_waited = min(wait_s / max(own_s + wait_s, _LEAST_WEIGHT_S) for own_s, wait_s in row)
                pace.step_s, pace.wait_s = rank.typical.values() or (0.0, 0.0)
                pace.last_step_s, pace.last_wait_s = rank.typical.latest() or (0.0, 0.0)
                found.append(pace)
        return found


class ServerPace:
    """The summation services by member id, with the rates of their links; ``skip``: that of this machine, which is no
    measure for the others."""

    def __init__(self, link_mbit: Mapping[int, float], skip: Collection[int]) -> None:
        self._link_mbit = link_mbit
        self._skip = skip
        self._pushed: dict[Part, tuple[float, int]] = {}  # when, and bytes on their way to the server
        self._on_the_way: dict[int, int] = dict.fromkeys(link_mbit, 0)
        self._answers: dict[int, tuple[Typical, RecentSteps]] = {}

    def pushed(self, part: Part, now: float) -> None:
        if part.server in self._skip or part.server not in self._on_the_way:
            return
        self.forget(part)
        self._on_the_way[part.server] += part.length
        self._pushed[part] = now, self._on_the_way[part.server]

    def answered(self, part: Part, waited_s: float, step: int, now: float) -> None:
        """``waited_s``: as the server says; ``step``: of the local ranks."""
        pushed = self._pushed.get(part)
        if pushed is None:
            return
        self.forget(part)
        since, ahead = pushed
        answer_s = max(0.0, now - since - waited_s)
        if waited_s > answer_s + _LEAST_WAIT_S:
            return
        mbit = self._link_mbit[part.server]
        link_s = ahead * 8 / (mbit * 1e6) if mbit else 0.0
        known = self._answers.get(part.server)
        if known is None:
            known = self._answers[part.server] = Typical(), RecentSteps(3)
        typical, row = known
        typical.add(since, now, answer_s, answer_s / (ANSWER_BASE_S + link_s))
        row.add(step, since, now, answer_s, answer_s / (_BEST_S + link_s))

    def forget(self, part: Part) -> None:
        """No answer is waited for any more."""
        if part in self._pushed:
            del self._pushed[part]
            self._on_the_way[part.server] -= part.length

    def report(self) -> list[pb.ServerPace]:
        found = []
        for server, (typical, row) in self._answers.items():
            usual, latest = typical.values(), row.values()
            if usual is None and latest is None:
                continue
            pace = pb.ServerPace(member_id=server, awaited=typical.awaited)
            pace.answer_s, pace.ratio = usual or (0.0, 0.0)
            pace.row_answer_s, pace.row_ratio = map(min, zip(*latest, strict=True)) if latest else (0.0, 0.0)
            found.append(pace)
        return found


#: Parts of a report.
MOST_PARTS = 8
FIRST_OPERATION = 0  # the kind of the part before a step's first operation
#: Seconds after a rank's first operation that do not count: programs load, compile and connect then.
WARM_UP_S = 5.0
_NS = 1e-9


class OwnTimes:
    """Of one rank. ``rank``: its number in the job; ``warm_up_s``: so long after its first operation nothing counts."""

    def __init__(self, rank: int, warm_up_s: float = WARM_UP_S) -> None:
        self._rank = rank
        self._warm_up_s = warm_up_s
        self._counts_from_ns: float | None = None
        self._last: FlightSpan | None = None  # the one that ends last
        self._begun_ns = 0.0  # when the latest one began
        self._stage = 0
        self._elapsed_s = self._own_s = 0.0
        self._parts: dict[int, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])  # count, sum, sum of squares
        self._delivered_ns: dict[str, deque[int]] = {}  # by the name of the operation

    def add_deliveries(self, deliveries: Iterable[DeliveredResult]) -> None:
        """In the order of time, before the spans that they end."""
        for spec, at_s in deliveries:
            name = operation_text(spec.name, spec.group)
            times = self._delivered_ns.get(name)
            if times is None:
                times = self._delivered_ns[name] = deque(maxlen=_MOST_DELIVERIES)
            times.append(round(at_s / _NS))

    def _ended_ns(self, span: FlightSpan) -> int:
        """When the rank could have gone on."""
        times = self._delivered_ns.get(span.group.name)
        while times and times[0] <= span.enqueued_ns:
            times.popleft()
        if not times:
            self._delivered_ns.pop(span.group.name, None)
            return span.ended_ns
        return min(times[0], span.ended_ns)

    def add(self, spans: Iterable[FlightSpan]) -> None:
        """Operations that are over, in the order in which they began."""
        for taken in spans:
            span = replace(taken, ended_ns=self._ended_ns(taken)) if taken.group.kind == "name" else taken
            last = self._last
            if span.group.dimension == "pp" and span.group.kind == "group" and self._rank in span.group.ranks:
                self._stage = span.group.ranks.index(self._rank)
            if self._counts_from_ns is None:
                self._counts_from_ns = span.enqueued_ns + self._warm_up_s / _NS
            if last is not None and last.enqueued_ns >= self._counts_from_ns:
                is_over = last.ended_ns <= span.enqueued_ns
                # Several may have begun since the one that ends last: the time before them is counted.
                since_ns = max(last.ended_ns if is_over else last.enqueued_ns, self._begun_ns)
                own_s = max(span.enqueued_ns - since_ns, 0) * _NS
                self._own_s += own_s
                self._elapsed_s += max(span.ended_ns - last.ended_ns, 0) * _NS
                part = self._parts[_kind(span, last)]
                part[0] += 1
                part[1] += own_s
                part[2] += own_s * own_s
            if last is None or span.ended_ns >= last.ended_ns:
                self._last = span
            self._begun_ns = max(self._begun_ns, span.enqueued_ns)

    def report(self) -> pb.RankSpans | None:
        """Since the last report; None if no operation has ended."""
        if not self._elapsed_s:
            return None
        found = pb.RankSpans(rank=self._rank, elapsed_s=self._elapsed_s, own_s=self._own_s, stage=self._stage)
        largest = sorted(self._parts.items(), key=lambda each: -each[1][1])[:MOST_PARTS]
        for kind, (count, own_s, squares_s2) in largest:
            found.parts.append(pb.SpanPart(kind=kind, count=int(count), own_s=own_s, squares_s2=squares_s2))
        self._elapsed_s = self._own_s = 0.0
        self._parts.clear()
        return found


def _kind(span: FlightSpan, last: FlightSpan) -> int:
    if span.step != last.step:
        return FIRST_OPERATION
    what = span.group.name if span.group.kind == "name" else span.group.description
    return zlib.crc32(f"{what} {span.operation}".encode()) or 1
