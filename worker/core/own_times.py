"""What a rank does between its operations, for the scheduler: by the spans of its flight recorder. Pure.

From one operation's end to the next one's begin a rank does its own work; the rest of the time others, or the network,
hold it up. An operation that is still going on when the next one begins has not held it up. Whether a rank is slow is
decided where all of them are known (scheduler/slow_ranks.py).
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable

from byteps_py.proto import control_pb2 as pb
from byteps_py.system.flight_recorder import FlightSpan

#: Parts of a report.
MOST_PARTS = 8
FIRST = 0  # the kind of the part before a step's first operation
#: Seconds after a rank's first operation that do not count: programs load, compile and connect then.
WARM_UP_S = 5.0
_NS = 1e-9


class OwnTimes:
    """Of one rank. ``rank``: its number in the job; ``warm_up_s``: so long after its first operation nothing counts."""

    def __init__(self, rank: int, warm_up_s: float = WARM_UP_S) -> None:
        self._rank = rank
        self._warm_up_s = warm_up_s
        self._counts_from_ns: float | None = None
        self._last: FlightSpan | None = None
        self._stage = 0
        self._elapsed_s = self._own_s = 0.0
        self._parts: dict[int, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])  # count, sum, sum of squares

    def add(self, spans: Iterable[FlightSpan]) -> None:
        """Operations that are over, in the order in which they began."""
        for span in spans:
            last = self._last
            if span.group.dimension == "pp" and span.group.kind == "group" and self._rank in span.group.ranks:
                self._stage = span.group.ranks.index(self._rank)
            if self._counts_from_ns is None:
                self._counts_from_ns = span.enqueued_ns + self._warm_up_s / _NS
            if last is not None and last.enqueued_ns >= self._counts_from_ns:
                is_over = last.ended_ns <= span.enqueued_ns
                own_s = max(span.enqueued_ns - (last.ended_ns if is_over else last.enqueued_ns), 0) * _NS
                self._own_s += own_s
                self._elapsed_s += max(span.ended_ns - last.ended_ns, 0) * _NS
                part = self._parts[_kind(span, last)]
                part[0] += 1
                part[1] += own_s
                part[2] += own_s * own_s
            if last is None or span.ended_ns >= last.ended_ns:
                self._last = span

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
        return FIRST
    what = span.group.name if span.group.kind == "name" else span.group.description
    return zlib.crc32(f"{what} {span.operation}".encode()) or 1
