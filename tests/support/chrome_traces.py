"""The rules of the Trace Event Format as Perfetto's importer applies them:
what breaks one is not drawn, or drawn wrong.

See "Trace Event Format" (Google, 2016) and Perfetto's statistics ``slice_drop_overlapping_complete_event``,
``flow_step_without_start``, ``flow_end_without_start`` and ``flow_no_enclosing_slice``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

_NAMED = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index",
          "thread_sort_index": "sort_index"}  # fmt: skip


def violations(trace: dict[str, Any]) -> list[str]:
    """What is wrong with it, in sentences."""
    return [*_of_fields(trace), *_of_metadata(trace), *_of_slices(trace), *_of_flows(trace)]


def _of_fields(trace: dict[str, Any]) -> Iterator[str]:
    for event in trace["traceEvents"]:
        if event["ph"] not in "MXstf":
            yield f"a phase that is not used: {event}"
        if not all(isinstance(event[key], int) for key in ("pid", "tid")) or not isinstance(event["name"], str):
            yield f"pid, tid or name is of another type: {event}"
        if event["ph"] != "M" and not event["ts"] >= 0:
            yield f"no time: {event}"
        if event["ph"] == "X" and not event["dur"] >= 0:
            yield f"no duration: {event}"


def _of_metadata(trace: dict[str, Any]) -> Iterator[str]:
    counts: Counter[tuple[str, int, int]] = Counter()
    for event in trace["traceEvents"]:
        if event["ph"] == "M":
            counts[event["name"], event["pid"], event["tid"]] += 1
            if _NAMED.get(event["name"]) not in event["args"]:
                yield f"metadata without a value: {event}"
    yield from (f"metadata comes twice: {key}" for key, count in counts.items() if count > 1)
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and not (
            counts["process_name", event["pid"], 0] and counts["thread_name", event["pid"], event["tid"]]
        ):
            yield f"a process or row without a name: {event}"


def _of_slices(trace: dict[str, Any]) -> Iterator[str]:
    ends: dict[tuple[int, int], float] = {}
    for event in sorted((e for e in trace["traceEvents"] if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
        row = event["pid"], event["tid"]
        if event["ts"] + 1e-3 < ends.get(row, 0.0):  # times have three digits after the point
            yield f"it overlaps the one before in its row: {event}"
        ends[row] = max(ends.get(row, 0.0), event["ts"] + event["dur"])


def _of_flows(trace: dict[str, Any]) -> Iterator[str]:
    slices = {(e["pid"], e["tid"], e["ts"]) for e in trace["traceEvents"] if e["ph"] == "X"}
    flows: dict[object, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            flows[event["cat"], event["name"], event["id"]].append(event)
            if (event["pid"], event["tid"], event["ts"]) not in slices:
                yield f"a flow that touches no slice: {event}"
            if event["ph"] == "f" and event.get("bp") != "e":
                yield f"the end of a flow binds to the next slice, not to this one: {event}"
    for key, events in flows.items():
        if "".join(event["ph"] for event in events) != "s" + "t" * (len(events) - 2) + "f":
            yield f"a flow is no start, steps and end: {key}"
        if [event["ts"] for event in events] != sorted(event["ts"] for event in events):
            yield f"a flow goes back in time: {key}"
