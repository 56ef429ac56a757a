"""The price of slow workers in a recorded training: how long a step would take if every operation took its usual time.

A trace has the operations of each step of each worker, a worker being one pipeline stage of one data-parallel copy.
The analysis rebuilds what each operation waited for, and then computes steps anew with other durations:

- A worker computes in the order of the trace. It sends and receives beside that, each kind of message in order: a
  forward pass waits for its activations, a message for the pass that makes it. Collectives, the optimizer and the like
  are in line with the passes.
- A message has two ends, and a collective has many: it begins when all of its workers have come. Only what follows is
  its *transfer*. So a worker that waits for a slow one is not slow itself.
- The usual time of a pass is the mean over all passes of its type, that of a transfer the median.

``slowdown`` is the mean step by the ideal one, in which all operations take their usual time. Launch delays are in
neither. Of a part of the job (a copy, a stage, a type of operation), the slowdown is that of a job in which only the
part's operations are as they were. ``m_w`` is the share of the lost time that is won back if the slowest workers (3 %
of them, at least one) are made usual; ``m_s``, if all workers of the last stage are. Method: "Understanding Stragglers
in Large Model Training Using What-if Analysis" (2025), section 3.

Pure, but for ``read_trace``. Any thread.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from byteps_py.errors import UsageError

COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "seq_id", "mc", "gmc")
#: Of all workers: those that ``m_w`` makes usual.
SLOWEST_SHARE = 0.03
#: Operations that all copies of a stage make together.
_OF_A_STAGE = ("params-all-gather", "grads-reduce-scatter")
#: Those of the first and the last stage of a copy.
_OF_A_COPY = ("embedding-grads-all-reduce",)
#: Those of all workers.
_OF_ALL = ("optimizer-clip-main-grad",)
_OF_A_WORKER = ("layernorm-grads-all-reduce",)
_COLLECTIVES = (*_OF_A_STAGE, *_OF_A_COPY, *_OF_ALL, *_OF_A_WORKER)
#: Messages: (the pass that makes or awaits it, where the other end is, whether it is sent).
_MESSAGES = {
    "forward-send": ("forward", 1, True),
    "forward-recv": ("forward", -1, False),
    "backward-send": ("backward", -1, True),
    "backward-recv": ("backward", 1, False),
}
_MOST_REASONS = 3

Worker = tuple[int, int]  # data-parallel rank, stage
Times = npt.NDArray[np.float64]


class Operation(NamedTuple):
    """One row of a trace. ``start_s``: on a clock of the worker's host; ``number``: among those of its type, of the
    worker and step; ``chunk``, ``virtual_stage``: of a pass, in its worker and in the model."""

    worker: Worker
    step: int
    kind: str
    start_s: float
    duration_s: float
    number: int
    chunk: int
    virtual_stage: int


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The result of the analysis. Times in seconds, of a step, without launch delays.

    Attributes:
        step_s: the mean.
        ideal_s: with all operations at their usual time.
        slowdown: the first by the second.
        m_w: the share of the lost time that the slowest workers explain; 0 if none is lost.
        m_s: the share that the last stage explains.
        worst_workers: the slowest first, of all: (worker, its slowdown).
        by_copy, by_stage, by_operation: the slowdown that is left if all others are at their usual time.
        steps: the number of steps.
        left_out: steps that could not be used, and why.
    """

    step_s: float
    ideal_s: float
    slowdown: float
    m_w: float
    m_s: float
    worst_workers: Sequence[tuple[Worker, float]]
    by_copy: Mapping[int, float]
    by_stage: Mapping[int, float]
    by_operation: Mapping[str, float]
    steps: int
    left_out: Mapping[int, str]


# ---- reading -------------------------------------------------------------------------------------------------


def read_trace(path: Path) -> list[Operation]:
    """The operations of a file with the columns ``COLUMNS``: ``.parquet`` (needs pyarrow) or ``.csv``.

    Raises UsageError for a file that is none, lacks a column or pyarrow, or has other than numbers in them.
    """
    if path.suffix == ".json":
        raise UsageError(f"the trace {path} is no table (.parquet or .csv); bps trace summary reads a job's trace.json")
    try:
        columns = _read_csv(path) if path.suffix == ".csv" else _read_parquet(path)
    except OSError as error:
        raise UsageError(f"the trace {path} can't be read: {error.strerror or error}") from None
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise UsageError(f"the trace {path} lacks the columns {', '.join(missing)}: it needs {', '.join(COLUMNS)}")
    try:
        return [
            Operation(
                (int(dp), int(stage)), int(step), str(kind), float(start), float(took), int(number), int(mc), int(gmc)
            )
            for dp, stage, step, kind, start, took, number, mc, gmc in zip(
                *(columns[name] for name in COLUMNS), strict=True
            )
        ]
    except (TypeError, ValueError) as error:
        raise UsageError(f"the trace {path} has a row that is none: {error}") from None


def _read_csv(path: Path) -> Mapping[str, Sequence[object]]:
    with path.open(newline="") as file:
        try:
            rows = list(csv.DictReader(file))
        except (csv.Error, UnicodeDecodeError) as error:
            raise UsageError(f"the trace {path} is no table: {error}") from None
    return {str(name): [row[name] for row in rows] for name in (rows[0] if rows else ())}


def _read_parquet(path: Path) -> Mapping[str, Sequence[object]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UsageError(
            f"{path}: reading parquet needs pyarrow: pip install 'byteps-py[trace]', or save it as .csv"
        ) from None
    try:
        table = parquet.read_table(path)
    except ArrowException as error:
        raise UsageError(f"the trace {path} is no parquet file, or is cut off: {error}") from None
    return {name: table.column(name).to_pylist() for name in table.column_names}


# ---- what waits for what -------------------------------------------------------------------------------------


class _Groups:
    """The predecessors and companions of the operations of one step. Operations are numbered.

    ``members``: of each group, in an order in which each begins after all that it waits for; ``waits``: by operation.
    """

    def __init__(self, operations: Sequence[Operation], stages: int) -> None:
        self.operations = operations
        self._stages = stages
        of_key: dict[object, list[int]] = defaultdict(list)
        lines: dict[tuple[Worker, str], list[int]] = defaultdict(list)
        for at in sorted(range(len(operations)), key=lambda at: operations[at][3:5]):
            each = operations[at]
            of_key[self._key(each, at)].append(at)
            lines[each.worker, each.kind if each.kind in _MESSAGES else ""].append(at)
        self.waits: list[list[int]] = [[] for _ in operations]
        for line in lines.values():
            for before, after in itertools.pairwise(line):
                self.waits[after].append(before)
        self._link_messages(lines)
        self.group_of = [0] * len(operations)
        unordered = list(of_key.values())
        for number, members in enumerate(unordered):
            for at in members:
                self.group_of[at] = number
        self.members = [unordered[number] for number in self._in_order(unordered)]

    def _key(self, each: Operation, at: int) -> object:
        """Equal for operations that begin together."""
        dp, stage = each.worker
        if each.kind in _MESSAGES:
            direction, other, sends = _MESSAGES[each.kind]
            return direction, dp, stage if sends else (stage + other) % self._stages, each.number
        if each.kind in _OF_A_STAGE:
            return each.kind, stage, each.chunk, each.number
        if each.kind in _OF_A_COPY:
            return each.kind, dp, each.number
        return (each.kind, each.number) if each.kind in _OF_ALL else at

    def _link_messages(self, lines: Mapping[tuple[Worker, str], Sequence[int]]) -> None:
        """The nth message of a kind belongs to the nth pass that needs one: not to those at the model's ends."""
        passes: dict[tuple[Worker, str], list[int]] = defaultdict(list)
        last = max((each.virtual_stage for each in self.operations), default=0)
        for (worker, kind), line in lines.items():
            for at in line if not kind else ():
                passes[worker, self.operations[at].kind].append(at)
        for (worker, kind), line in lines.items():
            if kind not in _MESSAGES:
                continue
            direction, other, sends = _MESSAGES[kind]
            end = last if other > 0 else 0  # passes of this virtual stage have nobody beyond them
            its = [at for at in passes[worker, f"{direction}-compute"] if self.operations[at].virtual_stage != end]
            for message, made in zip(sorted(line, key=lambda at: self.operations[at].number), its, strict=False):
                waiting, awaited = (message, made) if sends else (made, message)
                self.waits[waiting].append(awaited)

    def _in_order(self, groups: Sequence[Sequence[int]]) -> list[int]:
        """Raises ValueError if operations wait for one another in a circle."""
        needed, after = [0] * len(groups), defaultdict[int, list[int]](list)
        for number, members in enumerate(groups):
            for at in members:
                for before in self.waits[at]:
                    after[self.group_of[before]].append(number)
                    needed[number] += 1
        ready = [number for number, count in enumerate(needed) if not count]
        for number in ready:  # grows meanwhile
            for following in after[number]:
                needed[following] -= 1
                if not needed[following]:
                    ready.append(following)
        if len(ready) < len(groups):
            raise ValueError("operations wait for one another in a circle")
        return ready

    def transfers(self) -> Times:
        """Of each operation, the time that it took once all of its group had come."""
        found = np.empty(len(self.operations))
        for members in self.members:
            begun = max(self.operations[at].start_s for at in members)
            for at in members:
                each = self.operations[at]
                found[at] = max(each.start_s + each.duration_s - begun, 0.0)
        return found

    def step_s(self, durations: Times) -> Times:
        """The time of the step, of each column of ``durations``, which has a row for each operation."""
        ends = np.zeros_like(durations)
        zero = np.zeros(durations.shape[1])
        for members in self.members:
            begun = zero
            for at in members:
                for before in self.waits[at]:
                    begun = np.maximum(begun, ends[before])
            for at in members:
                ends[at] = begun + durations[at]
        return ends.max(axis=0)  # type: ignore[no-any-return]


def _steps(operations: Iterable[Operation]) -> tuple[dict[int, _Groups], dict[int, str]]:
    """(the steps that can be computed anew, the others with the reason)"""
    by_step: dict[int, list[Operation]] = defaultdict(list)
    for each in operations:
        by_step[each.step].append(each)
    workers = {each.worker for step in by_step.values() for each in step}
    stages = 1 + max((stage for _, stage in workers), default=0)
    usual = _most_frequent(len(step) for step in by_step.values())
    found, left_out = dict[int, _Groups](), dict[int, str]()
    for number, step in sorted(by_step.items()):
        if reason := _flaw(step, workers, usual):
            left_out[number] = reason
            continue
        try:
            groups = _Groups(step, stages)
        except ValueError as error:
            left_out[number] = str(error)
            continue
        lone = sum(len(members) == 1 and step[members[0]].kind in _MESSAGES for members in groups.members)
        if lone:
            left_out[number] = f"{lone} messages have one end only"
        else:
            found[number] = groups
    return found, left_out


def _flaw(step: Sequence[Operation], workers: set[Worker], usual: int) -> str:
    missing = workers - {each.worker for each in step}
    if missing:
        return f"the operations of worker {min(missing)} are missing"
    if len({(each.worker, each.kind, each.number, each.chunk) for each in step}) < len(step):
        return "an operation is there twice: a worker was started again"
    if not all(math.isfinite(each.start_s) and 0 <= each.duration_s < math.inf for each in step):
        return "an operation ends before it begins: a clock was set"
    return f"it has {len(step)} operations, others {usual}: the trace is cut off" if len(step) != usual else ""


def _most_frequent(numbers: Iterable[int]) -> int:
    count: dict[int, int] = defaultdict(int)
    for number in numbers:
        count[number] += 1
    return max(count, key=lambda number: (count[number], number), default=0)


# ---- the analysis --------------------------------------------------------------------------------------------


def what_if(operations: Iterable[Operation]) -> WhatIf:
    """See the module. Raises UsageError if no step of the trace can be computed anew, with the reasons."""
    steps, left_out = _steps(operations)
    if not steps:
        reasons = "; ".join(f"step {number}: {why}" for number, why in list(left_out.items())[:_MOST_REASONS])
        raise UsageError(f"the trace has no whole step{': ' if reasons else ''}{reasons}")
    actual = {number: groups.transfers() for number, groups in steps.items()}
    usual = _usual_times(steps, actual)
    first = next(iter(steps.values()))
    copies, stages = (sorted({each.worker[place] for each in first.operations}) for place in (0, 1))
    kinds = sorted(usual)
    parts: list[Callable[[Operation], bool]] = [lambda each: True, lambda each: False]
    parts += [lambda each, copy=copy: each.worker[0] == copy for copy in copies]  # type: ignore[misc]
    parts += [lambda each, stage=stage: each.worker[1] == stage for stage in stages]  # type: ignore[misc]
    parts += [lambda each, kind=kind: _type(each) == kind for kind in kinds]  # type: ignore[misc]
    parts.append(lambda each: each.worker[1] != stages[-1])
    step_s, ideal_s, *rest = _means(steps, actual, usual, parts)
    slowdowns = [value / ideal_s if ideal_s else 1.0 for value in rest]
    by_copy = dict(zip(copies, slowdowns, strict=False))
    by_stage = dict(zip(stages, slowdowns[len(copies) :], strict=False))
    by_kind = dict(zip(kinds, slowdowns[len(copies) + len(stages) :], strict=False))
    scores = {
        worker: min(by_copy[worker[0]], by_stage[worker[1]]) for worker in {each.worker for each in first.operations}
    }
    worst = sorted(scores, key=lambda worker: (-scores[worker], worker))
    slowest = set(worst[: math.ceil(len(worst) * SLOWEST_SHARE)])
    (without,) = _means(steps, actual, usual, [lambda each: each.worker not in slowest])
    lost = step_s - ideal_s
    return WhatIf(
        step_s, ideal_s, step_s / ideal_s if ideal_s else 1.0,
        (step_s - without) / lost if lost else 0.0, (step_s - rest[-1]) / lost if lost else 0.0,
        [(worker, scores[worker]) for worker in worst], by_copy, by_stage, by_kind, len(steps), left_out,
    )  # fmt: skip


def _type(each: Operation) -> str:
    """Both ends of a message are of one type."""
    return f"{_MESSAGES[each.kind][0]}-pp-comm" if each.kind in _MESSAGES else each.kind


def _usual_times(steps: Mapping[int, _Groups], actual: Mapping[int, Times]) -> dict[str, float]:
    times: dict[str, list[float]] = defaultdict(list)
    for number, groups in steps.items():
        for each, took in zip(groups.operations, actual[number], strict=True):
            times[_type(each)].append(float(took))
    is_sent = (*_COLLECTIVES, "forward-pp-comm", "backward-pp-comm")
    return {kind: float((np.median if kind in is_sent else np.mean)(took)) for kind, took in times.items()}


def _means(
    steps: Mapping[int, _Groups],
    actual: Mapping[int, Times],
    usual: Mapping[str, float],
    parts: Sequence[Callable[[Operation], bool]],
) -> list[float]:
    """The mean step of each case: its operations for which ``parts`` say so take the time that they took."""
    total = np.zeros(len(parts))
    for number, groups in steps.items():
        ideal = np.array([usual[_type(each)] for each in groups.operations])
        is_actual = np.array([[part(each) for part in parts] for each in groups.operations])
        total += groups.step_s(np.where(is_actual, actual[number][:, None], ideal[:, None]))
    return [float(value) for value in total / len(steps)]
