"""A group as its heartbeats show it: which tensors some ranks wait for, which ranks are missing, who is slow. Pure.

Every CS reports with its heartbeat the tensors that its ranks have waited for. Together the reports show whose
contribution is missing. A tensor is warned about once its oldest wait has reached ``warn_s``, and then again every
``warn_s`` while it lasts. How slow members are found: stragglers.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.job import Job, MessageHandler, Outgoing, ranks_of, to_each
from byteps_py.scheduler.rank_group import RankGroup
from byteps_py.scheduler.roster import MemberRecord
from byteps_py.scheduler.step_sequences import StepSequences
from byteps_py.scheduler.stragglers import PaceWatch, Slow, slow_sentences
from byteps_py.tensors import FIRST_STEP, UNNAMED
from byteps_py.wording import names_text, ranks_text

#: After this time all ranks that wait have reported it.
_SURE_S = 4.0


#: How often slow members are looked for. It takes time: each of many machines reports on as many servers.
_COMPARE_S = 0.5


@dataclass(frozen=True, slots=True)
class Stall:
    """One tensor that waits for ``missing`` ranks. If none is missing, all have handed it over and the result is
    late."""

    name: str  # empty: a barrier
    age_s: float
    missing: tuple[int, ...]
    undeclared: bool  # the missing ranks have not even declared it


class StallWatch:
    """Which tensors and barriers have waited for ``warn_s`` seconds or longer."""

    def __init__(self, warn_s: float) -> None:
        self._warn_s = warn_s
        self._reports: dict[int, list[pb.Waiting]] = {}
        self._calls: dict[int, list[pb.UnnamedCall]] = {}
        self._warned_s: dict[str, float] = {}

    def report(self, member_id: int, waiting: Iterable[pb.Waiting], calls: Iterable[pb.UnnamedCall] = ()) -> None:
        """Replace this member's report; an empty one means that it waits for nothing. ``calls``: the rounds of unnamed
        operations that its ranks have begun, if they wait in one."""
        entries = list(waiting)
        if entries:
            self._reports[member_id], self._calls[member_id] = entries, list(calls)
        else:
            self._reports.pop(member_id, None)
            self._calls.pop(member_id, None)

    def stalls(
        self, size: int, undecided_voters: Callable[[str], set[int] | None], joined: Collection[int] = ()
    ) -> list[Stall]:
        """All tensors whose oldest wait has reached ``warn_s``, of a job with ``size`` ranks. Ranks that have
        ``joined`` are not missing.

        ``undecided_voters``: the ranks that have voted on a name, None when no vote on it is open.
        """
        by_name: dict[str, list[pb.Waiting]] = {}
        for entries in self._reports.values():
            for entry in entries:
                by_name.setdefault(entry.name, []).append(entry)
        found = []
        for name, entries in by_name.items():
            age_s = max(entry.age_s for entry in entries)
            if age_s < self._warn_s:
                continue
            # A rank that is ready for a later round has passed the oldest one: every report counts for it.
            ready = {rank for entry in entries for rank in entry.ready_ranks}
            voters = undecided_voters(name)
            there = ready if voters is None else voters
            groups = {tuple(entry.group) for entry in entries}
            members = range(size) if () in groups else sorted(set().union(*groups))
            missing = [rank for rank in members if rank not in there and rank not in joined]
            found.append(Stall(name, age_s, tuple(missing), voters is not None))
        return found

    def contradiction(self, size: int, what: Callable[[str], str]) -> str:
        """Which ranks wait in different unnamed operations, in words; empty if none are known to.

        Unnamed operations are matched in the order of the calls. If one rank waits in an operation that a second rank
        has not called, and the second waits in another one of the same kind that the first has not called, their calls
        differ and both would wait for ever. A rank that has called the operation, and gone on with its result, counts
        as there: that of others may be late. ``what``: gives a declared tensor in words; empty for gathers and
        exchanges, whose names do not depend on their contents.
        """
        kinds: dict[tuple[str, tuple[int, ...]], dict[str, list[pb.Waiting]]] = {}
        for entry in (entry for entries in self._reports.values() for entry in entries):
            kind, is_unnamed, _ = entry.name.partition(UNNAMED)
            if is_unnamed and what(entry.name):
                names = kinds.setdefault((kind, tuple(entry.group) or tuple(range(size))), {})
                names.setdefault(entry.name, []).append(entry)
        begun = {(call.name, call.rank): call.rounds for calls in self._calls.values() for call in calls}
        for names in kinds.values():
            there = {name: {rank for entry in entries for rank in entry.ready_ranks} for name, entries in names.items()}
            for name, entries in names.items():
                first_round = max(1, min(entry.round for entry in entries))
                there[name] |= {
                    rank for (called, rank), rounds in begun.items() if called == name and rounds >= first_round
                }
            long = [name for name, entries in names.items() if max(entry.age_s for entry in entries) >= _SURE_S]
            for one, other in itertools.combinations(sorted(long), 2):
                first, second = there[one] - there[other], there[other] - there[one]
                if first and second:
                    return (
                        f"Mismatched unnamed operations: {ranks_text(sorted(first))} gave {what(one)}, "
                        f"{ranks_text(sorted(second))} gave {what(other)} as the same call; make the same calls in the "
                        "same order on every rank, or name the operations"
                    )
        return ""

    def take_due(self, stalls: list[Stall], now_s: float) -> list[Stall]:
        """The ``stalls`` to warn about now; they count as warned about afterwards."""
        self._warned_s = {s.name: self._warned_s[s.name] for s in stalls if s.name in self._warned_s}
        due = [s for s in stalls if now_s - self._warned_s.get(s.name, -float("inf")) >= self._warn_s]
        self._warned_s.update((s.name, now_s) for s in due)
        return due


def stall_sentences(stalls: Iterable[Stall], who: Callable[[Iterable[int]], str]) -> list[str]:
    """One sentence for all tensors that wait for the same ranks. ``who`` names the processes of ranks."""
    return [sentence for sentence, _ in stall_warnings(stalls, who)]


def stall_warnings(stalls: Iterable[Stall], who: Callable[[Iterable[int]], str]) -> list[tuple[str, tuple[int, ...]]]:
    """The same sentences, each with the ranks that are missing."""
    groups: dict[tuple[tuple[int, ...], bool, bool], list[Stall]] = {}
    for stall in stalls:
        groups.setdefault((stall.missing, stall.undeclared, not stall.name), []).append(stall)
    lines: list[tuple[str, tuple[int, ...]]] = []
    for (missing, undeclared, is_barrier), group in groups.items():
        names = "a barrier" if is_barrier else names_text(sorted(stall.name for stall in group))
        age_s = max(stall.age_s for stall in group)
        age = f"{age_s:.0f}" if age_s >= 10 else f"{age_s:.2g}"
        waited = f"{names} {'has' if len(group) == 1 else 'have'} waited {age} s"
        if not missing:
            text = (
                f"{waited} although all ranks have handed over their part: a summation service or the network is slow"
            )
            lines.append((text, missing))
            continue
        it = "it" if len(group) == 1 else "them"
        done = f"declared {it}" if undeclared else "reached it" if is_barrier else f"handed {it} over"
        text = (
            f"{waited} for {ranks_text(missing)}, which {'has' if len(missing) == 1 else 'have'} not {done} "
            f"({who(missing)}): slow, stuck, or on another path of the program"
        )
        if any(FIRST_STEP in stall.name for stall in group):
            text += "; every rank needs the same optimizers, unless those of some ranks have a process_set"
        lines.append((text, missing))
    return lines


class GroupWatch:
    """The reports of one group's members. Decides nothing about them."""

    def __init__(self, job: Job, group: RankGroup) -> None:
        self._job, self._group = job, group
        self._stalls = StallWatch(job.config.stall_warn_s)
        self._steps = StepSequences()
        self._pace = PaceWatch(job.config.straggler, job.config.stall_warn_s)
        self._compared_s = -_COMPARE_S

    def message_handlers(self) -> Mapping[str, MessageHandler]:
        """By kind, for reports."""
        return {"heartbeat": self._heartbeat, "sight": self._sight}

    def _heartbeat(self, member: MemberRecord, heartbeat: pb.Heartbeat, now_s: float) -> Outgoing:
        """Returns the warnings that are due."""
        if heartbeat.bare:
            return []
        member.statistics, member.shadow = heartbeat.statistics, heartbeat.shadow
        self._stalls.report(member.id, heartbeat.waiting, heartbeat.calls)
        if not all(pace.rank in member.ranks for pace in heartbeat.ranks):
            raise ProtocolError("its heartbeat has the pace of ranks that are not its own")
        if not all(each.rank in member.ranks for each in heartbeat.steps):
            raise ProtocolError("its heartbeat has the steps of ranks that are not its own")
        if not all(call.rank in member.ranks for call in heartbeat.calls):
            raise ProtocolError("its heartbeat has the calls of ranks that are not its own")
        self._steps.report(member.id, heartbeat.steps, now_s)
        self._pace.report(member.id, heartbeat.ranks, heartbeat.servers)
        roster, out = self._job.roster, Outgoing()
        if now_s - self._compared_s >= _COMPARE_S:
            self._compared_s = now_s
            for sentence in self._sentences(self._pace.take_due(self._slow(), now_s)):
                out += to_each(roster.workers(), pb.SchedulerMessage(slow=pb.Slow(message=sentence)))
        if not heartbeat.waiting or not self._job.is_running:
            return out
        due = self._stalls.take_due(self._current_stalls(), now_s)
        for sentence, missing in stall_warnings(due, self._who):
            stalled = pb.Stalled(message=sentence, missing=missing)
            out += to_each(roster.present(), pb.SchedulerMessage(stalled=stalled))
        return out

    def _sight(self, member: MemberRecord, sight: pb.Sight, now_s: float) -> Outgoing:
        """The activity of a rank for which others wait."""
        if sight.rank not in ranks_of(member):
            raise ProtocolError(f"it sent Sight of rank {sight.rank}, which is not one of its ranks")
        return to_each(self._job.roster.workers(), pb.SchedulerMessage(sight=sight))

    def gone(self, member: MemberRecord) -> None:
        """The member has left or is lost: it waits for nothing."""
        self._stalls.report(member.id, [])
        self._steps.report(member.id, [], 0.0)

    def contradiction(self) -> str:
        """Why ranks wait in vain, as far as heartbeats show it; empty if they do not."""
        if not self._job.is_running:
            return ""
        unnamed = self._stalls.contradiction(self._job.roster.size, self._group.declarations.describe)
        return unnamed or self._steps.contradiction()

    def stalled(self) -> list[str]:
        """Sentences on tensors and barriers that have waited for too long."""
        return stall_sentences(self._current_stalls(), self._who) if self._job.is_running else []

    def slow(self) -> list[str]:
        """Sentences on ranks and summation services that are slow."""
        return self._sentences(self._slow())

    def _current_stalls(self) -> list[Stall]:
        size = sum(len(m.ranks) for m in self._job.roster.workers())
        return self._stalls.stalls(size, self._group.declarations.undecided_voters, self._group.joining.ranks)

    def _slow(self) -> list[Slow]:
        return self._pace.slow([m.id for m in self._job.roster.present()]) if self._job.is_running else []

    def _sentences(self, slow: list[Slow]) -> list[str]:
        if not slow:
            return []
        servers = {m.id: m.describe() for m in self._job.roster.everyone if not m.is_worker}
        return slow_sentences(slow, self._who, servers, self._job.roster.size)

    def _who(self, ranks: Iterable[int]) -> str:
        wanted = set(ranks)
        return "; ".join(m.describe() for m in self._job.roster.everyone if wanted.intersection(m.ranks))
