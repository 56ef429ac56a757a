"""Ranks and summation services that are much slower than the others. Pure.

Communication services report typical times with their heartbeats, and the shortest of the latest times
(worker/core/pace.py). A member is slow if it takes BYTEPS_STRAGGLER times as long as the median of the others. It is
also slow if it takes 1.5 times that long in each of its last steps; a rank also if it does so lately, on average. A
rank is slow only if the others wait for it meanwhile. A slow member is warned about at once, and then again every
``again_s`` while it lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from byteps_py.proto import control_pb2 as pb
from byteps_py.wording import count_text, ranks_text

#: A member that takes less than this longer, for a step or an answer, may only have waited for a processor. Where there
#: are more processes than processors, that happens to all members in turn.
LEAST_STEP_S = 0.1
LEAST_ANSWER_S = 0.05
#: The same for a member that takes longer every time, without a quick step or answer in between.
LEAST_ROW_STEP_S = 0.002
LEAST_ROW_ANSWER_S = 0.01
#: A member that has been slow only for a second, or two steps, must be slower by this factor.
_LATELY = 1.5
#: Others must spend this part of the time that a slow rank takes longer waiting.
_WAITING = 0.5


@dataclass(frozen=True, slots=True)
class Slow:
    """One rank, or one summation service: the seconds that it takes, those that the others take, and the ratio."""

    is_rank: bool
    who: int  # rank, or member id
    pid: int  # of a rank
    takes_s: float
    others_s: float
    times: float


class _Answers(NamedTuple):
    """One machine's report on one server."""

    times: float  # how many times as long as the others it takes
    takes_s: float
    others_s: float
    awaited: float


def _median(said: Iterable[_Answers]) -> _Answers:
    """The median report, weighted by how much was waited for: a machine that gives first and waits for others sees
    little of a server's own time."""
    ordered = sorted(said)
    half = sum(answers.awaited for answers in ordered) / 2
    for answers in ordered:
        half -= answers.awaited
        if half <= 0:
            break
    return answers


def _median_without(ordered: Sequence[float], one: float) -> float:
    """The lower median of ``ordered`` without ``one`` of its values."""
    middle = (len(ordered) - 2) // 2
    return ordered[middle + (one <= ordered[middle])]


class _RankReports(NamedTuple):
    rank: int
    pid: int
    step_s: float
    wait_s: float


class _Server(NamedTuple):
    member_id: int
    answer_s: float
    ratio: float
    awaited: float


def _typical(pace: pb.ServerPace) -> _Server:
    return _Server(pace.member_id, pace.answer_s, pace.ratio, pace.awaited)


def _row(pace: pb.ServerPace) -> _Server:
    return _Server(pace.member_id, pace.row_answer_s, pace.row_ratio, pace.awaited)


def _slow_ranks(paces: Sequence[_RankReports], factor: float) -> Iterator[Slow]:
    if len(paces) < 2:
        return
    steps_s, waits_s = sorted(pace.step_s for pace in paces), sorted(pace.wait_s for pace in paces)
    for pace in paces:
        others_s = _median_without(steps_s, pace.step_s)
        longer_s = pace.step_s - others_s
        is_slow = longer_s >= LEAST_STEP_S and pace.step_s >= factor * others_s
        if is_slow and _median_without(waits_s, pace.wait_s) >= _WAITING * longer_s:
            yield Slow(True, pace.rank, pace.pid, pace.step_s, others_s, pace.step_s / max(others_s, 1e-6))


def _slow_in_a_row(paces: Sequence[pb.RankPace], factor: float) -> Iterator[Slow]:
    """Ranks that work most of the time, while the others wait most of it, and take longer in each step."""
    if len(paces) < 2:
        return
    steps_s, waited = sorted(pace.row_step_s for pace in paces), sorted(pace.row_waited for pace in paces)
    for pace in paces:
        others_s = _median_without(steps_s, pace.row_step_s)
        is_slow = pace.row_step_s >= max(others_s + LEAST_ROW_STEP_S, factor * others_s)
        if is_slow and pace.row_waited <= _WAITING <= _median_without(waited, pace.row_waited):
            yield Slow(True, pace.rank, pace.pid, pace.row_step_s, others_s, pace.row_step_s / max(others_s, 1e-6))


def _slow_servers(reports: Sequence[Sequence[_Server]], factor: float, least_s: float) -> Iterator[Slow]:
    """``reports``: one of each machine; ``least_s``: smaller differences are no evidence."""
    evidence: dict[int, list[_Answers]] = {}
    for report in reports:
        # Servers are compared as one machine sees them, so that a slow machine makes no server look slow. A machine may
        # use a single server, where two machines have the servers of each other.
        others = report
        if len(report) == 1:
            others = [*report, *(p for each in reports for p in each if p.member_id != report[0].member_id)]
        if len(others) < 2:
            continue
        ratios = sorted(other.ratio for other in others)
        answers_s = sorted(other.answer_s for other in others)
        for pace in report:
            # Compared with 1 at least: others that are faster than their links should be make no server slow.
            usual = max(1.0, _median_without(ratios, pace.ratio))
            others_s = _median_without(answers_s, pace.answer_s)
            answers = _Answers(pace.ratio / usual, pace.answer_s, others_s, pace.awaited)
            evidence.setdefault(pace.member_id, []).append(answers)
    for server, said in evidence.items():
        median = _median(said)
        if median.takes_s - median.others_s >= least_s and median.times >= factor:
            yield Slow(False, server, 0, median.takes_s, median.others_s, median.times)


class PaceWatch:
    """The latest reports of all members. ``factor``: BYTEPS_STRAGGLER; ``again_s``: seconds between two warnings."""

    def __init__(self, factor: float, again_s: float) -> None:
        self._factor = factor
        self._again_s = again_s
        self._ranks: dict[int, list[pb.RankPace]] = {}
        self._servers: dict[int, list[pb.ServerPace]] = {}
        self._warned_s: dict[tuple[bool, int], float] = {}

    def report(self, member_id: int, ranks: Iterable[pb.RankPace], servers: Iterable[pb.ServerPace]) -> None:
        """Replace this member's reports."""
        self._ranks[member_id], self._servers[member_id] = list(ranks), list(servers)

    def slow(self, present: Collection[int]) -> list[Slow]:
        """The slow ranks and services of the members with these ids."""
        here = frozenset(present)
        ranks = [pace for member in present for pace in self._ranks.get(member, ())]
        servers = [[pace for pace in self._servers.get(member, ()) if pace.member_id in here] for member in present]
        late = _LATELY * self._factor
        slow = [
            *_slow_ranks([_RankReports(p.rank, p.pid, p.step_s, p.wait_s) for p in ranks if p.step_s], self._factor),
            *_slow_ranks(
                [_RankReports(p.rank, p.pid, p.last_step_s, p.last_wait_s) for p in ranks if p.last_step_s], late
            ),
            *_slow_in_a_row([p for p in ranks if p.row_step_s], late),
            *_slow_servers([[_typical(p) for p in of if p.answer_s] for of in servers], self._factor, LEAST_ANSWER_S),
            *_slow_servers([[_row(p) for p in of if p.row_answer_s] for of in servers], late, LEAST_ROW_ANSWER_S),
        ]
        return list({(each.is_rank, each.who): each for each in reversed(slow)}.values())[::-1]

    def take_due(self, slow: list[Slow], now_s: float) -> list[Slow]:
        """The ``slow`` members to warn about now; they count as warned about afterwards."""
        due = [s for s in slow if now_s - self._warned_s.get((s.is_rank, s.who), -float("inf")) >= self._again_s]
        self._warned_s.update(((s.is_rank, s.who), now_s) for s in due)
        return due


def slow_sentences(
    slow: Iterable[Slow], who: Callable[[Iterable[int]], str], servers: Mapping[int, str], ranks: int
) -> list[str]:
    """One sentence each. ``who`` names the processes of ranks, ``servers`` the services by member id; ``ranks``: number
    of the job's ranks."""
    lines = []
    for each in slow:
        if each.is_rank:
            lines.append(
                f"{ranks_text([each.who])} (process {each.pid}; {who([each.who])}) takes {_seconds(each.takes_s)} from "
                f"step to step, {_times(each.times)} the {_seconds(each.others_s)} of the others: "
                f"{count_text(ranks - 1, 'rank')} {'waits' if ranks == 2 else 'wait'} for it"
            )
        else:
            lines.append(
                f"{servers.get(each.who, 'a summation service')} answers after {_seconds(each.takes_s)}, the others "
                f"after {_seconds(each.others_s)}: relative to the bytes in flight, it takes {_times(each.times)} as "
                "long; the service, its machine or the network to it is slow"
            )
    return lines


def _seconds(time_s: float) -> str:
    return f"{time_s:.1f} s" if time_s >= 10 else f"{time_s:.2g} s" if time_s >= 1 else f"{1000 * time_s:.3g} ms"


def _times(times: float) -> str:
    return f"{times:.0f} times" if times < 1000 else "over 1000 times"
