"""Heartbeats of a simulated training of many ranks, as the scheduler gets them: what each rank did, by kinds of work.

Ranks wait for each other after each part of a step. Each tensor group has data of its own: packs of documents of very
different lengths, whose attention takes the square of each length. Reports are made once and dealt out anew for each
window, so that a thousand windows of 16,384 ranks take minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.slow_ranks import COMPUTES, DATA, PAUSES, SlowRankWatch, Straggler

STAGES, GROUP = 8, 8  # stages of the pipeline; ranks of a tensor group
HEARTBEAT_S = 0.5
#: The parts of a step, by kind: before its first operation, forward, backward.
OWN_S = {0: 0.02, 101: 0.05, 102: 0.1}
CAUSES = (COMPUTES, DATA, PAUSES)
_STEPS, _DOCUMENTS, _NOISE = 2, 12, 0.02
_SUM_S = 0.01
BEGINS_S = 3.0

Times = npt.NDArray[np.float64]


def packed_work(random: np.random.Generator, packs: int, uneven: float) -> Times:
    """How long each of these packs takes, compared with their mean. ``uneven``: the deviation of the logarithm of the
    lengths of documents; 0: all packs are alike."""
    lengths = random.lognormal(0.0, uneven, (packs, _DOCUMENTS))
    lengths /= lengths.sum(axis=1, keepdims=True)
    work = 1 + _DOCUMENTS * (lengths**2).sum(axis=1)
    found: Times = work / work.mean()
    return found


@dataclass(frozen=True, slots=True)
class _Heartbeat:
    """``own_s``: of each rank, by step and kind; ``reports``: of each rank, without its number."""

    own_s: Times
    reports: list[pb.RankSpans]


class ReportedTraining:
    """``heartbeats``: how many there are to be dealt out, to tensor groups of any place in the mesh."""

    def __init__(self, ranks: int, uneven: float, seed: int, heartbeats: int = 12) -> None:
        self.ranks, self._random = ranks, np.random.default_rng(seed)
        self._made = [self._heartbeat(uneven) for _ in range(heartbeats)]

    def _heartbeat(self, uneven: float) -> _Heartbeat:
        work = np.repeat(packed_work(self._random, _STEPS * self.ranks // GROUP, uneven), GROUP)
        own_s = np.exp(_NOISE * self._random.standard_normal((_STEPS, len(OWN_S), self.ranks)))
        own_s *= np.array([*OWN_S.values()])[:, None]
        own_s[:, 1:] *= work.reshape(_STEPS, 1, self.ranks)
        return _Heartbeat(own_s, [_report(own_s[:, :, rank]) for rank in range(self.ranks)])

    def window(self, seconds: float, cause: str = "", rank: int = 0) -> list[tuple[float, Straggler]]:
        """Who is named, and how many seconds after the cause began. ``cause``: of ``rank``, once the job has run for a
        while; empty: it is quiet."""
        watch, named = SlowRankWatch(), []
        per_stage, began_s = self.ranks // STAGES, BEGINS_S if cause else 0.0
        for turn in range(round((began_s + seconds) / HEARTBEAT_S)):
            now_s, made = turn * HEARTBEAT_S, self._made[self._random.integers(len(self._made))]
            groups = self._random.permutation(self.ranks // GROUP)
            dealt = (groups[:, None] * GROUP + np.arange(GROUP)).ravel().tolist()
            elapsed_s = float((made.own_s.max(axis=2) + _SUM_S).sum())
            reports = [made.reports[each] for each in dealt]
            if cause and now_s >= began_s:
                slow_s = _slowed(made.own_s[:, :, dealt[rank]], cause, turn)
                elapsed_s = float((np.maximum(made.own_s.max(axis=2), slow_s) + _SUM_S).sum())
                reports[rank] = _report(slow_s)
            for number, each in enumerate(reports):
                each.rank, each.stage, each.elapsed_s = number, number // per_stage, elapsed_s
            watch.report(reports, (), now_s)
            named += [(now_s - began_s, each) for each in watch.new(now_s)]
        return named


def _report(own_s: Times) -> pb.RankSpans:
    """Of one rank, by step and kind."""
    columns = zip(OWN_S, own_s.sum(axis=0).tolist(), (own_s**2).sum(axis=0).tolist(), strict=True)
    parts = [pb.SpanPart(kind=kind, count=len(own_s), own_s=s, squares_s2=squares) for kind, s, squares in columns]
    return pb.RankSpans(own_s=float(own_s.sum()), parts=parts)


def _slowed(own_s: Times, cause: str, turn: int) -> Times:
    if cause == COMPUTES:
        return own_s * 2
    longer = own_s.copy()
    if cause == DATA:
        longer[:, 0] += 0.15
    elif turn % 2:
        longer[0, 1] += 0.4  # a pause in each second
    return longer
