"""The bounds of each step of a job, from the one trace of the job (cluster_trace.py). Pure; any thread.

A step lasts, on each rank, from the last end of an operation of the step before to its own last end; the first step of
a trace begins with its first operation. Communication is *exposed*
while a rank's training thread waits for it. The rank that waits least bounds the step: the others wait for it. If even
that rank waits for more than half of the step, the step is bound by communication, and by the stage that was at work
for the longest time meanwhile.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from byteps_py.errors import UsageError
from byteps_py.system.cluster_trace import FORMAT, WAIT

_MAX_BYTES = 4 << 30
_BOUND = 0.5


@dataclass(frozen=True, slots=True)
class StepSummary:
    """Times in seconds. ``exposed_s``, ``communication_s``: averages over the ranks. ``bound_by``: "computation", or
    the name of a stage or an operation. ``where``: the process, with its host."""

    step: int
    duration_s: float
    communication_s: float
    exposed_s: float
    bound_by: str
    where: str


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """``stages``: the seconds in which each stage was at work, by process. ``remarks``: what makes the trace incomplete
    or inexact."""

    steps: list[StepSummary]
    stages: dict[str, dict[str, float]]
    nbytes: int
    clock_error_us: float
    remarks: list[str]


Interval = tuple[float, float]


def read_cluster_trace(path: Path) -> dict[str, Any]:
    """The trace. Raises UsageError if it can't be read, is cut off, or was not written by this version."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path} has more than {_MAX_BYTES >> 30} GB: trace fewer steps")
        found = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON, or is cut off: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("otherData"), dict):
        raise UsageError(f"{path} is not the trace of a job that BYTEPS_TRACE_ON=1 writes (trace.json)")
    version = found["otherData"].get("byteps_trace")
    if version != FORMAT:
        raise UsageError(f"{path} has format {version}; this version of byteps_py reads format {FORMAT}")
    return found


def summarize(trace: dict[str, Any]) -> TraceSummary:
    """Raises UsageError for a trace whose events are malformed."""
    try:
        return _summarize(trace)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"the trace has a malformed event: {error!r}") from None


def _summarize(trace: dict[str, Any]) -> TraceSummary:
    about, events = trace["otherData"], trace["traceEvents"]
    spans = [each for each in events if each["ph"] == "X"]
    processes = {each["pid"]: each["args"]["name"] for each in events if each.get("name") == "process_name"}
    ranks = sorted(pid for pid, name in processes.items() if name.startswith("rank "))
    by_rank: dict[int, list[dict[str, Any]]] = {pid: [] for pid in ranks}
    services: list[dict[str, Any]] = []
    for span in spans:
        by_rank.get(span["pid"], services).append(span)
    remarks = [*about.get("missing", ())]
    remarks += [f"{who} has overwritten {count} of its operations" for who, count in about["lost_operations"].items()]
    steps = []
    windows = {pid: _steps_of(found) for pid, found in by_rank.items() if found}
    for step in sorted({step for found in windows.values() for step in found}):
        of_step = {pid: found[step] for pid, found in windows.items() if step in found}
        steps.append(_summary_of(step, of_step, by_rank, services, processes))
    if not steps:
        remarks.append(f"no rank has an operation in steps {about['steps'][0]} to {about['steps'][1]}")
    stages: dict[str, dict[str, float]] = defaultdict(dict)
    for (name, pid), found in _grouped(services).items():
        stages[name][processes[pid]] = _length(_union(found)) / 1e6
    nbytes = sum(each["args"]["bytes"] for pid in ranks for each in by_rank[pid] if each["cat"] != WAIT)
    return TraceSummary(steps, dict(stages), nbytes, max(about["clock_error_us"].values(), default=0.0), remarks)


def _steps_of(spans: Sequence[dict[str, Any]]) -> dict[int, Interval]:
    """The time of each step of a rank, in µs."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for span in spans:
        step, end = span["args"]["step"], span["ts"] + span["dur"]
        first[step] = min(first.get(step, span["ts"]), span["ts"])
        last[step] = max(last.get(step, end), end)
    return {step: (min(last.get(step - 1, begin), last[step]), last[step]) for step, begin in first.items()}


def _summary_of(
    step: int,
    windows: dict[int, Interval],
    by_rank: dict[int, list[dict[str, Any]]],
    services: Sequence[dict[str, Any]],
    processes: dict[int, str],
) -> StepSummary:
    begin, end = min(start for start, _ in windows.values()), max(end for _, end in windows.values())
    exposed, busy = {}, {}
    for pid, window in windows.items():
        own = [span for span in by_rank[pid] if span["ts"] < window[1] and span["ts"] + span["dur"] > window[0]]
        exposed[pid] = _union(_cut((span for span in own if span["cat"] == WAIT), window))
        busy[pid] = _union(_cut((span for span in own if span["cat"] != WAIT), window))
    least = min(windows, key=lambda pid: _length(exposed[pid]))
    waited, length = _length(exposed[least]), max(windows[least][1] - windows[least][0], 1e-9)
    bound_by, where = "computation", processes[least]
    if waited > _BOUND * length:
        bound_by, where = _longest(services, exposed[least], processes) or _longest(
            [span for span in by_rank[least] if span["cat"] != WAIT], exposed[least], processes
        ) or (bound_by, where)  # fmt: skip
    count = len(windows)
    return StepSummary(
        step, (end - begin) / 1e6, sum(map(_length, busy.values())) / count / 1e6,
        sum(map(_length, exposed.values())) / count / 1e6, bound_by, where,
    )  # fmt: skip


def _longest(
    spans: Sequence[dict[str, Any]], within: Sequence[Interval], processes: dict[int, str]
) -> tuple[str, str] | None:
    """The operation and the process that was at work for most of the time ``within``."""
    best: tuple[float, str, str] | None = None
    for (name, pid), found in _grouped(spans).items():
        at_work = _union(interval for window in within for interval in _cut(found, window))
        entry = _length(at_work), name, processes[pid]
        if entry[0] and (best is None or entry > best):
            best = entry
    return None if best is None else (best[1], best[2])


def _grouped(spans: Iterable[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    found: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for span in spans:
        found[span["name"], span["pid"]].append(span)
    return found


def _cut(spans: Iterable[dict[str, Any]], window: Interval) -> Iterable[Interval]:
    for span in spans:
        start, end = max(span["ts"], window[0]), min(span["ts"] + span["dur"], window[1])
        if end > start:
            yield start, end


def _union(intervals: Iterable[Any]) -> list[Interval]:
    """Disjoint intervals in order."""
    pairs = sorted(each if isinstance(each, tuple) else (each["ts"], each["ts"] + each["dur"]) for each in intervals)
    merged: list[Interval] = []
    for start, end in pairs:
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
