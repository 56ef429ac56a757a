"""The one trace of a job, from real processes: what is in it, what `bps trace summary` says of it, and jobs that end
before its last step."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support.breaking import command
from support.chrome_traces import violations
from support.clusters import ROOT, bpslaunch
from support.documents import Page, at_own_places, commands_of

from byteps_py.tools.trace_summary import read_cluster_trace, summarize

PROGRAM = ROOT / "tests" / "programs" / "traced.py"
WINDOW = {"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_START_STEP": "3", "BYTEPS_TRACE_END_STEP": "5"}


def spans(trace: dict[str, Any], **wanted: object) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and all(e.get(k) == v for k, v in wanted.items())]


def names(trace: dict[str, Any]) -> dict[int, str]:
    return {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}


def test_every_process_and_stage_is_in_the_trace(tmp_path: Path) -> None:
    [(line, _)] = commands_of(Page(ROOT / "docs" / "howto" / "trace-a-job.md").blocks_after("trace")[0])
    places = {"STEP=100": "STEP=3", "STEP=105": "STEP=5", "=traces": f"={tmp_path}"}
    words = shlex.split(at_own_places(line, places))
    at = words.index("bpslaunch")
    assert words[-2:] == ["python", "train.py"]
    done = bpslaunch(words[at + 1 : -2], [PROGRAM, "60"], **dict(each.split("=") for each in words[:at]))
    assert done.returncode == 0, done.stderr
    assert "the trace of steps 3 to 5 is in" in done.stderr
    assert "clocks known to within" in done.stderr
    trace = read_cluster_trace(tmp_path / "trace.json")
    about, processes = trace["otherData"], names(trace)
    assert violations(trace) == []
    assert about["missing"] == []
    kinds = sorted(name.split()[0] for name in processes.values())
    assert (
        kinds == ["rank"] * 4 + ["server"] * 2 + ["worker"] * 2
        or kinds == ["rank"] * 4 + ["server"] * 3 + ["worker"] * 2
    )
    assert all(0 < error < 1e6 for error in about["clock_error_us"].values())
    by_rank = [spans(trace, pid=rank) for rank in range(4)]
    for own in by_rank:
        assert {each["args"]["step"] for each in own} == {3, 4, 5}
        assert {"all_reduce", "send", "recv", "wait"} <= {each["name"] for each in own}
        assert "tp" in {each["cat"] for each in own}
    stages = {each["name"] for each in spans(trace, cat="stage")}
    assert stages == {"local_reduce", "exchange", "wait_for_machines", "sum", "local_broadcast"}
    # The way of one tensor's round is linked through ranks, services and a server.
    named = spans(trace, pid=0, cat="name")[0]["args"]
    way = [
        each
        for each in trace["traceEvents"]
        if each["ph"] in "stf" and each["id"] in {f["id"] for f in flows_of(trace, named["tensor"], named["sequence"])}
    ]
    assert {processes[each["pid"]].split()[0] for each in way} == {"rank", "worker", "server"}
    found = summarize(trace)
    assert [step.step for step in found.steps] == [3, 4, 5]
    for step in found.steps:
        assert 0 < step.exposed_s <= step.duration_s
        assert step.bound_by in ("computation", "all_reduce", "send", "recv", *stages)
    assert set(found.stages) == stages
    assert found.nbytes > 4 * 3 * 2_000_000
    assert found.remarks == []


def flows_of(trace: dict[str, Any], tensor: str, sequence: int) -> list[dict[str, Any]]:
    """The flow events at the beginnings of a tensor's spans of this round."""
    at = {
        (each["pid"], each["tid"], each["ts"])
        for each in trace["traceEvents"]
        if each["ph"] == "X" and each["args"].get("tensor") == tensor and each["args"]["sequence"] == sequence
    }
    return [e for e in trace["traceEvents"] if e["ph"] in "stf" and (e["pid"], e["tid"], e["ts"]) in at]


def test_a_job_that_ends_within_the_window(tmp_path: Path) -> None:
    done = bpslaunch(["-np", "2"], [PROGRAM, "5"], **WINDOW, BYTEPS_TRACE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    trace = read_cluster_trace(tmp_path / "trace.json")
    assert "the job ended before all ranks were past step 5" in trace["otherData"]["missing"]
    for rank in range(2):
        assert {each["args"]["step"] for each in spans(trace, pid=rank)} == {3, 4}


@pytest.mark.slow
def test_ranges_in_torchs_profiler() -> None:
    done = bpslaunch(["-np", "2"], [ROOT / "tests" / "programs" / "profiled.py"])
    assert done.returncode == 0, done.stderr
    found = [json.loads(text) for text in re.findall(r"rank \d: (\{.*\})", done.stdout)]
    assert len(found) == 2
    for counts in found:
        named = {"byteps::all_reduce": 2, "byteps::send": 1, "byteps::recv": 1, "byteps::wait for x": 1}
        assert {name: counts.get(name, 0) for name in named} == named, counts
    # The last rank to come need not wait. The step of a hosted optimizer takes parameters that come later.
    for where in ("step 0", "step 1", "barrier"):
        assert any(f"byteps::wait in {where}" in counts for counts in found), (where, found)


@pytest.mark.slow
def test_a_machine_that_dies_in_the_window(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "byteps_py.launch", "-np", "1", "--machines", "2", sys.executable, str(PROGRAM)]
    window = {**WINDOW, "BYTEPS_TRACE_END_STEP": "1000000", "BYTEPS_TRACE_DIR": str(tmp_path)}
    with command(*launch, "1000000", **window) as job:
        job.until("rank 0: step 20", "rank 1: step 20")
        os.kill(job.pid("byteps_py.worker", DMLC_WORKER_ID="1"), signal.SIGKILL)
        assert job.end() != 0
    found = json.loads((tmp_path / "trace.json").read_text())
    assert spans(found, pid=0)
    assert any("has sent nothing" in each for each in found["otherData"]["missing"])
    assert any("ended before" in each for each in summarize(found).remarks)
