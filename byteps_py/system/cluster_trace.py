"""One Chrome trace of a whole job, from what the flight recorders of its processes held. Pure; any thread.

A recording is of one group of ranks: an elastic job, or one whose ranks were started again, has several of a process.

Each process is a row of rows: ranks with their groups and named tensors, communication services and summation servers
with the stages of partitions. Times are those of the scheduler's clock; the clocks of other machines are known to
within the errors that "otherData" lists. Flows lead from a rank's hand-over of a named tensor to the stages of its
partitions, and from the member of a group that comes last to the others.

``TracePart``: a recording, of whom, and the clock. ``chrome_trace`` puts parts together. trace_summary.py reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from byteps_py.system.flight_recorder import FlightSpan, Recording
from byteps_py.tensors import key_of

#: Of "otherData": a trace with another one was written by another version.
FORMAT = 1
#: Time in which a rank's training thread waited for communication.
WAIT = "wait"
#: The row of all tensors of a rank that are summed by name, if there are more than so many.
_TENSORS, _MOST_TENSORS = "tensors", 100
_FIRST_PID_OF_SERVICES = 1_000_000


@dataclass(frozen=True, slots=True)
class TracePart:
    """``who``: "rank 3", "worker 0", "server 2". ``machine``: its process in words. ``offset_ns``: the scheduler's
    clock minus that of the process, known to within ``error_ns``."""

    who: str
    machine: str
    recording: Recording
    offset_ns: int = 0
    error_ns: int = 0


def chrome_trace(
    parts: Sequence[TracePart], missing: Sequence[str], steps: tuple[int, int], began: tuple[int, int]
) -> dict[str, Any]:
    """The trace as Chrome's and Perfetto's JSON.

    Args:
        missing: sentences about processes whose part is not there.
        steps: the first and the last one.
        began: the scheduler's monotonic and wall clock at one moment, in ns.
    """
    window = _window(parts, steps)
    zero_ns = min((part.offset_ns + span.enqueued_ns for part, span in _spans(parts, steps, window)), default=0)
    events: list[dict[str, Any]] = []
    flows: dict[tuple[Any, ...], list[tuple[float, float, int, int]]] = defaultdict(list)
    names = {f"{key_of(span.group.name):#018x}": span.group.name for part in parts for span in part.recording.spans
             if span.group.kind in ("name", "stage")}  # fmt: skip
    has_many = {id(part): len({s.group.id for s in part.recording.spans if s.group.kind == "name"}) > _MOST_TENSORS
                for part in parts}  # fmt: skip
    places = [(part.who, str(part.recording.about.get("host", part.machine))) for part in parts]
    pids = _pids(places)
    rows = _Rows()
    for (who, host), pid in pids.items():
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"{who} ({host})"}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
    ends_ns = _ends(parts, window)
    of_part = {id(part): pids[place] for part, place in zip(parts, places, strict=True)}
    for part, span in sorted(_spans(parts, steps, window), key=lambda one: one[0].offset_ns + one[1].enqueued_ns):
        pid = of_part[id(part)]
        tensor = names.get(span.group.name, span.group.name)
        start_ns = span.enqueued_ns + part.offset_ns
        end_ns = max(start_ns, span.ended_ns + part.offset_ns if span.ended_ns else ends_ns[id(part)])
        start_us, duration_us = (start_ns - zero_ns) / 1e3, (end_ns - start_ns) / 1e3
        tid = rows.place(pid, _row_name(span, _TENSORS if has_many[id(part)] else tensor), start_ns, end_ns)
        args = {"step": span.step, "sequence": span.sequence, "bytes": span.nbytes, "state": span.state}
        if span.group.kind in ("group", "pair"):
            args |= {"group": span.group.name, "dimension": span.group.dimension, "ranks": list(span.group.ranks)}
        else:
            args["tensor"] = tensor
            if span.group.kind == "stage":
                args["partition"] = span.group.description
        events.append({"ph": "X", "name": span.operation, "cat": _category(span), "pid": pid, "tid": tid,
                       "ts": start_us, "dur": duration_us, "args": args})  # fmt: skip
        if span.operation != WAIT:
            flows[part.recording.about.get("epoch"), *_flow_key(span, tensor)].append(
                (start_us, start_us + duration_us, pid, tid)
            )
    for number, (tid, pid, name) in enumerate(rows.in_order()):
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": number}})
    events += _flow_events(flows.values())
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "byteps_trace": FORMAT,
            "steps": list(steps),
            "zero_unix_ns": zero_ns - began[0] + began[1] if zero_ns else 0,
            "clock_error_us": _largest((part.who, part.error_ns / 1e3) for part in parts),
            "lost_operations": _largest((part.who, part.recording.lost) for part in parts if part.recording.lost),
            "hosts": {part.who: part.recording.about.get("host", "") for part in parts},
            "missing": list(missing),
        },
    }


class _Rows:
    """The rows of all processes. Operations that overlap have rows of their own with the same name: Perfetto leaves out
    what overlaps in a row."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, str], list[tuple[int, int]]] = {}  # until when each is taken, and its number
        self._count = 0

    def place(self, pid: int, name: str, start_ns: int, end_ns: int) -> int:
        """The number of the row for an operation that begins after those that were placed before it."""
        rows = self._rows.setdefault((pid, name), [])
        at = next((at for at, (until_ns, _) in enumerate(rows) if until_ns <= start_ns), len(rows))
        if at == len(rows):
            self._count += 1
            rows.append((end_ns, self._count))
        rows[at] = end_ns, rows[at][1]
        return rows[at][1]

    def in_order(self) -> Iterable[tuple[int, int, str]]:
        """The number, process and name of each row, those with the same name one below the other."""
        for (pid, name), rows in self._rows.items():
            for _, number in rows:
                yield number, pid, name


def _ends(parts: Iterable[TracePart], window: tuple[int, int] | None) -> dict[int, int]:
    """Until when operations of each part that have not ended are drawn, by ``id``: to the end of the window, or to the
    begin of the process's next group."""
    found: dict[int, int] = {}
    following: dict[str, int] = {}
    for part in sorted(parts, key=lambda part: -part.recording.monotonic_ns - part.offset_ns):
        last_ns = window[1] if window else 0
        found[id(part)] = min(last_ns, following.get(part.who, last_ns))
        following[part.who] = part.recording.monotonic_ns + part.offset_ns
    return found


def _largest(figures: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Of each process, which may have several parts."""
    found: dict[str, float] = {}
    for who, figure in figures:
        found[who] = max(found.get(who, 0), figure)
    return found


def _window(parts: Iterable[TracePart], steps: tuple[int, int]) -> tuple[int, int] | None:
    """The first and the last time, by the scheduler's clock, of the operations of ranks in these steps; None: there are
    none."""
    times = [
        at_ns + part.offset_ns
        for part in parts
        if part.who.startswith("rank ")
        for span in part.recording.spans
        if steps[0] <= span.step <= steps[1]
        for at_ns in (span.enqueued_ns, span.ended_ns or span.enqueued_ns)
    ]
    return (min(times), max(times)) if times else None


def _spans(
    parts: Iterable[TracePart], steps: tuple[int, int], window: tuple[int, int] | None
) -> Iterable[tuple[TracePart, FlightSpan]]:
    """The operations in the window: of ranks by their steps, of services by time."""
    for part in parts:
        is_rank = part.who.startswith("rank ")
        for span in part.recording.spans:
            if is_rank:
                if steps[0] <= span.step <= steps[1]:
                    yield part, span
            elif window is not None:
                start_ns, end_ns = (
                    span.enqueued_ns + part.offset_ns,
                    (span.ended_ns or span.enqueued_ns) + part.offset_ns,
                )
                if end_ns >= window[0] and start_ns <= window[1]:
                    yield part, span


def _pids(places: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """By process and host: a rank's is its number, unless another rank with this number was on another host before."""
    found: dict[tuple[str, str], int] = {}
    for at, place in enumerate(dict.fromkeys(places)):
        kind, _, number = place[0].partition(" ")
        pid = int(number) if kind == "rank" and number.isdecimal() else _FIRST_PID_OF_SERVICES + at
        found[place] = _FIRST_PID_OF_SERVICES + at if pid in found.values() else pid
    return found


def _row_name(span: FlightSpan, tensor: str) -> str:
    if span.operation == WAIT:
        return "waits"
    match span.group.kind:
        case "stage":
            return span.operation
        case "name":
            return tensor
        case "pair":
            return f"{span.operation} {span.group.dimension or span.group.name.partition(':')[0]}"
    return span.group.dimension or span.group.name


def _category(span: FlightSpan) -> str:
    if span.operation == WAIT:
        return WAIT
    return "stage" if span.group.kind == "stage" else span.group.dimension or span.group.kind


def _flow_key(span: FlightSpan, tensor: str) -> tuple[Any, ...]:
    if span.group.kind in ("stage", "name"):
        return "tensor", tensor.partition(" of ")[0], span.sequence
    return span.group.name, span.group.ranks, span.sequence


def _flow_events(flows: Iterable[Sequence[tuple[float, float, int, int]]]) -> Iterable[dict[str, Any]]:
    """An arrow from each operation to the one of the same flow that begins next in another process."""
    for number, ends in enumerate(flows):
        ordered = sorted(ends)
        if len({pid for _, _, pid, _ in ordered}) < 2:
            continue
        for at, (start_us, _, pid, tid) in enumerate(ordered):
            phase = "s" if not at else "f" if at + 1 == len(ordered) else "t"
            event = {"ph": phase, "name": "operation", "cat": "flow", "id": number, "pid": pid, "tid": tid,
                     "ts": start_us}  # fmt: skip
            yield {**event, "bp": "e"} if phase == "f" else event
