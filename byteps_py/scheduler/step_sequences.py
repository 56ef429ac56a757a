"""Ranks whose optimizers step in different orders, so that they would wait for each other for ever. Pure.

Ranks that train one model make the same steps in the same order. A rank that waits reports, for each group of ranks,
how many steps it has begun and how many optimizers have stepped so far. The second number follows from the first, and
never falls. Two reports that contradict this show that an optimizer steps on some ranks only:

    rank 0: generator, discriminator    2 steps, 2 optimizers
    rank 1: generator, generator        2 steps, 1 optimizer

Reports may be of different times, and old: a count that was true once is compared as well as a new one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from byteps_py.proto import control_pb2 as pb
from byteps_py.wording import count_text

#: So long both ranks have reported the same: neither goes on.
SURE_S = 2.0


@dataclass(frozen=True, slots=True)
class Reported:
    """What a rank has reported of one sequence of steps, unchanged from ``since_s`` to ``until_s``."""

    steps: int
    optimizers: int
    since_s: float
    until_s: float

    @property
    def is_sure(self) -> bool:
        """It has reported the same for long enough."""
        return self.until_s - self.since_s >= SURE_S


class StepSequences:
    """The latest reports of all members. Time is in seconds of any steady clock."""

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
        """Which optimizer does not step on all ranks, in words; empty if none is known to."""
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
