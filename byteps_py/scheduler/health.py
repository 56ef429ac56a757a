"""The members' health, as heartbeats show it: dead members, slow members, and the waits of a group. Pure.

Time is an argument. How stalls are found: stalls.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from byteps_py.config import tuning
from byteps_py.config.tuning import ANSWER_BASE_S
from byteps_py.errors import ProtocolError
from byteps_py.failure_detector import FailureDetector
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.job import Job, MessageHandler, Outgoing, ranks_of, to_each
from byteps_py.scheduler.pair_watch import SETTLE_S, PairUsage, PairWatch, RelayChange, RelayState
from byteps_py.scheduler.rank_group import RankGroup
from byteps_py.scheduler.rate_watch import LEAST_GAIN, LEAST_RETURN, MBIT, Change, RateWatch, Usage
from byteps_py.scheduler.roster import ClusterConfig, MemberRecord
from byteps_py.scheduler.slow_ranks import NETWORK, SlowRankWatch, Straggler, straggler_sentence
from byteps_py.scheduler.stalls import Stall, StallWatch, StepSequences, stall_sentences, stall_warnings
from byteps_py.wording import count_text, ranks_text

DOUBT_INTERVALS = 3
_KEPT = 100  # how many pauses of the scheduler itself are remembered
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
#: The time between two searches for slow members. A search takes time: each of many machines reports on as many
#: servers.
_COMPARE_S = 0.5
#: The same between two searches for what ranks wait for: where one rank is late, all machines report.
_SEARCH_S = 0.25
#: A machine sends its filler to so many others at most.
_MOST_PROBED = 4
#: A service that answers later than the others by less than this answers at its link's rate.
LEAST_LATE_S = 0.015
_LEAST_S = 1e-6


class LivenessMonitor:
    """Judges whether silent members of one job are dead. ``detector_class``: the class of their detectors; tests name
    another one.

    A member's timeout follows from its own heartbeats so far (failure_detector.py). Two kinds of silence are forgiven
    for longer. A worker that gets no processor time on a loaded machine is alive, and losing it would end the job,
    whereas others replace a summation service: so a worker has more time while another process of its machine sends
    messages. And processes that start together (ranks import torch, services load kernels) hold each other up for
    seconds. Members of a large job speak less often, as the numbers with which they registered say, and have as much
    longer.
    """

    detector_class: type[FailureDetector] = FailureDetector

    def __init__(self, config: ClusterConfig) -> None:
        self._interval_s, self._timeout_s = config.heartbeat_interval_s, config.heartbeat_timeout_s
        self._ceiling_s = config.patience_s
        self._last_tick_s: float | None = None
        self._awake_since_s = -float("inf")
        self._pauses: list[tuple[float, float]] = []  # (end, duration) of each pause, the latest last

    def tick(self, now_s: float) -> None:
        """Call a few times per second. A late tick shows that the scheduler itself did not run (it was suspended, or
        got no processor time) and received no message. Such a pause counts for no member's silence, and no member is
        dead before the scheduler has listened for a whole timeout again. (Silences are not counted from zero after a
        pause: on a busy machine they would never reach ten timeouts.)"""
        if self._last_tick_s is not None and now_s - self._last_tick_s > self._timeout_s / 2:
            self._awake_since_s = now_s
            self._pauses = [*self._pauses[1 - _KEPT :], (now_s, now_s - self._last_tick_s)]
        self._last_tick_s = now_s

    def on_heartbeat(self, member: MemberRecord, now_s: float) -> None:
        """A message arrived on the member's connection. A pause of the scheduler does not make it late."""
        late_tick_s = 0.0 if self._last_tick_s is None else now_s - max(self._last_tick_s, member.last_seen_s)
        deaf_s = late_tick_s if late_tick_s > self._timeout_s / 2 else 0.0
        self._detector(member).on_heartbeat(max(0.0, self._silence_s(member, now_s) - deaf_s))

    def started(self, member: MemberRecord) -> None:
        """The member is ready for work."""
        self._detector(member).started()

    def timeout_s(self, member: MemberRecord) -> float:
        """The silence, in seconds, after which this member counts as dead."""
        return self._detector(member).timeout_s()

    def lateness(self, member: MemberRecord) -> float:
        """The same, in units of its shortest timeout."""
        return self.timeout_s(member) / self._detector(member).floor_s

    def too_long(
        self, member: MemberRecord, present: Sequence[MemberRecord], now_s: float, is_forming: bool = False
    ) -> str:
        """Why the member counts as dead, in words; empty while it does not. ``present``: all members, with this one.
        ``is_forming``: the cluster is not complete yet."""
        silence_s, detector = self._silence_s(member, now_s), self._detector(member)
        if detector.suspicion(silence_s) < 1 or now_s - self._awake_since_s < detector.floor_s:
            return ""
        others_late_s = max((self._detector(m).lateness_s for m in present if m is not member), default=0.0)
        if detector.suspicion(silence_s, others_late_s) < 1:
            return ""
        here = [other for other in present if other.facts.machine_id == member.facts.machine_id]
        is_starting = is_forming or not all(other.is_ready for other in here)
        is_heard_beside = any(self._silence_s(other, now_s) < self._detector(other).floor_s for other in here)
        slow = is_starting or (member.is_worker and is_heard_beside)
        if slow and silence_s < detector.ceiling_s:
            return ""
        return detector.why(silence_s)

    def doubt(self, member: MemberRecord, now_s: float) -> str:
        """Why a present member may be dead, for the status, in words; empty if there is no doubt."""
        silence_s = self._silence_s(member, now_s)
        doubt_s = DOUBT_INTERVALS * self._detector(member).interval_s
        return f"silent for {silence_s:.1f} s" if member.is_present and silence_s > doubt_s else ""

    def _detector(self, member: MemberRecord) -> FailureDetector:
        if member.detector is None:
            pace = tuning.control_pace(member.facts.num_workers, member.facts.num_servers)
            floor_s = tuning.silence_s(self._interval_s, self._timeout_s, pace)
            ceiling_s = self._ceiling_s if pace == 1 else max(self._ceiling_s, 2 * floor_s)
            member.detector = self.detector_class(self._interval_s * pace, floor_s, ceiling_s)
        member.detector.has_slow_link = tuning.is_slow(
            member.link_mbit
        )  # once the cluster is complete, and as measured
        return member.detector

    def _silence_s(self, member: MemberRecord, now_s: float) -> float:
        deaf_s = sum(for_s for until_s, for_s in self._pauses if until_s > member.last_seen_s)
        return now_s - member.last_seen_s - deaf_s


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

    times: float  # how many times as long as the others it takes, relative to what their links need
    takes_s: float
    others_s: float
    awaited: float
    ratio: float  # to what its link needs


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


def _server_answers(reports: Sequence[Sequence[_Server]]) -> dict[int, _Answers]:
    """Of each server, the median of what machines say. ``reports``: one of each machine."""
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
            answers = _Answers(pace.ratio / usual, pace.answer_s, others_s, pace.awaited, pace.ratio)
            evidence.setdefault(pace.member_id, []).append(answers)
    return {server: _median(said) for server, said in evidence.items()}


def _slow_servers(reports: Sequence[Sequence[_Server]], factor: float, least_s: float) -> Iterator[Slow]:
    """``least_s``: smaller differences are no evidence."""
    for server, median in _server_answers(reports).items():
        if median.takes_s - median.others_s >= least_s and median.times >= factor:
            yield Slow(False, server, 0, median.takes_s, median.others_s, median.times)


class PaceWatch:
    """Finds ranks and summation services that are much slower than the others, by the latest reports of all members.
    ``factor``: BYTEPS_STRAGGLER; ``again_s``: seconds between two warnings.

    Communication services report typical times with their heartbeats, and the shortest of the latest times
    (worker/core/pace.py). A member is slow if it takes BYTEPS_STRAGGLER times as long as the median of the others. It
    is also slow if it takes 1.5 times that long in each of its last steps; a rank also if it does so lately, on
    average. A rank is slow only if the others wait for it meanwhile. A slow member is warned about at once, and then
    again every ``again_s`` while it lasts.
    """

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
        ranks = [pace for member in present for pace in self._ranks.get(member, ())]
        servers = self._reports_on_servers(present)
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

    def answer_rates(self, present: Collection[int]) -> dict[int, float]:
        """The rate at which each service answers, as a part of that of its link: less than 1 if it takes longer than
        the others, more if it takes less time than its link is thought to need. Where it does neither, the answers say
        nothing: they may wait for what their machine sends to others."""
        reports = [[_typical(pace) for pace in of if pace.answer_s] for of in self._reports_on_servers(present)]
        found = {}
        for server, answers in _server_answers(reports).items():
            is_late = answers.times > 1 and answers.takes_s - answers.others_s >= LEAST_LATE_S
            times = answers.times if is_late else answers.ratio
            if is_late or times < 1:
                link_s = answers.takes_s / times - ANSWER_BASE_S
                found[server] = max(link_s, _LEAST_S) / max(answers.takes_s - ANSWER_BASE_S, _LEAST_S)
        return found

    def _reports_on_servers(self, present: Collection[int]) -> list[list[pb.ServerPace]]:
        here = frozenset(present)
        return [[pace for pace in self._servers.get(member, ()) if pace.member_id in here] for member in present]

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


def link_sentences(changes: Iterable[Change], who: Mapping[int, str]) -> list[str]:
    """One sentence for each link that has another rate. ``who``: the member of the machine."""
    lines = []
    for each in changes:
        rates = f"{_mbit(each.mbit)} Mbit/s instead of {_mbit(each.before_mbit)}"
        why = f", {each.sign.value}" if each.mbit < each.before_mbit else ""
        lines.append(f"the link of {who.get(each.machine, 'a machine')} carries {rates}{why}")
    return lines


def network_sentence(changes: Iterable[Change], links: int) -> str:
    """Most of ``links`` links carry less."""
    slower = [each for each in changes if each.mbit < each.before_mbit]
    now, before = _range(each.mbit for each in slower), _range(each.before_mbit for each in slower)
    return (
        f"{len(slower)} of {links} links carry {now} Mbit/s instead of {before}: the network or the machines are busy; "
        "all shares stay"
    )


def _mbit(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _range(values: Iterable[float]) -> str:
    texts = [_mbit(value) for value in sorted(values)]
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def _divided(usage: Usage, by: float) -> Usage:
    return usage._replace(nbytes=int(usage.nbytes / by), busy_s=usage.busy_s / by, unread_s=usage.unread_s / by)


def _whole_link(member: MemberRecord, rates: pb.InterfaceRates) -> list[Usage]:
    """The bytes that the member's link carried in each direction: to and from the network."""
    found = [
        Usage(member.id, member.id, NETWORK, rates.sent_bytes, rates.sent_s, 0.0),
        Usage(member.id, NETWORK, member.id, rates.received_bytes, rates.received_s, 0.0),
    ]
    return [usage for usage in found if usage.nbytes and usage.busy_s > 0]


def relay_sentences(changes: Iterable[RelayChange], who: Mapping[int, str]) -> list[str]:
    """One sentence for each pair of machines whose ranks reach each other through a third one, or directly again; none
    of trials, nor of third machines that have left: others tell of these. ``who``: the member of each machine."""
    lines = []
    for each in (change for change in changes if change.is_news):
        first, second, third = (who.get(machine, "a machine that has left") for machine in (*each.pair, each.relay))
        if each.state is RelayState.RELAYED:
            lines.append(
                f"the way between {first} and {second} carries {each.direct_mbit:.0f} Mbit/s, less than their links: "
                f"their ranks reach each other through {third} as well, with {each.total_mbit:.0f} Mbit/s in all"
            )
        else:
            lines.append(
                f"the way between {first} and {second} carries {each.direct_mbit:.0f} Mbit/s again: their ranks reach "
                "each other directly"
            )
    return lines


def _seconds(time_s: float) -> str:
    return f"{time_s:.1f} s" if time_s >= 10 else f"{time_s:.2g} s" if time_s >= 1 else f"{1000 * time_s:.3g} ms"


def _times(times: float) -> str:
    return f"{times:.0f} times" if times < 1000 else "over 1000 times"


class GroupWatch:
    """The heartbeats of one group's members: their waits, and slow ranks. Decides nothing about members.

    The watches of links and ranks judge the reports of some seconds together. Members of a large job report less often,
    so for these watches time goes slower: seconds are divided by the job's pace, and so is what was sent in them.
    """

    def __init__(self, job: Job, group: RankGroup) -> None:
        self._slower = tuning.report_pace(job.config.num_workers, job.config.num_servers)
        self._job, self._group = job, group
        self._stalls = StallWatch(job.config.stall_warn_s)
        self._steps = StepSequences()
        self._pace = PaceWatch(job.config.straggler, job.config.stall_warn_s)
        self._compared_s = -_COMPARE_S
        self._searched_s: float | None = None  # when tensors and barriers that wait for long were looked for last
        self._waiting: set[int] = set()  # members whose ranks have waited for long, as they reported last
        self._links = RateWatch()
        self._pairs = PairWatch()
        self._strays_told_s = -SETTLE_S  # when ranks were last told to leave third machines of an earlier scheduler
        self._links_epoch = 0  # whose rates the links have
        self._remarks: list[str] = []  # on links, for the workers
        self._stragglers = SlowRankWatch()

    def message_handlers(self) -> Mapping[str, MessageHandler]:
        """The handlers of reports, by kind."""
        return {"heartbeat": self._heartbeat, "probed": self._probed, "stack_report": self._stack_report}

    def _heartbeat(self, member: MemberRecord, heartbeat: pb.Heartbeat, now_s: float) -> Outgoing:
        """Returns the warnings that are due."""
        if heartbeat.bare:
            return []
        member.statistics, member.shadow = heartbeat.statistics, heartbeat.shadow
        member.progress = heartbeat.progress
        if not all(pace.rank in member.ranks for pace in heartbeat.ranks):
            raise ProtocolError("its heartbeat has the pace of ranks that are not its own")
        if not all(each.rank in member.ranks for each in heartbeat.steps):
            raise ProtocolError("its heartbeat has the steps of ranks that are not its own")
        if not all(each.rank in member.ranks for each in heartbeat.progress):
            raise ProtocolError("its heartbeat has the progress of ranks that are not its own")
        if not all(call.rank in member.ranks for call in heartbeat.calls):
            raise ProtocolError("its heartbeat has the calls of ranks that are not its own")
        if heartbeat.waiting or heartbeat.steps:
            self._waiting.add(member.id)
            self._report(member.id, heartbeat, now_s)
        elif member.id in self._waiting:
            self._waiting.discard(member.id)
            self._report(member.id, heartbeat, now_s)
        if not all(each.rank in member.ranks for each in heartbeat.spans):
            raise ProtocolError("its heartbeat has the spans of ranks that are not its own")
        self._pace.report(member.id, heartbeat.ranks, heartbeat.servers)
        usages, report_s = self._usages(member, heartbeat.links), now_s / self._slower
        self._links.report(usages, report_s)
        self._pairs.report(self._pair_usages(member, heartbeat.pairs), usages, report_s)
        self._stragglers.report(heartbeat.spans, usages, report_s, member.id)
        roster, out = self._job.roster, self._changed_relays(report_s) + self._due_probe(report_s)
        self._remarks += self._straggler_sentences(self._new_stragglers(report_s))
        whole = [_divided(usage, self._slower) for usage in _whole_link(member, heartbeat.rates)]
        self._stragglers.report((), whole, report_s)
        remarks, self._remarks = self._remarks, []
        if now_s - self._compared_s >= _COMPARE_S:
            self._compared_s = now_s
            remarks += self._sentences(self._pace.take_due(self._slow(), now_s))
        for remark in remarks:
            # One log has them: that of the first machine, which has rank 0. Many machines may be slow at a time.
            out += to_each(roster.workers()[:1], pb.SchedulerMessage(slow=pb.Slow(message=remark)))
        is_due = self._searched_s is None or now_s - self._searched_s >= _SEARCH_S
        if not (heartbeat.waiting and self._job.is_running and is_due):
            return out
        self._searched_s = now_s
        due = self._stalls.take_due(self._current_stalls(), now_s)
        for warning in stall_warnings(due, self._who):
            stalled = pb.Stalled(message=warning.sentence, missing=warning.missing, tensor=warning.tensor)
            out += to_each(roster.present(), pb.SchedulerMessage(stalled=stalled))
        return out

    def _new_stragglers(self, now_s: float) -> list[Straggler]:
        """Those to tell of. A link whose rate the workers know already is no news."""
        named = self._stragglers.new(now_s) if self._job.is_running else []
        return [each for each in named if each.is_rank or not self._links.is_known(each.who)]

    def _report(self, member_id: int, heartbeat: pb.Heartbeat, now_s: float) -> None:
        self._stalls.report(member_id, heartbeat.waiting, heartbeat.calls)
        self._steps.report(member_id, heartbeat.steps, now_s)

    def _stack_report(self, member: MemberRecord, report: pb.StackReport, now_s: float) -> Outgoing:
        """The activity of a rank for which others wait."""
        if report.rank not in ranks_of(member):
            raise ProtocolError(f"it sent a StackReport of rank {report.rank}, which is not one of its ranks")
        return to_each(self._job.roster.workers(), pb.SchedulerMessage(stack_report=report))

    def _usages(self, member: MemberRecord, links: Collection[pb.LinkUsage]) -> list[Usage]:
        """The member's transfers, by the machines at both ends."""
        if not links:
            return []
        workers, servers = self._job.roster.machines()
        source = member.id if member.is_worker else servers.get(member.id, -1)
        targets = servers if member.is_worker else workers
        found = [Usage(member.id, source, targets.get(e.peer, -1), e.bytes, e.busy_s, e.unread_s) for e in links]
        found = [_divided(usage, self._slower) for usage in found] if self._slower > 1 else found
        able = [usage for usage in found if usage.nbytes and usage.busy_s > 0]
        return [usage for usage in able if usage.source != -1 and usage.target not in (-1, usage.source)]

    def _pair_usages(self, member: MemberRecord, pairs: Collection[pb.PairUsage]) -> list[PairUsage]:
        """The bytes that the member's ranks sent to those of other machines."""
        if not pairs:
            return []
        workers, _ = self._job.roster.machines()
        by = self._slower
        return [
            PairUsage(
                member.id,
                workers[e.machine_index],
                int(e.bytes / by),
                e.busy_s / by,
                e.unread_s / by,
                int(e.relayed_bytes / by),
                e.relayed_busy_s / by,
            )
            for e in pairs
            if e.machine_index in workers
        ]

    def _changed_relays(self, now_s: float) -> Outgoing:
        """Word to the workers of pairs of machines whose ranks reach each other through a third one from now on, or no
        longer."""
        roster, out = self._job.roster, Outgoing()
        is_wanted = self._job.is_running and self._job.config.rebalance_links
        if not (is_wanted and self._pairs.is_due(now_s)):
            return out
        owners = {member.id: member for member in roster.link_owners()}
        relays = {member.id: member.facts.relay_address for member in roster.cpu_servers()}
        workers = {worker.facts.machine_index: worker.id for worker in roster.workers()}
        for server in roster.gpu_servers():
            relays[workers.get(server.facts.machine_index, -1)] = server.facts.relay_address
        able = [owner for owner, address in relays.items() if address and owner in owners]
        lost = self._pairs.set_machines({owner: member.link_mbit for owner, member in owners.items()}, able)
        changes = [*lost, *self._pairs.changes(now_s)]
        if strays := self._pairs.strays(now_s):
            is_due = now_s >= self._strays_told_s + SETTLE_S
            self._strays_told_s = now_s if is_due else self._strays_told_s
            strays = strays if is_due else []
        if not (changes or strays):
            return out
        index = {worker.id: worker.facts.machine_index for worker in roster.workers()}
        found = [
            pb.Relay(first_machine=index[first], second_machine=index[second], address=relays[relay])
            for (first, second), relay in self._pairs.relays.items()
            if first in index and second in index
        ]
        out += to_each(roster.workers(), pb.SchedulerMessage(relays=pb.Relays(relays=found)))
        who = {member.id: member.describe() for member in owners.values()}
        self._remarks += relay_sentences(changes, who)
        return out

    def _due_probe(self, now_s: float) -> Outgoing:
        """Word to a machine whose link may be fast again, while it has too little to send to show it."""
        roster = self._job.roster
        is_wanted = self._job.is_running and self._job.config.rebalance_links and self._links_epoch == roster.epoch
        probe = self._links.take_probe(now_s) if is_wanted else None
        if probe is None:
            return []
        _, machines = roster.machines()
        servers = [*roster.cpu_servers(), *roster.gpu_servers()]
        others = [server for server in servers if machines.get(server.id, -1) not in (-1, probe.machine)]
        rates = {member.id: member.link_mbit for member in roster.link_owners()}
        # The fastest ones, and not always the same.
        first = probe.number % max(1, len(others))
        others = [*others[first:], *others[:first]]
        others.sort(key=lambda server: -rates.get(machines[server.id], 0.0))
        message = pb.Probe(
            number=probe.number,
            addresses=[server.facts.address for server in others[:_MOST_PROBED]],
            known_mbit=probe.known_mbit,
            usual_mbit=probe.usual_mbit,
        )
        owners = [member for member in roster.link_owners() if member.id == probe.machine]
        return to_each(owners, pb.SchedulerMessage(probe=message))

    def _probed(self, member: MemberRecord, probed: pb.Probed, now_s: float) -> Outgoing:
        self._links.probed(member.id, probed.number, probed.mbit, now_s / self._slower)
        return []

    def new_rates(self, now_s: float) -> tuple[dict[int, float], str]:
        """The rates in Mbit/s of the links that have changed, by member id, and why the shares of the servers should
        follow, in words; empty if they should not. Call it often."""
        roster, now_s = self._job.roster, now_s / self._slower
        if self._links_epoch != roster.epoch:
            self._links_epoch = roster.epoch
            owners = roster.link_owners()
            rates_mbit = {member.id: member.link_mbit for member in owners}
            usual_mbit = {member.id: member.usual_mbit for member in owners if member.usual_mbit}
            measured = {member.id for member in owners if not member.facts.link_mbit}
            self._links.set_rates(rates_mbit, now_s, roster.link_owners_without_share(), usual_mbit, measured)
        if not (self._job.is_running and self._job.config.rebalance_links) or len(roster.workers()) == 1:
            return {}, ""
        changes = self._links.changes(now_s, self._answer_rates)
        if restless := self._links.restless(now_s):
            names = [member.describe() for member in roster.link_owners() if member.id in restless]
            self._remarks += [f"the link of {name} changes its rate all the time: its share stays" for name in names]
        if not changes:
            return {}, ""
        rates = {change.machine: change.mbit for change in changes}
        before, after = (float(time) for time in roster.times_with(rates))
        who = {member.id: member.describe() for member in roster.link_owners()}
        is_slower = any(change.mbit < change.before_mbit for change in changes)
        is_gain = before - after >= (LEAST_GAIN if is_slower else LEAST_RETURN) * before
        is_known = is_gain or self._links.corrects(changes)
        if not is_known or self._links.is_everywhere(changes):
            priced = self._stragglers.suspected_links()  # told of with their price, now or soon
            untold = self._links.untold([each for each in changes if each.machine not in priced])
            is_everywhere = bool(untold) and self._links.is_everywhere(changes)
            self._remarks += [network_sentence(changes, len(who))] if is_everywhere else link_sentences(untold, who)
            return {}, ""
        self._links.accept(changes, now_s)
        why = "; ".join(link_sentences(changes, who))
        if (megabits := self._group.declarations.accepted_bytes * MBIT) > 0:
            times = f"{_seconds(before * megabits)}, with other shares {_seconds(after * megabits)}"
            why = f"{why}; a sum of all gradients takes {times}"
        return rates, why

    def _answer_rates(self) -> dict[int, float]:
        """Of CPU machines: a GPU machine's own ranks need its processors and its link as well."""
        rates = self._pace.answer_rates([member.id for member in self._job.roster.present()])
        return {server.id: rates[server.id] for server in self._job.roster.cpu_servers() if server.id in rates}

    def on_member_left(self, member: MemberRecord) -> None:
        """The member has left or is lost: it waits for nothing."""
        self._waiting.discard(member.id)
        self._report(member.id, pb.Heartbeat(), 0.0)

    def contradiction(self) -> str:
        """Why ranks wait in vain, as far as heartbeats show it; empty if they do not."""
        if not (self._waiting and self._job.is_running):
            return ""
        unnamed = self._stalls.contradiction(self._job.roster.size, self._group.declarations.describe)
        return unnamed or self._steps.contradiction()

    def stalled(self) -> list[str]:
        """Sentences on tensors and barriers that have waited for too long."""
        return stall_sentences(self._current_stalls(), self._who) if self._job.is_running else []

    def awaited(self) -> list[pb.AwaitedRank]:
        """The ranks that others wait for, however short."""
        ages: dict[int, float] = {}
        for stall in self._current_stalls(0.0) if self._waiting and self._job.is_running else ():
            ages.update((rank, stall.age_s) for rank in stall.missing if stall.age_s > ages.get(rank, 0.0))
        return [pb.AwaitedRank(rank=rank, age_s=ages[rank]) for rank in sorted(ages)]

    def slow(self) -> list[str]:
        """Sentences on ranks, links, ways and summation services that are slow."""
        if not self._job.is_running:
            return []
        who = {member.id: member.describe() for member in self._job.roster.link_owners()}
        relays = relay_sentences(self._pairs.kept(), who)
        return [*self._straggler_sentences(self._stragglers.named()), *self._sentences(self._slow()), *relays]

    def _straggler_sentences(self, named: Sequence[Straggler]) -> list[str]:
        if not named:  # as nearly always, and a job may have thousands of members
            return []
        members = {m.id: m.describe() for m in self._job.roster.everyone}
        return [
            straggler_sentence(each, self._who([each.who]) if each.is_rank else members.get(each.who, "a machine"))
            for each in named
        ]

    def _current_stalls(self, least_s: float | None = None) -> list[Stall]:
        size = sum(len(m.ranks) for m in self._job.roster.workers())
        voters, joined = self._group.declarations.undecided_voters, self._group.joining.ranks
        return self._stalls.stalls(size, voters, joined, least_s)

    def _slow(self) -> list[Slow]:
        if not self._job.is_running:
            return []
        known = {each.who for each in self._stragglers.named() if each.is_rank}  # with reason and price
        slow = self._pace.slow([m.id for m in self._job.roster.present()])
        return [each for each in slow if not (each.is_rank and each.who in known)]

    def _sentences(self, slow: list[Slow]) -> list[str]:
        if not slow:
            return []
        servers = {m.id: m.describe() for m in self._job.roster.everyone if not m.is_worker}
        return slow_sentences(slow, self._who, servers, self._job.roster.size)

    def _who(self, ranks: Iterable[int]) -> str:
        wanted = set(ranks)
        return "; ".join(m.describe() for m in self._job.roster.everyone if wanted.intersection(m.ranks))
