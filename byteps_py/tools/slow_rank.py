"""Which rank makes the others wait, why, and what it costs: from the spans of a training (spans.py).

Clocks of ranks need not agree. Three things are read from one clock each:

- *Waits.* In a group the shortest duration belongs to the rank that came last. Only the outermost dimension tells the
  slow rank from those that waited for it in an inner one: so the search goes from data parallelism inwards, keeps the
  member with the shortest duration of the group with the largest spread, and then looks only at ranks with its
  coordinate (``top_down``).
- *Own time.* What lies between two operations of a rank is its own work. Ranks of one pipeline stage run the same
  program, so they are compared with their median, step by step. A rank that is longer in all parts of nearly each step
  computes slowly; if only the part before a step's first operation is longer, it waits for data; if single parts are
  longer now and then, it pauses. If the ranks that are longer differ from step to step, the data differ, and no rank is
  named.
- *Transfers.* Once all members have come, an operation takes its shortest duration. One that takes longer than those of
  other groups with as many bytes has a slow link. The rank is the one that all slow groups share; messages say in which
  direction.

The price is that of what-if: the steps are computed anew with the rank's operations at the median of its peers.

Pure; any thread.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from byteps_py.errors import UsageError
from byteps_py.tools.spans import DIMENSIONS, Integers, SpanGroup, Spans, Times, select
from byteps_py.wording import count_text, ranks_text

#: Reasons.
COMPUTES, DATA, PAUSES, LATE = "computes slowly", "waits for data", "pauses", "comes late"
LINK, LINK_OUT, LINK_IN = "slow link", "slow link, outgoing", "slow link, incoming"
#: A rank is named if the step would be shorter by this share without it.
LEAST_PRICE = 0.03
#: Own time: of the steps, those in which a rank may be as quick as others although it is slow.
_QUICK_STEPS = 0.25
#: By so many deviations of its peers a slow rank differs from them.
_DEVIATIONS = 8.0
#: A slow rank is that much slower than any other that is not.
_AHEAD = 1.4
#: A deviation is at least this share of a step: clocks and schedulers are not exact.
_LEAST_DEVIATION = 0.003
#: A pause lasts at least this share of a step, and so many deviations of what ranks take between two operations.
_LEAST_PAUSE = 0.05
_PAUSE_DEVIATIONS = 6.0
#: Chance puts so many pauses on one rank in less than one of so many windows.
_CHANCE = 1e-4
#: Transfers of a slow link take that many times as long as others, and differ by so many deviations.
_SLOW_TRANSFER = 1.25
_TRANSFER_DEVIATIONS = 6.0
_LEAST_TRANSFER_DEVIATION = 0.02
#: If only the first part of a step is longer, the other parts are longer by less than this share of it.
_OTHER_PARTS = 0.3
#: That share of what a step takes longer is one pause, if there are some steps without: whose excess is that small.
_ONCE = 0.6
_SHORT = 0.3
_QUICK_PAUSING = 0.15
#: Fewer pauses are an accident.
_LEAST_PAUSES = 3
_MOST_NAMED = 4
#: A rank waited for an operation if its next one begins after it, or so little of its duration earlier.
_OVERLAP = 0.02
#: Steps are computed anew as long as they have so many rows in all.
_REPLAYED_ROWS = 700_000
#: Steps with more operations of one rank are computed anew by so many operations at a time.
_LONG_STEP, _AT_ONCE = 300, 32
#: A step of one rank differs from those of others by less than this share, unless its clock was set.
_CLOCK_SET = 0.75
#: Below these there is nothing to compare.
_LEAST_STEPS = 2


class Narrowing(NamedTuple):
    """One turn of the search: in this group durations differ most, and this rank's is the shortest."""

    dimension: str
    ranks: tuple[int, ...]
    spread_s: float
    rank: int


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that makes others wait.

    Attributes:
        rank: its number.
        host: its machine; empty if it is not known.
        reason: one of the constants above.
        price: the share of the step that is won if its operations take as long as those of its peers.
        detail: the figures behind it, in words.
    """

    rank: int
    host: str
    reason: str
    price: float
    detail: str


@dataclass(frozen=True, slots=True)
class SlowRanks:
    """The result of the analysis.

    Attributes:
        slow: the dearest first; empty if no rank is slow.
        step_s: seconds of a step.
        uneven: the share of the step that differences between ranks cost which belong to no rank: their data differ.
        path: how the search from the outermost dimension went.
        ranks: how many there are spans of.
        steps: how many were compared.
        notes: what is missing, in sentences.
    """

    slow: Sequence[SlowRank]
    step_s: float
    uneven: float
    path: Sequence[Narrowing]
    ranks: int
    steps: int
    notes: Sequence[str]


# ---- what belongs together -----------------------------------------------------------------------------------


def _is(spans: Spans, prefix: str) -> npt.NDArray[np.bool_]:
    return np.array([name.startswith(prefix) for name in spans.operations] or [False])[spans.operation]


def _channels(spans: Spans) -> Integers:
    """0 for a collective; of a message, 1 from the group's first rank to the other, and 2 back."""
    first = np.array([group.ranks[0] for group in spans.groups])[spans.group]
    is_first = spans.rank == first
    sends, receives = _is(spans, "send"), _is(spans, "recv")
    return np.where(sends, np.where(is_first, 1, 2), np.where(receives, np.where(is_first, 2, 1), 0))


def _ordered(spans: Spans) -> Spans:
    """By rank and time, without rows that can't be: with the reasons."""
    notes = []
    good = np.isfinite(spans.started_s) & np.isfinite(spans.ended_s) & (spans.ended_s >= spans.started_s)
    if not good.all():
        ranks = sorted(set(spans.rank[~good].tolist()))
        notes.append(
            f"{count_text(int((~good).sum()), 'operation')} of {ranks_text(ranks)} left out: no end, or it is before "
            "the start (the trace was cut off, or a clock was set)"
        )
    spans = select(spans, good)
    spans = select(spans, np.lexsort((spans.started_s, spans.rank)), notes)
    channel = _channels(spans)
    by_line = np.lexsort((np.arange(len(spans.rank)), channel, spans.group, spans.rank))
    same = (np.diff(spans.rank[by_line]) == 0) & (np.diff(spans.group[by_line]) == 0) & (np.diff(channel[by_line]) == 0)
    back = same & (np.diff(spans.sequence[by_line]) < 0)
    if not back.any():
        return spans
    # A clock that was set back leaves a few rows out of order; after a new start all numbers begin anew.
    again_at = by_line[1:][back]
    restarted = sorted(set(spans.rank[again_at].tolist()))
    since = {rank: spans.started_s[again_at[spans.rank[again_at] == rank]].max() for rank in restarted}
    kept = np.ones(len(spans.rank), bool)
    for rank, at in since.items():
        kept &= (spans.rank != rank) | (spans.started_s >= at)
    return select(
        spans,
        kept,
        [
            f"the numbers of operations of {ranks_text(restarted)} begin anew: a process was started again, or its "
            "clock was set; only what came after that was used"
        ],
    )


def _same_members(groups: Sequence[SpanGroup]) -> Integers:
    """For each group, the first one with its ranks and dimension: tensors that are summed by name have a group each."""
    first: dict[tuple[str, tuple[int, ...]], int] = {}
    return np.array([first.setdefault((group.dimension, group.ranks), at) for at, group in enumerate(groups)], np.int64)


class _Instances:
    """Which rows are one operation. ``of``: its number by row; ``transfer_s`` by instance; ``whole``: all of its ranks
    have a row; ``members``: a number for its group's ranks."""

    def __init__(self, spans: Spans) -> None:
        sizes = np.array([len(group.ranks) for group in spans.groups])
        channel = _channels(spans)
        low = int(spans.sequence.min(initial=0))
        width = int(spans.sequence.max(initial=0)) - low + 1
        key = (spans.group * 3 + channel) * width + (spans.sequence - low)
        keys, self.first, self.of, counts = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
        self.whole = counts == sizes[spans.group[self.first]]
        self.durations = spans.ended_s - spans.started_s
        self.transfer_s = np.full(len(keys), np.inf)
        np.minimum.at(self.transfer_s, self.of, self.durations)
        self.group = spans.group[self.first]
        self.members = _same_members(spans.groups)[self.group]
        self.channel = channel[self.first]
        self.bytes = np.zeros(len(keys), np.int64)
        np.maximum.at(self.bytes, self.of, spans.bytes)
        self.operation = np.where(self.channel > 0, -1, spans.operation[self.first])
        self.step = spans.step[self.first]


def _stages(spans: Spans, ranks: Integers) -> Integers:
    """A number for each rank, equal for those that run the same program: all that data, context and tensor parallelism
    connect. All ranks, if these connect none."""
    label = np.arange(len(ranks))
    same = [
        np.searchsorted(ranks, [rank for rank in group.ranks if rank in present])
        for present in (set(ranks.tolist()),)
        for group in spans.groups
        if group.dimension in ("dp", "cp", "tp", "") and len(group.ranks) > 1
    ]
    has_mesh = any(group.dimension in ("dp", "cp", "tp") for group in spans.groups)
    if has_mesh:
        present = set(ranks.tolist())
        same = [
            np.searchsorted(ranks, [rank for rank in group.ranks if rank in present])
            for group in spans.groups
            if group.dimension in ("dp", "cp", "tp")
        ]
    for _ in range(len(DIMENSIONS) * 2):
        before = label.copy()
        for members in same:
            if len(members):
                label[members] = label[members].min()
        if (label == before).all():
            break
    _, label = np.unique(label, return_inverse=True)
    if label.max(initial=-1) + 1 == len(ranks):
        label = np.zeros(len(ranks), np.int64)
    return np.asarray(label)


# ---- the search from the outermost dimension -----------------------------------------------------------------


def top_down(spans: Spans) -> list[Narrowing]:
    """From the outermost dimension inwards: the rank that others wait for, by durations alone.

    Of the groups that are left, the one with the largest spread of mean durations names its member with the shortest;
    only groups of ranks with the same coordinate are looked at next. Empty if there are no whole operations. Of several
    steps the first is no evidence: programs agree on much in it, and it may be cut off.
    """
    instances = _Instances(spans)
    whole = instances.whole[instances.of]
    if (later := whole & (spans.step > spans.step.min(initial=0))).any():
        whole = later
    size = 1 + max((rank for group in spans.groups for rank in group.ranks), default=0)
    cell = spans.group[whole] * size + spans.rank[whole]
    cells, place, counts = np.unique(cell, return_inverse=True, return_counts=True)
    means = np.bincount(place, instances.durations[whole], minlength=len(cells)) / np.maximum(counts, 1)
    duration = dict(zip(cells.tolist(), means.tolist(), strict=True))
    left = set(spans.rank.tolist())
    path: list[Narrowing] = []
    for dimension in _dimensions(spans):
        if dimension == "pp" and path:  # durations of messages differ with the stage: it is that of the group found
            left &= _with_rank_of(spans, path[-1].rank)
            continue
        best: tuple[float, int, int] | None = None
        for number, group in enumerate(spans.groups):
            if group.dimension != dimension or len(group.ranks) < 2 or not left.issuperset(group.ranks):
                continue
            took = [duration.get(number * size + rank) for rank in group.ranks]
            known = [value for value in took if value is not None]
            if len(known) == len(took) and (best is None or max(known) - min(known) > best[0]):
                best = (max(known) - min(known), number, known.index(min(known)))
        if best is None:
            continue
        spread_s, number, coordinate = best
        path.append(Narrowing(dimension, spans.groups[number].ranks, spread_s, spans.groups[number].ranks[coordinate]))
        if dimension == "pp":  # messages: stages have coordinates of their own
            left &= _with_rank_of(spans, path[-1].rank)
        else:
            left &= {
                group.ranks[coordinate]
                for group in spans.groups
                if group.dimension == dimension and len(group.ranks) > coordinate
            }
    return path


def _dimensions(spans: Spans) -> list[str]:
    """Those that there are, the outermost first: by name, otherwise by the distance of ranks."""
    names = {group.dimension for group in spans.groups}
    known = [dimension for dimension in DIMENSIONS if dimension in names]
    return known + sorted(names - set(known))


def _with_rank_of(spans: Spans, rank: int) -> set[int]:
    """The stage of ``rank``."""
    ranks = np.unique(spans.rank)
    stages = _stages(spans, ranks)
    return set(ranks[stages == stages[np.searchsorted(ranks, rank)]].tolist())


# ---- own time ------------------------------------------------------------------------------------------------


class _OwnTimes:
    """The work of ranks between operations. Arrays have a row for each of ``ranks``, a column for each of ``steps``.

    ``gaps``: by row of the spans, NaN if it is not known; ``parts``: of the step, by row; part 0 ends with the first
    operation of a step; ``own_s``: the sum of the gaps of each part.
    """

    def __init__(self, spans: Spans, ranks: Integers) -> None:
        self.ranks = ranks
        rank_at = np.searchsorted(ranks, spans.rank)
        numbers = np.unique(spans.step)
        self.steps = numbers[1:] if len(numbers) > _LEAST_STEPS else numbers  # the first is not known from its start
        step_at = np.searchsorted(self.steps, spans.step)
        inside = spans.step >= self.steps[0]
        new_rank = np.diff(spans.rank, prepend=-1) != 0
        new_step = new_rank | (np.diff(spans.step, prepend=-1) != 0)
        goes_on = _is(spans, "send")
        ended = np.roll(np.where(goes_on, spans.started_s, spans.ended_s), 1)
        started = np.roll(spans.started_s, 1)
        waited = ended - _OVERLAP * (ended - started) <= spans.started_s
        self.gaps = np.where(waited, np.maximum(spans.started_s - ended, 0.0), spans.started_s - started)
        self.gaps[new_rank | ~inside] = np.nan
        self.was_set = self._set_clocks(rank_at, numbers, spans)
        self.gaps[inside & self.was_set[rank_at, np.clip(step_at, 0, len(self.steps) - 1)]] = np.nan
        self.parts = np.where(new_step, 0, spans.operation + 1)
        self.known = ~np.isnan(self.gaps)
        self.shape = (len(ranks), len(self.steps), len(spans.operations) + 1)
        self.cell = np.ravel_multi_index((rank_at[self.known], step_at[self.known], self.parts[self.known]), self.shape)
        total = int(np.prod(self.shape))
        self.own_s: npt.NDArray[Any] = np.bincount(self.cell, self.gaps[self.known], minlength=total).reshape(
            self.shape
        )
        self.counts: npt.NDArray[Any] = np.bincount(self.cell, np.ones(len(self.cell)), minlength=total).reshape(
            self.shape
        )
        for at in np.flatnonzero(self.was_set.any(axis=1)):
            known = ~self.was_set[at]
            if known.any():
                self.own_s[at, ~known] = np.median(self.own_s[at, known], axis=0)
                self.counts[at, ~known] = np.median(self.counts[at, known], axis=0)

    def _set_clocks(self, rank_at: Integers, numbers: Integers, spans: Spans) -> npt.NDArray[np.bool_]:
        """Where a clock was set: by rank and step. Ranks that wait for each other take equally long for a step."""
        ends = np.full((len(self.ranks), len(numbers)), -np.inf)
        np.maximum.at(ends, (rank_at, np.searchsorted(numbers, spans.step)), spans.ended_s)
        if len(numbers) < 2:
            return np.zeros((len(self.ranks), len(self.steps)), bool)
        ends[~np.isfinite(ends)] = np.nan
        took = np.diff(ends, axis=1)[:, -len(self.steps) :]
        took = np.hstack([took[:, :1]] * (len(self.steps) - took.shape[1]) + [took])
        usual = np.nanmedian(took, axis=0)
        return np.asarray(np.abs(took - usual) > _CLOCK_SET * np.median(usual))


class _Peers:
    """Own times beside those of the ranks with the same of ``labels``. ``usual``: the peers' gap, by row of the spans;
    ``longest_s``: the longest single excess of each rank and step."""

    def __init__(self, own: _OwnTimes, labels: Integers) -> None:
        self.own, self.labels = own, labels
        self.usual_s = _medians(own.own_s, labels)
        self.excess_s = own.own_s - self.usual_s
        each = self.usual_s / np.maximum(_medians(own.counts, labels), 1)
        self.usual = np.zeros(len(own.gaps))
        self.usual[own.known] = each.reshape(-1)[own.cell]
        self._compare_same_places()
        self.longest_s = np.zeros(own.shape[:2])
        over = np.maximum(own.gaps[own.known] - self.usual[own.known], 0)
        np.maximum.at(self.longest_s.reshape(-1), own.cell // own.shape[2], over)
        # The gaps of a part differ from each other on all ranks.
        self.longest_s = np.maximum(self.longest_s - _medians(self.longest_s, labels), 0)

    def _compare_same_places(self) -> None:
        """A gap is compared with its peers' at the same place of the step: a backward pass takes longer than a forward
        pass. Where not all peers have a gap there, the mean of the part stays."""
        own = self.own
        rank_at, step_at, _ = np.unravel_index(own.cell, own.shape)
        # Rows are by rank and time: a row's place is its distance from the first of its rank and step.
        line = rank_at * own.shape[1] + step_at
        begins = np.flatnonzero(np.diff(line, prepend=-1))
        place = np.arange(len(line)) - np.repeat(begins, np.diff(begins, append=len(line)))
        label = self.labels[rank_at]
        gaps = own.gaps[own.known]
        order = np.lexsort((gaps, place, step_at, label))
        keys = np.stack((label, step_at, place))[:, order]
        starts = np.flatnonzero((np.diff(keys, axis=1, prepend=-1) != 0).any(axis=0))
        counts = np.diff(starts, append=len(order))
        middle = gaps[order[starts + (counts - 1) // 2]]
        is_whole = np.repeat(counts == np.bincount(self.labels)[keys[0, starts]], counts)
        at = np.flatnonzero(own.known)[order]
        self.usual[at] = np.where(is_whole, np.repeat(middle, counts), self.usual[at])


def _medians(values: Times, labels: Integers) -> Times:
    """The lower median of the ranks with each label, as an array of the same shape."""
    found = np.empty_like(values)
    order = np.argsort(labels, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    by_size: dict[int, list[Integers]] = {}
    for members in groups:
        by_size.setdefault(len(members), []).append(members)
    for size, same in by_size.items():
        members = np.stack(same)
        middle = np.partition(values[members], (size - 1) // 2, axis=1)[:, (size - 1) // 2]
        found[members] = middle[:, None]
    return found


def _tensor_groups(spans: Spans, ranks: Integers) -> Integers | None:
    """A number for each rank, equal in each tensor-parallel group, whose ranks work on the same data. None if there are
    no such groups."""
    present = set(ranks.tolist())
    labels = np.full(len(ranks), -1)
    for number, group in enumerate(spans.groups):
        if group.dimension == "tp" and len(group.ranks) > 1:
            labels[np.searchsorted(ranks, [rank for rank in group.ranks if rank in present])] = number
    return labels if (labels >= 0).all() else None


def _deviation(values: Times) -> float:
    """A robust standard deviation."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values)))) if values.size else 0.0


class _Suspect(NamedTuple):
    at: int  # index of the rank
    reason: str
    detail: str
    usual: Times | None = None  # gaps of its peers, by row; None: its gaps are as usual
    is_first_only: bool = False  # only those before a step's first operation are not
    instances: npt.NDArray[np.bool_] | None = None  # whose transfers take too long


def _slow_anywhere(peers: _Peers, step_s: float) -> list[_Suspect]:
    return _slow_in(peers, peers.excess_s.sum(axis=2), step_s)


def _slow_at_first(peers: _Peers, step_s: float) -> list[_Suspect]:
    """Where passes differ much, what comes before them may differ little."""
    return _slow_in(peers, peers.excess_s[:, :, 0], step_s)


def _slow_in(peers: _Peers, excess: Times, step_s: float) -> list[_Suspect]:
    """Ranks that are slow by themselves, by what each step takes longer."""
    longer = np.quantile(excess, _QUICK_STEPS, axis=1, method="lower")
    longer -= _medians(longer, peers.labels)
    deviation = max(_deviation(longer), _LEAST_DEVIATION * step_s)
    order = np.argsort(-longer)
    # The slow ones stand apart from all others: those before the first wide step down.
    for count in range(1, min(_MOST_NAMED, len(order) - 1) + 1):
        least, following = longer[order[count - 1]], max(longer[order[count]], 0.0)
        if least < max(_DEVIATIONS * deviation, LEAST_PRICE * step_s * 0.5):
            break
        if least >= _AHEAD * following + 2 * deviation:
            return [_why_slow(peers, int(at)) for at in order[:count]]
    return []


def _why_slow(peers: _Peers, at: int) -> _Suspect:
    takes, usual = np.median(peers.own.own_s[at], axis=0), np.median(peers.usual_s[at], axis=0)
    own_s, usual_s = takes.sum(), usual.sum()
    first = (takes[0] - usual[0]) / max(usual[0], 1e-9)
    others_usual = usual[1:].sum()
    others = (takes[1:].sum() - others_usual) / max(others_usual, 1e-9)
    figures = f"{_seconds(own_s)} of own work in a step, its peers {_seconds(usual_s)}"
    excess = peers.excess_s[at].sum(axis=1)
    long = excess > _SHORT * np.quantile(excess, 0.75)
    is_often_quick = (~long).mean() >= _QUICK_PAUSING
    is_once = np.median(peers.longest_s[at][long] / np.maximum(excess[long], 1e-9)) >= _ONCE if long.any() else False
    if is_once and is_often_quick and peers.own.counts[at].sum(axis=1).min() >= 3:
        return _Suspect(at, PAUSES, f"{figures}: most of the difference in one piece", peers.usual)
    if others_usual >= 0.1 * usual_s and others < _OTHER_PARTS * first:
        detail = f"{_seconds(takes[0])} before the first operation of a step, its peers {_seconds(usual[0])}"
        return _Suspect(at, DATA, detail, peers.usual, True)
    if others_usual < 0.1 * usual_s:
        figures += "; all of it before a step's first operation, so it may also wait for data"
    return _Suspect(at, COMPUTES, figures, peers.usual)


def _pausing(peers: _Peers, step_s: float) -> list[_Suspect]:
    """Ranks with long gaps now and then, more often than chance would have it."""
    longest = peers.longest_s
    positive = longest[longest > 0]
    limit = max(_LEAST_PAUSE * step_s, _PAUSE_DEVIATIONS * _deviation(positive) + float(np.median(longest)))
    is_pause = longest > limit
    counts = is_pause.sum(axis=1)
    total = int(counts.sum())
    found = []
    for at in np.argsort(-counts)[:_MOST_NAMED]:
        count = int(counts[at])
        if count < _LEAST_PAUSES or count > (1 - _QUICK_STEPS) * longest.shape[1] + 1:
            continue
        pauses = longest[at][is_pause[at]]
        # Longer than all that happens to others; or more often than chance.
        is_alone = count == total and pauses.min() >= 2 * np.delete(longest, at, axis=0).max(initial=0.0)
        if is_alone or _chance(count, total / len(counts)) * len(counts) < _CHANCE:
            detail = (
                f"{count} of {longest.shape[1]} steps have a pause of {_seconds(float(np.median(pauses)))} that its "
                "peers do not have"
            )
            found.append(_Suspect(int(at), PAUSES, detail, peers.usual))
    return found


def _chance(count: int, mean: float) -> float:
    """That a Poisson variable is ``count`` or more."""
    below = sum(math.exp(-mean + k * math.log(mean) - math.lgamma(k + 1)) for k in range(count)) if mean > 0 else 1.0
    return max(1.0 - below, math.exp(-mean + count * math.log(max(mean, 1e-12)) - math.lgamma(count + 1)))


# ---- links ---------------------------------------------------------------------------------------------------


class _Lines(NamedTuple):
    """Transfers by group and channel. ``ratio``: to those of the others."""

    group: Integers
    channel: Integers
    ratio: Times
    is_slow: npt.NDArray[np.bool_]


def _usual_transfers(spans: Spans, instances: _Instances) -> Times:
    """By instance: the usual time of those in its dimension, with its operation and bytes; NaN if all are of one line,
    so that there is nothing to compare with."""
    names = sorted({group.dimension for group in spans.groups})
    dimension = np.array([names.index(group.dimension) for group in spans.groups])[instances.group]
    keys = np.stack([dimension, instances.operation, instances.bytes])
    _, kind = np.unique(keys, axis=1, return_inverse=True)
    kind = np.asarray(kind).reshape(-1)
    usual = np.full(len(kind), np.nan)
    order = np.argsort(kind, kind="stable")
    for part in np.split(order, np.flatnonzero(np.diff(kind[order])) + 1):
        whole = part[instances.whole[part]]
        lines = np.unique(instances.members[whole] * 3 + instances.channel[whole])
        if len(lines) > 1:
            quantile = 0.5 if len(lines) > 2 else 0.25
            usual[part] = np.quantile(instances.transfer_s[whole], quantile, method="lower")
    return usual


def _lines(instances: _Instances, usual: Times) -> _Lines:
    known = np.flatnonzero(instances.whole & ~np.isnan(usual) & (usual > 0))
    line = instances.members[known] * 3 + instances.channel[known]
    ratio = instances.transfer_s[known] / usual[known]
    order = np.lexsort((ratio, line))
    lines, start, counts = np.unique(line[order], return_index=True, return_counts=True)
    ratios = ratio[order][start + (counts * _QUICK_STEPS).astype(int)]
    deviation = max(_deviation(np.log(np.maximum(ratios, 1e-9))), _LEAST_TRANSFER_DEVIATION)
    limit = max(math.log(_SLOW_TRANSFER), _TRANSFER_DEVIATIONS * deviation)
    return _Lines(lines // 3, lines % 3, ratios, np.log(np.maximum(ratios, 1e-9)) > limit)


def _link_suspects(
    spans: Spans, instances: _Instances, usual: Times, ranks: Integers
) -> tuple[list[_Suspect], list[str]]:
    """(ranks whose links are slow, what is slow without a rank that could be named)"""
    lines = _lines(instances, usual)
    left = lines.is_slow.copy()
    suspects: list[_Suspect] = []
    notes: list[str] = []
    while left.any() and len(suspects) < _MOST_NAMED:
        counts = _counted(spans, lines, left, ranks)
        scores = {
            LINK: counts["slow_out"] + counts["slow_in"] + counts["slow_all"] - counts["fast_out"] - counts["fast_in"]
            - counts["fast_all"],
            LINK_OUT: counts["slow_out"] + counts["slow_all"] - counts["slow_in"] - counts["fast_out"]
            - counts["fast_all"],
            LINK_IN: counts["slow_in"] + counts["slow_all"] - counts["slow_out"] - counts["fast_in"]
            - counts["fast_all"],
        }  # fmt: skip
        has_messages = (counts["slow_out"] + counts["slow_in"]) > 0
        scores[LINK_OUT] = np.where(has_messages, scores[LINK_OUT], -99)
        scores[LINK_IN] = np.where(has_messages, scores[LINK_IN], -99)
        best = max(int(score.max()) for score in scores.values())
        named = [(int(at), reason) for reason, score in scores.items() for at in np.flatnonzero(score == best)]
        touches = {at: _touching(spans, lines, left, int(ranks[at])) for at, _ in named[: 2 * _MOST_NAMED]}
        if best <= 0 or len({at for at, _ in named}) > 1:
            slow = [spans.groups[group].ranks for group in np.unique(lines.group[left])][:_MOST_NAMED]
            shown = "; ".join(ranks_text(list(group)) for group in slow)
            notes.append(
                f"transfers of {shown} take {_times(float(np.median(lines.ratio[left])))} as long as those of others: "
                f"whose link it is can't be told from these groups"
            )
            break
        at, reason = named[0]
        explained = touches[at]
        in_group = np.isin(instances.members * 3 + instances.channel, (lines.group * 3 + lines.channel)[explained])
        ratio = float(np.median(lines.ratio[explained]))
        what = {LINK: "its transfers", LINK_OUT: "what it sends", LINK_IN: "what it receives"}[reason]
        detail = f"{what} take{'' if reason == LINK else 's'} {_times(ratio)} as long as those of other ranks"
        suspects.append(_Suspect(at, reason, detail, instances=in_group))
        left &= ~explained
    return suspects, notes


def _counted(
    spans: Spans, lines: _Lines, left: npt.NDArray[np.bool_], ranks: Integers
) -> dict[str, npt.NDArray[np.int64]]:
    """By rank: how many slow and fast lines lead out of it, into it, and both ways."""
    names = ("slow_out", "slow_in", "slow_all", "fast_out", "fast_in", "fast_all")
    counts = {name: np.zeros(len(ranks), np.int64) for name in names}
    hosts = spans.hosts
    for group, channel, slow, ever in zip(
        lines.group.tolist(), lines.channel.tolist(), left.tolist(), lines.is_slow.tolist(), strict=True
    ):
        members = spans.groups[group].ranks
        if len({hosts.get(rank, rank) for rank in members}) == 1 and not slow:
            continue  # inside one machine: no link that others have
        if ever and not slow:
            continue  # explained already
        speed = "slow" if slow else "fast"
        at = np.searchsorted(ranks, members)
        if channel:
            counts[f"{speed}_out"][at[0 if channel == 1 else 1]] += 1
            counts[f"{speed}_in"][at[1 if channel == 1 else 0]] += 1
        else:
            counts[f"{speed}_all"][at] += 1
    return counts


def _touching(spans: Spans, lines: _Lines, left: npt.NDArray[np.bool_], rank: int) -> npt.NDArray[np.bool_]:
    found = left.copy()
    for at in np.flatnonzero(left):
        found[at] = rank in spans.groups[lines.group[at]].ranks
    return found


# ---- what-if -------------------------------------------------------------------------------------------------


class _Replay:
    """Computes steps anew. ``rows``: those of the steps, by rank and time."""

    def __init__(self, spans: Spans, peers: _Peers, instances: _Instances, usual_transfer_s: Times) -> None:
        own = peers.own
        per_step = len(spans.rank) / max(len(own.steps), 1)
        most = max(1, int(_REPLAYED_ROWS / max(per_step, 1)))
        chosen = own.steps if len(own.steps) <= most else own.steps[:: math.ceil(len(own.steps) / most)]
        self.rows = np.flatnonzero(np.isin(spans.step, chosen))
        self.steps = len(chosen)
        self._step = np.searchsorted(chosen, spans.step[self.rows])
        rank = spans.rank[self.rows]
        self.rank_at = np.searchsorted(own.ranks, rank)
        self._begins = (np.diff(rank, prepend=-1) != 0) | (np.diff(spans.step[self.rows], prepend=-1) != 0)
        self.instance = instances.of[self.rows]
        gaps = own.gaps[self.rows]
        self.gaps = np.where(np.isnan(gaps), peers.usual[self.rows], gaps)
        self.usual_gaps = peers.usual[self.rows]
        self.transfers = instances.transfer_s[self.instance]
        usual = usual_transfer_s[self.instance]
        # The others may have waited for a rank that has no spans.
        self.transfers = np.where(
            instances.whole[self.instance] | np.isnan(usual), self.transfers, np.minimum(usual, self.transfers)
        )
        self.usual_transfers = np.where(np.isnan(usual), self.transfers, np.minimum(usual, self.transfers))
        # A rank whose next operation starts before this one has ended does not wait for it.
        ended, started = spans.ended_s[self.rows], spans.started_s[self.rows]
        goes_on = _is(spans, "send")[self.rows]
        following = np.append(started[1:], np.inf)
        self._waits = ~goes_on & (
            (ended - _OVERLAP * (ended - started) <= following) | np.append(self._begins[1:], True)
        )
        _, compact = np.unique(self.instance, return_inverse=True)
        self._compact = np.asarray(compact).reshape(-1)
        self._n = int(self._compact.max(initial=-1)) + 1
        begins_at = np.flatnonzero(self._begins)
        self._place = np.arange(len(rank)) - np.repeat(begins_at, np.diff(begins_at, append=len(rank)))

    def step_s(self, gaps: Times, transfers: Times) -> float:
        """The mean step with these times, by row."""
        arrives = np.zeros(len(gaps))
        ends = np.zeros(len(gaps))
        begins, waits = self._begins, self._waits
        latest = np.empty(self._n)
        before = np.zeros(len(gaps))
        if self._place.max(initial=0) > _LONG_STEP:
            arrives, ends = self._sweep(gaps, transfers)
        order = np.argsort(self._compact, kind="stable")
        starts = np.flatnonzero(np.diff(self._compact[order], prepend=-1))
        for _ in range(100_000):
            goes = np.where(waits, ends, arrives)
            before[1:] = goes[:-1]
            before[begins] = 0.0
            now = before + gaps
            latest = np.maximum.reduceat(now[order], starts) if len(starts) else latest
            until = latest[self._compact] + transfers
            if np.array_equal(until, ends) and np.array_equal(now, arrives):
                break
            arrives, ends = now, until
        per_step = np.zeros(self.steps)
        np.maximum.at(per_step, self._step, ends)
        return float(per_step.mean()) if self.steps else 0.0

    def _sweep(self, gaps: Times, transfers: Times) -> tuple[Times, Times]:
        """When rows begin and end at the earliest, from the first of each step on, some places at a time: a round over
        all rows brings the times of long steps only one place further. Where ranks have an operation at other places,
        the times are too early, and ``step_s`` goes on from there."""
        arrives, ends, latest = np.zeros(len(gaps)), np.zeros(len(gaps)), np.zeros(self._n)
        order = np.argsort(self._place, kind="stable")
        bounds = np.searchsorted(self._place[order], np.arange(0, self._place.max() + _AT_ONCE + 1, _AT_ONCE))
        for first, last in itertools.pairwise(bounds):
            rows = order[first:last]
            begins, instances = self._begins[rows], self._compact[rows]
            for _ in range(_AT_ONCE + 1):
                before = np.where(self._waits[rows - 1], ends[rows - 1], arrives[rows - 1])
                now = np.where(begins, 0.0, before) + gaps[rows]
                np.maximum.at(latest, instances, now)
                until = latest[instances] + transfers[rows]
                if np.array_equal(until, ends[rows]) and np.array_equal(now, arrives[rows]):
                    break
                arrives[rows], ends[rows] = now, until
        return arrives, ends


# ---- all of it -----------------------------------------------------------------------------------------------


def find_slow_ranks(spans: Spans) -> SlowRanks:
    """See the module. Raises UsageError if there is nothing to compare, with the reason."""
    if not len(spans.rank):
        raise UsageError(_because("the trace has no communication between ranks", spans.notes))
    spans = _ordered(spans)
    instances = _Instances(spans)
    if not instances.whole.any():
        raise UsageError(
            _because("no operation has the spans of all of its ranks; give the traces of more ranks", spans.notes)
        )
    notes = [*spans.notes, *_missing(spans, instances)]
    ranks = np.unique(spans.rank)
    path = top_down(spans)
    steps = len(np.unique(spans.step))
    if not spans.has_own_times or steps < _LEAST_STEPS:
        if steps < _LEAST_STEPS:
            notes.append("there is one step only: a rank that is slow now can't be told from one that always is")
        return _by_waits(spans, instances, path, notes, len(ranks))
    stages = _stages(spans, ranks)
    own = _OwnTimes(spans, ranks)
    if (jumped := own.was_set.any(axis=1)).any():
        notes.append(f"clocks of {ranks_text(ranks[jumped].tolist())} were set: those steps of them were not compared")
    of_stage = _Peers(own, stages)
    usual_transfer_s = _usual_transfers(spans, instances)
    replay = _Replay(spans, of_stage, instances, usual_transfer_s)
    step_s = replay.step_s(replay.gaps, replay.transfers)
    tensor_groups = _tensor_groups(spans, ranks)
    # Those with the same data are the better measure, unless all of them are slow.
    all_peers = [of_stage] if tensor_groups is None else [_Peers(own, tensor_groups), of_stage]
    suspects: dict[int, _Suspect] = {}
    for find in (_slow_anywhere, _slow_at_first, _pausing):
        for peers in all_peers:
            for suspect in find(peers, step_s):
                suspects.setdefault(suspect.at, suspect)
    by_link, link_notes = _link_suspects(spans, instances, usual_transfer_s, ranks)
    slow, explained = _priced(spans, own, replay, [*suspects.values(), *by_link], step_s)
    if len(np.unique(stages)) == len(ranks):
        notes.append("no two ranks run the same program: they were compared with all others")
    even_s = replay.step_s(replay.usual_gaps, replay.usual_transfers)
    uneven = max(0.0, 1 - even_s / step_s - explained) if step_s else 0.0
    return SlowRanks(slow, step_s, uneven, path, len(ranks), len(own.steps), (*notes, *link_notes))


def _because(text: str, notes: Sequence[str]) -> str:
    return f"{text}: {'; '.join(notes)}" if notes else text


def _missing(spans: Spans, instances: _Instances) -> list[str]:
    """The missing parts, in sentences."""
    wanted = {rank for group in spans.groups for rank in group.ranks}
    absent = sorted(wanted - set(spans.rank.tolist()))
    notes = [f"{ranks_text(absent)}: no spans; operations with them were not compared"] if absent else []
    partial = int((~instances.whole).sum())
    if partial and not absent:
        notes.append(f"{count_text(partial, 'operation')} without the spans of all of its ranks: not compared")
    return notes


def _priced(
    spans: Spans, own: _OwnTimes, replay: _Replay, suspects: Sequence[_Suspect], step_s: float
) -> tuple[list[SlowRank], float]:
    """(those whose price is worth a word, the share of the step that all of them cost)"""
    found: list[SlowRank] = []
    all_gaps, all_transfers = replay.gaps.copy(), replay.transfers.copy()
    for suspect in suspects:
        gaps, transfers = replay.gaps, replay.transfers
        if suspect.instances is not None:
            transfers = np.where(suspect.instances[replay.instance], replay.usual_transfers, transfers)
        elif suspect.usual is not None:
            mine = replay.rank_at == suspect.at
            if suspect.is_first_only:
                mine &= own.parts[replay.rows] == 0
            gaps = np.where(mine, np.minimum(suspect.usual[replay.rows], gaps), gaps)
        price = 1 - replay.step_s(gaps, transfers) / step_s if step_s else 0.0
        if price < LEAST_PRICE:
            continue
        all_gaps = np.where(gaps != replay.gaps, gaps, all_gaps)
        all_transfers = np.where(transfers != replay.transfers, transfers, all_transfers)
        rank = int(own.ranks[suspect.at])
        found.append(SlowRank(rank, spans.hosts.get(rank, ""), suspect.reason, price, suspect.detail))
    explained = 1 - replay.step_s(all_gaps, all_transfers) / step_s if found else 0.0
    return sorted(found, key=lambda each: -each.price), explained


def _by_waits(
    spans: Spans, instances: _Instances, path: Sequence[Narrowing], notes: Sequence[str], ranks: int
) -> SlowRanks:
    """Where own times are not known: the search alone. Its price is what the others wait for it."""
    numbers = np.unique(spans.step)
    first, last = np.full(len(numbers), np.inf), np.full(len(numbers), -np.inf)
    one = spans.rank == spans.rank[0]
    at = np.searchsorted(numbers, spans.step[one])
    np.minimum.at(first, at, spans.started_s[one])
    np.maximum.at(last, at, spans.ended_s[one])
    step_s = float((last.max() - first.min()) / len(numbers))
    found = []
    if path:
        rank = path[-1].rank
        waited = path[0].spread_s
        price = waited / step_s if step_s else 0.0
        shares = _last_shares(spans, instances, rank)
        if price >= LEAST_PRICE and shares >= 1 - _QUICK_STEPS:
            detail = f"others wait {_seconds(waited)} for it; own times are not in this trace"
            found.append(SlowRank(rank, spans.hosts.get(rank, ""), LATE, min(price, 1.0), detail))
    return SlowRanks(found, step_s, 0.0, path, ranks, len(numbers), notes)


def _last_shares(spans: Spans, instances: _Instances, rank: int) -> float:
    """Of the operations of ``rank``, those to which it came last."""
    mine = (spans.rank == rank) & instances.whole[instances.of]
    if not mine.any():
        return 0.0
    return float((instances.durations[mine] <= instances.transfer_s[instances.of[mine]] * 1.0001).mean())


def _seconds(time_s: float) -> str:
    return f"{time_s:.3g} s" if time_s >= 1 else f"{1000 * time_s:.3g} ms"


def _times(ratio: float) -> str:
    return f"{ratio:.2g} times"


def sentences(found: SlowRanks) -> list[str]:
    """For people, a line each."""
    lines = [f"{count_text(found.ranks, 'rank')}, {count_text(found.steps, 'step')} of {_seconds(found.step_s)}"]
    for each in found.slow:
        host = f" on {each.host}" if each.host else ""
        lines.append(f"rank {each.rank}{host} {_VERBS.get(each.reason, each.reason)}: {each.price:.0%} of the step")
        lines.append(f"  {each.detail}")
    if not found.slow:
        lines.append("no rank is slow")
    if found.uneven >= LEAST_PRICE:
        lines.append(
            f"{found.uneven:.0%} of the step is lost to differences that change from step to step and belong to no "
            "rank: sequences or documents of different lengths"
        )
    turns = [
        f"{turn.dimension or 'group'}: rank {turn.rank} waits {_seconds(turn.spread_s)} less" for turn in found.path
    ]
    if turns and found.slow:
        lines.append(f"search by waits: {'; '.join(turns)}")
    return [*lines, *(f"note: {note}" for note in found.notes)]


_VERBS = {
    LINK: "has a slow link", LINK_OUT: "has a slow link, outgoing", LINK_IN: "has a slow link, incoming",
    PAUSES: "pauses now and then", LATE: "comes late",
}  # fmt: skip


def as_json(found: SlowRanks) -> Mapping[str, object]:
    """For `--json`."""
    return {
        "slow": [
            {"rank": each.rank, "host": each.host, "reason": each.reason, "price": each.price, "detail": each.detail}
            for each in found.slow
        ],
        "step_s": found.step_s,
        "uneven": found.uneven,
        "path": [
            {"dimension": turn.dimension, "ranks": turn.ranks, "spread_s": turn.spread_s, "rank": turn.rank}
            for turn in found.path
        ],
        "ranks": found.ranks,
        "steps": found.steps,
        "notes": list(found.notes),
    }
