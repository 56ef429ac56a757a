"""The trace of a job as data, and its summary: clocks that differ, what bounds a step, and files that are no traces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.chrome_traces import violations

from byteps_py.cli.__main__ import main as bps
from byteps_py.errors import UsageError
from byteps_py.system.cluster_trace import TracePart, chrome_trace
from byteps_py.system.flight_recorder import FlightGroup, FlightSpan, Recording
from byteps_py.tensors import key_of
from byteps_py.tools.trace_summary import read_cluster_trace, summarize

MS = 1_000_000
NAMED = FlightGroup(1, "w", "by name", (0, 1), "name")
WAITS = FlightGroup(2, "waits", "", (), "wait")


def span(
    group: FlightGroup, operation: str, start_ms: int, end_ms: int, step: int = 1, sequence: int = 1
) -> FlightSpan:
    end_ns = end_ms * MS
    return FlightSpan(1, group, sequence, operation, 8, step, start_ms * MS, start_ms * MS, end_ns,
                      "completed" if end_ns else "started", (2,), (2,), "Float", "Float")  # fmt: skip


def rank(number: int, shift_ms: int, *spans: FlightSpan) -> TracePart:
    recording = Recording({"rank": number, "host": "h"}, 0, 0, list(spans), [])
    return TracePart(f"rank {number}", "a process", recording, shift_ms * MS, 50_000)


def service(who: str, shift_ms: int, *spans: FlightSpan) -> TracePart:
    return TracePart(who, "a process", Recording({"host": "h"}, 0, 0, list(spans), []), shift_ms * MS, 1000)


def stage(name: str) -> FlightGroup:
    return FlightGroup(3, name, "0", (), "stage")


def a_job(*, is_slow_link: bool) -> list[TracePart]:
    """Rank 1's clock is 1000 ms behind. Both compute until 10, and have the sum at 100; rank 1 computes until 95
    unless the link is slow."""
    late = 12 if is_slow_link else 95
    key = f"{key_of('w'):#018x}"
    return [
        rank(0, 0, span(NAMED, "all_reduce", 10, 100), span(WAITS, "wait", 11, 100),
             span(NAMED, "all_reduce", 0, 1, 0, 9)),
        rank(1, 1000, span(NAMED, "all_reduce", late - 1000, -900), span(WAITS, "wait", late + 1 - 1000, -900),
             span(NAMED, "all_reduce", -1000, -999, 0, 9), span(NAMED, "all_reduce", -700, -690, 9)),
        service("worker 0", 0, span(stage("w"), "exchange", 13 if is_slow_link else 95, 99)),
        service("server", 0, span(stage(key), "sum", 97, 98), span(stage(key), "sum", 5000, 5001)),
    ]  # fmt: skip


def test_clocks_are_aligned_and_other_steps_left_out() -> None:
    found = chrome_trace(a_job(is_slow_link=True), [], (1, 2), (0, 123_000))
    spans = [event for event in found["traceEvents"] if event["ph"] == "X"]
    sums = {event["pid"]: (event["ts"], event["dur"]) for event in spans if event["name"] == "all_reduce"}
    assert sums == {0: (0.0, 90_000.0), 1: (2000.0, 88_000.0)}
    assert [event["args"]["tensor"] for event in spans if event["name"] == "sum"] == ["w"]
    assert found["otherData"]["zero_unix_ns"] == 10 * MS + 123_000
    ways = {event["id"] for event in found["traceEvents"] if event["ph"] == "s"}
    (way,) = ways
    assert [e["ph"] for e in found["traceEvents"] if e.get("id") == way] == ["s", "t", "t", "f"]


def test_what_bounds_a_step() -> None:
    slow_link = summarize(chrome_trace(a_job(is_slow_link=True), ["rank 7: lost"], (0, 2), (0, 0)))
    assert (slow_link.steps[1].bound_by, slow_link.steps[1].where) == ("exchange", "worker 0 (h)")
    assert slow_link.steps[1].exposed_s == pytest.approx((0.089 + 0.087) / 2)
    assert slow_link.remarks == ["rank 7: lost"]
    computing = summarize(chrome_trace(a_job(is_slow_link=False), [], (0, 2), (0, 0)))
    assert (computing.steps[1].bound_by, computing.steps[1].where) == ("computation", "rank 1 (h)")
    assert computing.steps[1].duration_s == pytest.approx(0.099)
    assert computing.clock_error_us == 50.0


def test_jumps_of_wall_clocks_change_nothing() -> None:
    parts = a_job(is_slow_link=True)
    jumped = [replace(each, recording=replace(each.recording, wall_ns=at * 10**15)) for at, each in enumerate(parts)]
    assert chrome_trace(jumped, [], (1, 2), (0, 0)) == chrome_trace(parts, [], (1, 2), (0, 0))


def test_a_hosted_step_bounds_the_step() -> None:
    """The sum is there at 20; the service of rank 0's machine steps until 90."""
    parts = [
        *(rank(at, 0, span(NAMED, "all_reduce", 10, 100), span(WAITS, "wait", 11, 100),
               span(NAMED, "all_reduce", 0, 1, 0, 9)) for at in (0, 1)),
        service("worker 0", 0, span(stage("w"), "exchange", 13, 20), span(stage("w"), "optimizer_step", 20, 90)),
    ]  # fmt: skip
    trace = chrome_trace(parts, [], (1, 2), (0, 0))
    assert violations(trace) == []
    (step,) = summarize(trace).steps
    assert (step.bound_by, step.where) == ("optimizer_step", "worker 0 (h)")


def test_a_process_with_recordings_of_two_groups() -> None:
    """Both groups count the rounds of a tensor from 1. An operation of the first one has not ended."""
    first = [rank(at, 0, span(NAMED, "all_reduce", 10, 0), span(WAITS, "wait", 11, 20)) for at in (0, 1)]
    second = [rank(at, 0, span(NAMED, "all_reduce", 50, 60, 2)) for at in (0, 1)]
    parts = [
        replace(
            part, recording=replace(part.recording, about={**part.recording.about, "epoch": epoch}, monotonic_ns=at)
        )
        for group, epoch, at in ((first, 1, 0), (second, 2, 40 * MS))
        for part in group
    ]
    trace = chrome_trace(parts, [], (1, 2), (0, 0))
    assert violations(trace) == []
    sums = [(e["pid"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["name"] == "all_reduce"]
    assert sorted(sums) == [(pid, ts, dur) for pid in (0, 1) for ts, dur in ((0.0, 30_000.0), (40_000.0, 10_000.0))]
    assert [event["ph"] for event in trace["traceEvents"] if event["ph"] in "stf"] == ["s", "f", "s", "f"]


def test_operations_that_overlap_have_rows_of_their_own() -> None:
    """Of three partitions on their way, the third begins when the first is back."""
    ways = [span(stage("w"), "exchange", begin, end) for begin, end in ((0, 10), (5, 15), (10, 20))]
    ranks = [rank(at, 0, span(NAMED, "all_reduce", 0, 20)) for at in (0, 1)]
    trace = chrome_trace([*ranks, service("worker 0", 0, *ways)], [], (1, 2), (0, 0))
    assert violations(trace) == []
    rows = [each["tid"] for each in trace["traceEvents"] if each["name"] == "exchange" and each["ph"] == "X"]
    assert rows[0] == rows[2] != rows[1]


def test_an_operation_that_never_ended_and_an_empty_window() -> None:
    found = chrome_trace(
        [rank(0, 0, span(NAMED, "all_reduce", 10, 0), span(WAITS, "wait", 12, 30))], [], (1, 1), (0, 0)
    )
    (never,) = [event for event in found["traceEvents"] if event.get("name") == "all_reduce"]
    assert (never["dur"], never["args"]["state"]) == (20_000.0, "started")
    empty = summarize(chrome_trace(a_job(is_slow_link=True), [], (50, 60), (0, 0)))
    assert empty.steps == []
    assert empty.remarks == ["no rank has an operation in steps 50 to 60"]
    assert summarize(chrome_trace([], [], (1, 2), (0, 0))).steps == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(chrome_trace(a_job(is_slow_link=True), ["rank 7: lost"], (0, 2), (0, 0))))
    assert bps(["trace", "summary", str(file)]) == 0
    said = capsys.readouterr().out
    assert "exchange on worker 0 (h)" in said
    assert "note: rank 7: lost" in said
    assert bps(["trace", "summary", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"][1]["bound_by"] == "exchange"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "cut off"),
        ('{"traceEvents": [', "cut off"),
        ("[]", "not the trace of a job"),
        ('{"traceEvents": []}', "not the trace of a job"),
        ('{"traceEvents": [], "otherData": {"byteps_trace": 99}}', "format 99"),
        ('{"traceEvents": [{"ph": "X"}], "otherData": {"byteps_trace": 1, "lost_operations": {}}}', "malformed"),
        ('{"traceEvents": [7], "otherData": {"byteps_trace": 1}}', "malformed"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    file.write_text(text)
    assert bps(["trace", "summary", str(file)]) == 2
    assert why in capsys.readouterr().err
    with pytest.raises(UsageError, match="can't be read"):
        read_cluster_trace(tmp_path / "none.json")
