"""The one trace of a job beside other features: hosted optimizers of both kinds and their copies, meshes, ranks that
are started again, elastic jobs. And the metrics of such jobs."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from support.breaking import launch
from support.chrome_traces import violations
from support.clusters import ROOT, bpslaunch

from byteps_py.tools.trace_summary import TraceSummary, read_cluster_trace, summarize

PROGRAMS = ROOT / "tests" / "programs"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def window(folder: Path, first: int, last: int) -> dict[str, str]:
    steps = {"BYTEPS_TRACE_START_STEP": str(first), "BYTEPS_TRACE_END_STEP": str(last)}
    return {"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_DIR": str(folder / "trace"), **steps}


def written(folder: Path) -> tuple[dict[str, Any], TraceSummary]:
    trace = read_cluster_trace(folder / "trace" / "trace.json")
    assert violations(trace) == []
    return trace, summarize(trace)


def spans_of(trace: dict[str, Any], pid: int) -> list[dict[str, Any]]:
    return sorted((e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == pid), key=lambda e: e["ts"])


def test_a_mesh_with_hosted_steps_and_copies(tmp_path: Path) -> None:
    """Tensor parallelism, pipelines, hosted="machine", shadow=True, a GradScaler whose third step is left out."""
    steps = 6
    done = bpslaunch(
        ["-np", "2", "--machines", "2", "--servers", "1"],
        [PROGRAMS / "shadowed_mesh.py", "2x1x2x1:machine", str(steps)],
        **window(tmp_path, 0, 1000),
    )
    assert done.returncode == 0, done.stderr
    trace, found = written(tmp_path)
    assert trace["otherData"]["missing"] == ["the job ended before all ranks were past step 1000"]
    assert set(range(steps)) <= {step.step for step in found.steps}
    assert len(found.stages["optimizer_step"]) == 2  # machines
    metrics = {int(rank): json.loads(text) for rank, text in re.findall(r"rank (\d): metrics (\{.*\})", done.stdout)}
    tokens = []
    for rank in range(4):
        own = spans_of(trace, rank)
        assert {"tp", "pp", "name", "wait"} <= {each["cat"] for each in own}
        assert {"send", "recv"} <= {each["name"] for each in own}
        assert metrics[rank]["steps"] == steps
        tokens.append(metrics[rank]["tokens"])
        # What the metrics call exposed are the waits of the trace, but for a few more until the job's end.
        waits_s = sum(each["dur"] for each in own if each["cat"] == "wait") / 1e6
        assert math.isclose(metrics[rank]["exposed_communication_seconds"], waits_s, rel_tol=0.05), rank
        assert 0 < metrics[rank]["exposed_communication_ratio"] < 1
    assert sorted(tokens) == [0, 0, 0, 8 * 16 * steps]  # one rank counts the batch of each copy of the model


def test_a_rank_that_is_started_again_keeps_what_was_before(tmp_path: Path) -> None:
    """hosted="sharded" with shadow=True: rank 3 is killed in step 5, and the others wait for it there."""
    with launch(
        "--max-restarts 2 -np 2 --machines 2 --servers 1", str(tmp_path), "12", program=PROGRAMS / "in_place.py",
        limit_s=180, TEST_KILLS="3:5:step", TEST_PAUSE_S="0.1", BYTEPS_HOSTED_STATES="sharded",
        **window(tmp_path, 3, 6),
    ) as job:  # fmt: skip
        assert job.end() == 0, job.text
    assert "rank 3 begins at step 5" in job.text
    trace, found = written(tmp_path)
    assert trace["otherData"]["missing"] == []
    assert [step.step for step in found.steps] == [3, 4, 5, 6]
    for rank in range(4):
        assert {each["args"]["step"] for each in spans_of(trace, rank)} == {3, 4, 5, 6}
    # The killed rank's sum of step 5 has not ended: it is drawn until the next group begins, where others wait.
    begun = [each for each in spans_of(trace, 3) if each["args"]["state"] == "started"]
    assert [each["args"]["step"] for each in begun] == [5] * len(begun)
    assert begun
    again = next(each for each in spans_of(trace, 3) if each["ts"] > begun[-1]["ts"])
    assert all(each["ts"] + each["dur"] <= again["ts"] for each in begun)
    assert found.steps[2].exposed_s > 5 * found.steps[0].exposed_s
    assert "shadow_step" in found.stages


def test_an_elastic_job_goes_on_with_a_rank_less(tmp_path: Path) -> None:
    told = tmp_path / "told"
    told.write_text("8 0")
    with launch(
        "--elastic -np 3", str(told), program=PROGRAMS / "elastic.py", limit_s=180, TEST_HOSTED="1",
        **window(tmp_path, 2, 11),
    ) as job:  # fmt: skip
        job.until("after 8 steps")
        os.kill(job.pid(str(PROGRAMS / "elastic.py"), BYTEPS_LOCAL_RANK="1"), signal.SIGKILL)
        job.until("group from step")
        told.with_suffix(".new").write_text("20 1")
        told.with_suffix(".new").rename(told)
        assert job.end() == 0, job.text
    trace, found = written(tmp_path)
    assert trace["otherData"]["missing"] == []
    assert [step.step for step in found.steps] == list(range(2, 12))
    processes = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    ranks = {pid for pid, name in processes.items() if name.startswith("rank ")}
    assert ranks == {0, 1, 2}
    assert {each["args"]["step"] for each in spans_of(trace, 0)} == set(range(2, 12))
    assert max(each["args"]["step"] for each in spans_of(trace, 2)) == 8  # there are two ranks then
