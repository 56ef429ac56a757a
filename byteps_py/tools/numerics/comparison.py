"""Compares two recorded runs bit by bit, in the order in which the reference computed, and names the first tensor that
differs.

Tensors that ranks hold in parts are put together first (`assembly.py`). Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from byteps_py.errors import UsageError
from byteps_py.tools.numerics.assembly import (
    AssembledTensor,
    TensorPiece,
    assemble,
    missing_parts,
    numbers_of,
    ulps_between,
)
from byteps_py.tools.numerics.records import PHASES, SEPARATE, RankRecords, TensorRecord, read_run
from byteps_py.wording import count_text, ranks_text, shown

_OF_STEP = PHASES[3:]  # their tensors have no micro-batch


@dataclass(frozen=True, order=True, slots=True)
class TensorKey:
    """Names one tensor of a run: the same on both sides, whatever the mesh."""

    step: int
    separate: tuple[tuple[str, int], ...]  # coordinates other than 0 in dimensions with separate samples
    micro_batch: int | None
    phase: str
    module: str
    tensor: str
    occurrence: int

    @property
    def text(self) -> str:
        """For messages: "step 3, micro-batch 1, backward, layers.4.wo grad_input"."""
        words = [f"step {self.step}", *(f"{name} {coordinate}" for name, coordinate in self.separate)]
        if self.micro_batch is not None:
            words.append(f"micro-batch {self.micro_batch}")
        call = f" (call {self.occurrence + 1})" if self.occurrence else ""
        return ", ".join([*words, self.phase, f"{shown(self.module) or 'the model'} {shown(self.tensor)}{call}"])


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs from the reference.

    ``ranks`` hold what differs; ``coordinates`` are theirs where they agree; ``along``: dimensions of the mesh along
    which some ranks have the reference's bits and others have not; ``alike``: along which all
    ranks, which hold the same part, are wrong; ``cut``: along which
    the run's ranks hold parts of it. ``elements``, ``max_ulp``, ``first`` (an index of
    the whole tensor) and ``relative`` (2-norm of the difference over that of the reference) are None where the values
    were not kept or the shapes differ; ``reason`` says so.
    """

    key: TensorKey
    operation: str
    over: str
    ranks: tuple[int, ...]
    coordinates: Mapping[str, int]
    along: tuple[str, ...]
    alike: tuple[str, ...]
    cut: tuple[str, ...]
    reason: str
    elements: int | None = None
    size: int = 0
    max_ulp: int | None = None
    first: tuple[int, ...] | None = None
    relative: float | None = None

    @property
    def text(self) -> str:
        """One line."""
        where = ", ".join(f"{name} {coordinate}" for name, coordinate in self.coordinates.items())
        words = self.key.text + (f" ({self.operation})" if self.operation else "")
        words += f", {ranks_text(self.ranks)}" + (f" ({where})" if where else "")
        if self.along:
            words += f", differs along {', '.join(self.along)}"
        if self.alike:
            words += f", wrong on all ranks along {', '.join(self.alike)}"
        return f"{words}: {self.reason}"

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "step": self.key.step,
            "micro_batch": self.key.micro_batch,
            "phase": self.key.phase,
            "module": self.key.module,
            "tensor": self.key.tensor,
            "operation": self.operation,
            "mesh_dimension": self.over or ", ".join(self.along or self.cut or self.alike),
            "ranks": list(self.ranks),
            "coordinates": dict(self.coordinates),
            "reason": self.reason,
            "elements": self.elements,
            "size": self.size,
            "max_ulp": self.max_ulp,
            "first": None if self.first is None else list(self.first),
            "relative_error": self.relative,
        }


@dataclass(frozen=True, slots=True)
class MissingTensor:
    """A tensor that one side has not. ``part``: if only a part is missing, whose."""

    key: TensorKey
    part: str = ""

    @property
    def text(self) -> str:
        """For messages."""
        return self.key.text + (f" ({self.part})" if self.part else "")


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The result of ``compare``. ``differences``: all, the first of them first. ``equal``: tensors with the same bits.
    ``close``: tensors within the tolerance that are not equal. ``stopped``: ranks of the run that have recorded fewer
    steps than others, and how many."""

    equal: int
    close: int
    differences: Sequence[TensorDifference]
    missing_in_run: Sequence[MissingTensor]
    missing_in_reference: Sequence[MissingTensor]
    stopped: Mapping[int, int]

    @property
    def is_equal(self) -> bool:
        """No tensor differs (by more than the tolerance), none is missing, and no rank has stopped."""
        return not (self.differences or self.missing_in_run or self.missing_in_reference or self.stopped)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "result": "equal" if self.is_equal else "different",
            "equal": self.equal,
            "close": self.close,
            "different": len(self.differences),
            "first_difference": self.differences[0].as_json() if self.differences else None,
            "missing_in_run": [missing.text for missing in self.missing_in_run],
            "missing_in_reference": [missing.text for missing in self.missing_in_reference],
            "stopped": {str(rank): steps for rank, steps in self.stopped.items()},
        }

    def as_text(self) -> str:
        """Some lines for a terminal."""
        lines = []
        if self.differences:
            lines.append(f"The first tensor that differs: {self.differences[0].text}")
            later = len(self.differences) - 1
            if later:
                steps = sorted({each.key.step for each in self.differences})
                where = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
                lines.append(f"{count_text(later, 'more tensor')} in {where} differ{'s' if later == 1 else ''}.")
        for side, missing in (("run", self.missing_in_run), ("reference", self.missing_in_reference)):
            if missing:
                count = count_text(len(missing), "tensor")
                lines.append(f"Missing in the {side}: {count}, the first: {missing[0].text}")
        for rank, count_of_steps in self.stopped.items():
            lines.append(f"Rank {rank} of the run has recorded {count_text(count_of_steps, 'step')}, others more.")
        if self.close:
            lines.append(f"{count_text(self.close, 'tensor')} within the tolerance, but not bit for bit.")
        lines.append(f"{count_text(self.equal, 'tensor')} equal bit for bit.")
        return "\n".join(lines)


def compare(reference: str | Path, run: str | Path, tolerance: float = 0.0, modules: str = "*") -> RunComparison:
    """Compare the records of a run with those of a reference.

    Args:
        reference: the folder of the reference's Recorder: usually one process, in the same order of accumulation.
        run: the folder of the run's Recorders.
        tolerance: largest relative error of a tensor (2-norm) that does not count as a difference. 0: every bit.
        modules: a pattern of the names of modules to compare (fnmatch).

    Raises UsageError if records are missing or damaged, or if tensors that are equal as far as known can't be compared
    because their values were not kept.
    """
    if not 0 <= tolerance < float("inf"):
        raise UsageError(f"tolerance {tolerance}: it must be a number of at least 0")
    sides = [_SideRecords(read_run(Path(folder)), modules) for folder in (reference, run)]
    expected, actual = sides
    equal = close = 0
    differences: list[TensorDifference] = []
    unknown: list[TensorKey] = []
    for key in expected.ordered():
        if not (expected.has(key) and actual.has(key)):
            continue
        found = _compare_tensor(key, expected, actual)
        if found is None:
            equal += 1
        elif found.reason == _NOT_COMPARABLE:
            unknown.append(key)
        elif found.relative is not None and found.relative <= tolerance:
            close += 1
        else:
            differences.append(found)
    if unknown and not differences:
        raise UsageError(
            f"{count_text(len(unknown), 'tensor')} can't be compared, the first: {unknown[0].text}: one side is in "
            "parts and values were not kept; record both runs with values=True"
        )
    return RunComparison(
        equal, close, differences, actual.missing(expected), expected.missing(actual), actual.stopped()
    )


class _SideRecords:
    """The records of one run by key, with their ranks."""

    def __init__(self, ranks: Sequence[RankRecords], modules: str) -> None:
        self.sizes: dict[str, int] = dict(ranks[0].layout.sizes)
        self.groups: dict[TensorKey, list[TensorPiece]] = {}
        self._ranks = len(ranks)
        self._steps = {one.layout.rank: 1 + max((record.step for record in one.records), default=-1) for one in ranks}
        for one in ranks:
            for record in one.records:
                if fnmatchcase(record.module, modules):
                    read: Callable[[TensorRecord], bytes | None] = one.bytes_of
                    self.groups.setdefault(_key_of(record), []).append(TensorPiece(one.layout.rank, record, read))

    def has(self, key: TensorKey) -> bool:
        """Whether the whole tensor is there."""
        return key in self.groups and not missing_parts(self.groups[key], self.sizes)

    def missing(self, other: _SideRecords) -> list[MissingTensor]:
        """Tensors of the other side that this one lacks; also parts that ranks of this side have not recorded."""
        return [
            MissingTensor(key, missing_parts(self.groups[key], self.sizes) if key in self.groups else "")
            for key in other.ordered()
            if not self.has(key)
        ]

    def stopped(self) -> dict[int, int]:
        """Ranks that have recorded fewer steps than others, and how many."""
        most = max(self._steps.values())
        return {rank: steps for rank, steps in self._steps.items() if steps < most}

    def ordered(self) -> list[TensorKey]:
        """In the order of execution: that of the file if there is one. Else forward passes from the first rank to the
        last, backward passes from the last to the first."""
        if self._ranks == 1:
            return list(self.groups)
        keys = list(self.groups)
        places = {key: place for place, key in enumerate(keys)}

        def place(key: TensorKey) -> tuple[Any, ...]:
            rank = self.groups[key][-1].rank
            whole = key.phase in _OF_STEP
            micro_batch = float("inf") if key.micro_batch is None else key.micro_batch
            backward = key.phase in PHASES[1:3]
            phase = PHASES.index(key.phase)
            return (key.step, whole, key.separate, micro_batch, phase, -rank if backward else rank, places[key])

        return sorted(keys, key=place)


def _key_of(record: TensorRecord) -> TensorKey:
    separate = tuple(
        sorted(
            (name, record.coordinates[name])
            for name, placement in record.placements.items()
            if placement.kind == SEPARATE and record.coordinates.get(name)
        )
    )
    return TensorKey(
        record.step, separate, record.micro_batch, record.phase, record.module, record.tensor, record.occurrence
    )


_NOT_COMPARABLE = "not comparable"


def _compare_tensor(key: TensorKey, expected: _SideRecords, actual: _SideRecords) -> TensorDifference | None:
    """None if all bits are the same."""
    pieces, references = actual.groups[key], expected.groups[key]
    records = [piece.record for piece in pieces]
    whole = references[0].record
    described_by = next((record for record in records if record.operation), records[0])

    def difference(ranks: Sequence[int], along: Sequence[str], reason: str, **figures: Any) -> TensorDifference:
        own = [piece.record.coordinates for piece in pieces if piece.rank in set(ranks)] or [{}]
        agreed = {
            name: coordinate
            for name, coordinate in own[0].items()
            if all(other.get(name) == coordinate for other in own) and actual.sizes.get(name, 1) > 1
        }
        cut = tuple(name for name in records[0].placements if pieces[0].cuts(name))
        alike = tuple(
            name
            for name in records[0].coordinates
            if set(ranks) == {piece.rank for piece in pieces}
            and actual.sizes.get(name, 1) > 1
            and name not in cut
            and len({piece.record.coordinates.get(name) for piece in pieces}) > 1
        )
        over = described_by.over
        return TensorDifference(
            key, described_by.operation, over, tuple(ranks), agreed, tuple(along), alike, cut, reason, **figures
        )

    everyone = sorted(piece.rank for piece in pieces)
    dtypes = sorted({record.dtype for record in records if record.dtype != whole.dtype})
    if dtypes:
        ranks = [piece.rank for piece in pieces if piece.record.dtype != whole.dtype]
        return difference(ranks, (), f"dtype {', '.join(dtypes)}, in the reference {whole.dtype}")
    both = (*pieces, *references)
    if all(piece.is_whole for piece in both):
        alike = {(piece.record.digest, piece.record.shape) for piece in both}
        if len(alike) == 1:
            return None
        if any(piece.record.offset is None for piece in both):
            wrong = [piece.rank for piece in pieces if piece.record.digest != whole.digest] or everyone
            return difference(wrong, _along(pieces, wrong), _digests_text(pieces, wrong, whole))
    elif any(piece.record.offset is None for piece in both):
        return difference(everyone, (), _NOT_COMPARABLE)
    return _compare_values(pieces, assemble(references, expected.sizes), actual.sizes, difference)


def _compare_values(
    pieces: Sequence[TensorPiece],
    references: Sequence[AssembledTensor],
    sizes: Mapping[str, int],
    difference: Callable[..., TensorDifference],
) -> TensorDifference | None:
    dtype, wanted = pieces[0].record.dtype, references[0].bits
    if any(not np.array_equal(other.bits, wanted) for other in references[1:]):
        return difference(
            [piece.rank for piece in pieces],
            (),
            "the reference's own ranks hold different values: compare its ranks "
            "with those of a run in one process first",
        )
    wrong: set[int] = set()
    best: dict[str, Any] | None = None
    for copy in assemble(pieces, sizes):
        if copy.bits.shape != wanted.shape:
            return difference(
                copy.ranks,
                (),
                f"shape {list(copy.bits.shape)}, in the reference {list(wanted.shape)}: if ranks hold parts of it, "
                "give the Recorder a rule with its placements",
            )
        differs = copy.bits != wanted
        count = int(np.count_nonzero(differs))
        if not count:
            continue
        wrong |= copy.holders(differs)
        figures = _figures(copy.bits, wanted, dtype, differs)
        if best is None or figures["elements"] > best["elements"]:
            best = figures
    if best is None:
        return None
    size = int(wanted.size)
    ulp = "" if best["max_ulp"] is None else f", max {best['max_ulp']} ulp"
    reason = f"{best['elements']} of {count_text(size, 'element')} differ{ulp}, first at {list(best['first'])}"
    if best["relative"] is not None:
        reason += f", relative error {best['relative']:.2g}"
    return difference(sorted(wrong), _along(pieces, wrong), reason, size=size, **best)


def _figures(found: Any, wanted: Any, dtype: str, differs: Any) -> dict[str, Any]:
    ulps = ulps_between(found, wanted, dtype)
    one, other = numbers_of(found, dtype), numbers_of(wanted, dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        norm, gap = float(np.linalg.norm(other)), float(np.linalg.norm(one - other))
    relative = gap / norm if norm else (0.0 if not gap else float("inf"))
    return {
        "elements": int(np.count_nonzero(differs)),
        "max_ulp": None if ulps is None else int(ulps.max()),
        "first": tuple(int(place) for place in np.argwhere(differs)[0]),
        "relative": relative if np.isfinite(relative) else None,
    }


def _along(pieces: Sequence[TensorPiece], wrong: Sequence[int] | set[int]) -> list[str]:
    """Dimensions along which two neighbouring ranks differ in being right, where both hold the same part."""
    found, at = [], {tuple(sorted(piece.record.coordinates.items())): piece for piece in pieces}
    for name in pieces[0].record.coordinates:
        if any(piece.record.placements.get(name) is not None and piece.cuts(name) for piece in pieces):
            continue
        for piece in pieces:
            first = at.get(tuple(sorted({**piece.record.coordinates, name: 0}.items())))
            if first is not None and (first.rank in wrong) != (piece.rank in wrong):
                found.append(name)
                break
    return found


def _digests_text(pieces: Sequence[TensorPiece], wrong: Sequence[int], whole: TensorRecord) -> str:
    record = next(piece.record for piece in pieces if piece.rank in wrong)
    if record.shape != whole.shape:
        return f"shape {list(record.shape)}, in the reference {list(whole.shape)}"
    return (
        f"the digests differ (norm {record.norm}, in the reference {whole.norm}); record with values=True for the "
        "elements"
    )
