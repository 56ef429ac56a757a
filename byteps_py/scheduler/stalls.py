"""Detects waits from the heartbeats of ranks: tensors that stall, and waits that would never end. Pure.

Every CS reports with its heartbeat the tensors that its ranks have waited for. Together the reports show whose
contribution is missing. A tensor is warned about once its oldest wait has reached ``warn_s``, and then again every
``warn_s`` while it lasts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from byteps_py.proto import control_pb2 as pb
from byteps_py.tensors import FIRST_STEP, UNNAMED
from byteps_py.wording import count_text, names_text, ranks_text

#: After this time all ranks that wait have reported it.
_SURE_S = 4.0


@dataclass(frozen=True, slots=True)
class Stall:
    """One tensor that waits for ``missing`` ranks. If none is missing, all have handed it over and the result is
    late."""

    name: str  # empty: a barrier
    age_s: float
    missing: tuple[int, ...]
    undeclared: bool  # the missing ranks have not even declared it


class StallWatch:
    """Finds tensors and barriers that have waited for ``warn_s`` seconds or longer."""

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
        self,
        size: int,
        undecided_voters: Callable[[str], set[int] | None],
        joined: Collection[int] = (),
        least_s: float | None = None,
    ) -> list[Stall]:
        """All tensors whose oldest wait has reached ``least_s`` (default: ``warn_s``), of a job with ``size`` ranks.
        Ranks that have ``joined`` are not missing.

        ``undecided_voters``: the ranks that have voted on a name, None when no vote on it is open.
        """
        by_name: dict[str, list[pb.Waiting]] = {}
        for entries in self._reports.values():
            for entry in entries:
                by_name.setdefault(entry.name, []).append(entry)
        found = []
        for name, entries in by_name.items():
            age_s = max(entry.age_s for entry in entries)
            if age_s < (self._warn_s if least_s is None else least_s):
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
        """A text that names ranks that wait in different unnamed operations; empty if none are known to.

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
    return [warning.sentence for warning in stall_warnings(stalls, who)]


class StallWarning(NamedTuple):
    """``missing``: the ranks that are; ``tensor``: that has waited longest, empty for a barrier."""

    sentence: str
    missing: tuple[int, ...]
    tensor: str


def stall_warnings(stalls: Iterable[Stall], who: Callable[[Iterable[int]], str]) -> list[StallWarning]:
    """The same sentences, with what they are about."""
    groups: dict[tuple[tuple[int, ...], bool, bool], list[Stall]] = {}
    for stall in stalls:
        groups.setdefault((stall.missing, stall.undeclared, not stall.name), []).append(stall)
    lines: list[StallWarning] = []
    for (missing, undeclared, is_barrier), group in groups.items():
        names = "a barrier" if is_barrier else names_text(sorted(stall.name for stall in group))
        oldest = max(group, key=lambda stall: stall.age_s)
        age_s = oldest.age_s
        age = f"{age_s:.0f}" if age_s >= 10 else f"{age_s:.2g}"
        waited = f"{names} {'has' if len(group) == 1 else 'have'} waited {age} s"
        if not missing:
            text = (
                f"{waited} although all ranks have handed over their part: a summation service or the network is slow"
            )
            lines.append(StallWarning(text, missing, oldest.name))
            continue
        it = "it" if len(group) == 1 else "them"
        done = f"declared {it}" if undeclared else "reached it" if is_barrier else f"handed {it} over"
        text = (
            f"{waited} for {ranks_text(missing)}, which {'has' if len(missing) == 1 else 'have'} not {done} "
            f"({who(missing)}): slow, stuck, or on another path of the program"
        )
        if any(FIRST_STEP in stall.name for stall in group):
            text += "; every rank needs the same optimizers, unless those of some ranks have a process_set"
        lines.append(StallWarning(text, missing, oldest.name))
    return lines


#: Both ranks have reported the same for so long: neither goes on.
SURE_S = 2.0


@dataclass(frozen=True, slots=True)
class Reported:
    """The report of a rank on one sequence of steps, unchanged from ``since_s`` to ``until_s``."""

    steps: int
    optimizers: int
    since_s: float
    until_s: float

    @property
    def is_sure(self) -> bool:
        """It has reported the same for long enough."""
        return self.until_s - self.since_s >= SURE_S


class StepSequences:
    """Finds ranks whose optimizers step in different orders, so that they would wait for each other for ever.

    Ranks that train one model make the same steps in the same order. A rank that waits reports, for each group of
    ranks, how many steps it has begun and how many optimizers have stepped so far. The second number follows from the
    first, and never falls. Two reports that contradict this show that an optimizer steps on some ranks only:

        rank 0: generator, discriminator    2 steps, 2 optimizers
        rank 1: generator, generator        2 steps, 1 optimizer

    Reports may be of different times, and old: a count that was true once is compared as well as a new one.

    Time is in seconds of any steady clock.
    """

    def __init__(self) -> None:
        self._by_member: dict[int, dict[tuple[str, int], Reported]] = {}  # by sequence and rank

    def report(self, member_id: int, steps: Iterable[pb.RankSteps], now_s: float) -> None:
        """Replace this member's report; an empty one means that its ranks wait for nothing."""
        before = self._by_member.pop(member_id, {})
        now: dict[tuple[str, int], Reported] = {}
        for each in steps:
            key = each.sequence, each.rank
            last = before.get(key)
            is_same = last is not None and (last.steps, last.optimizers) == (each.steps, each.optimizers)
            since_s = last.since_s if last is not None and is_same else now_s
            now[key] = Reported(each.steps, each.optimizers, since_s, now_s)
        if now:
            self._by_member[member_id] = now

    def contradiction(self) -> str:
        """A text that names an optimizer that does not step on all ranks; empty if none is known."""
        sequences: dict[str, list[tuple[int, int, int]]] = {}
        for reports in self._by_member.values():
            for (sequence, rank), reported in reports.items():
                if reported.is_sure:
                    sequences.setdefault(sequence, []).append((reported.steps, -reported.optimizers, rank))
        for found in sequences.values():
            found.sort()  # of equally many steps, those with more optimizers first
            for (early, most, ahead), (late, fewer, behind) in itertools.pairwise(found):
                if fewer > most:
                    return _sentence(ahead, early, -most, behind, late, -fewer)
        return ""


def _sentence(ahead: int, early: int, most: int, behind: int, late: int, fewer: int) -> str:
    return (
        f"Mismatched optimizers: rank {ahead} waits in step {early} with {count_text(most, 'optimizer')} "
        f"(DistributedOptimizer or DistributedDataParallel), rank {behind} in step {late} with {fewer}; let the same "
        "optimizers step in the same order on every rank, and give one that steps on some ranks only their process_set"
    )
