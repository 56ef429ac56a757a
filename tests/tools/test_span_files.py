"""Files of spans: what torch writes, and what is damaged."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.chrome_traces import violations
from support.simulated_spans import Cause, Training, simulate
from support.span_files import profiler_traces, recorder_dumps, write_all

from byteps_py.cli.__main__ import main
from byteps_py.errors import UsageError
from byteps_py.system.cluster_trace import TracePart, chrome_trace
from byteps_py.system.flight_dump import write_dump
from byteps_py.system.flight_recorder import OPERATIONS, FlightGroup, FlightRecorder, FlightSpan, Recording
from byteps_py.tools.slow_rank import COMPUTES, find_slow_ranks
from byteps_py.tools.span_files import read_spans, spans_of_recordings
from byteps_py.tools.spans import Spans

SLOW = [(5, COMPUTES)]


@pytest.fixture(scope="module")
def spans() -> Spans:
    return simulate(Training((2, 2, 1, 4), causes=(Cause(COMPUTES, 5, factor=2.0),)))


def named(path: Path) -> list[tuple[int, str]]:
    return [(each.rank, each.reason) for each in find_slow_ranks(read_spans(path)).slow]


@pytest.mark.parametrize("kind", ["pickle", "json"])
def test_dumps_of_flight_recorders(tmp_path: Path, spans: Spans, kind: str) -> None:
    read = read_spans(write_all(tmp_path, recorder_dumps(spans), kind))
    assert {group.dimension for group in read.groups} == {"dp", "pp", "tp"}
    assert read.hosts[5] == "host1"
    assert [(each.rank, each.reason) for each in find_slow_ranks(read).slow] == SLOW


def test_traces_of_the_profiler(tmp_path: Path, spans: Spans) -> None:
    write_all(tmp_path, profiler_traces(spans), "json")
    assert named(tmp_path) == SLOW
    for path in list(tmp_path.iterdir()):
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert named(tmp_path) == SLOW


def test_the_command_prints_rank_host_reason_and_price(
    tmp_path: Path, spans: Spans, capsys: pytest.CaptureFixture[str]
) -> None:
    write_all(tmp_path, recorder_dumps(spans), "json")
    assert main(["trace", "slow-rank", str(tmp_path)]) == 0
    assert "rank 5 on host1 computes slowly: " in capsys.readouterr().out
    assert main(["trace", "slow-rank", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["slow"][0]["rank"], found["slow"][0]["reason"]) == SLOW[0]
    assert found["ranks"] == 16


def test_a_trace_that_was_cut_off_is_used_as_far_as_it_goes(tmp_path: Path, spans: Spans) -> None:
    write_all(tmp_path, profiler_traces(spans), "json")
    path = tmp_path / "rank_3.json"
    path.write_bytes(path.read_bytes()[:-2000])
    read = read_spans(tmp_path)
    assert any("rank 3 was cut off" in note for note in read.notes)
    assert [(each.rank, each.reason) for each in find_slow_ranks(read).slow] == SLOW


def test_a_file_that_can_not_be_read_is_left_out_by_name(tmp_path: Path, spans: Spans) -> None:
    write_all(tmp_path, recorder_dumps(spans), "pickle")
    path = tmp_path / "rank_15"
    path.write_bytes(path.read_bytes()[:500])
    read = read_spans(tmp_path)
    assert any("rank_15" in note and "cut off" in note for note in read.notes)
    assert [(each.rank, each.reason) for each in find_slow_ranks(read).slow] == SLOW


class _Hostile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self._path),)


def test_a_pickle_calls_nothing(tmp_path: Path) -> None:
    file = tmp_path / "dumps" / "rank_0"
    file.parent.mkdir()
    file.write_bytes(pickle.dumps({"entries": [_Hostile(tmp_path / "made")]}))
    with pytest.raises(UsageError, match="it would call"):
        read_spans(file.parent)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"\x80\x04.", "no pickle of plain data"),
        (b"\xff\xfe\x00", "neither a pickle nor JSON"),
        (b"[" * 100_000, "nested too deeply|no JSON"),
        (b"{}", "neither a dump"),
        (b'{"entries": [{}]}', "not as torch writes it"),
        (b'{"entries": []}', "has no operations"),
        (b'{"traceEvents": []}', "no communication"),
        (b'{"traceEvents": [], "otherData": {"byteps_trace": 1}}', "bps trace summary reads it"),
        (b'{"version": "99", "entries": [{"process_group": 7}]}', "of another version, or damaged"),
        (b'{"entries": 7}', "not as torch writes it"),
        (b"\x1f\x8b123", "gzip"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "rank_0"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=why):
        read_spans(path)


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no files"):
        read_spans(tmp_path)
    with pytest.raises(UsageError, match="can't be read"):
        read_spans(tmp_path / "missing")


def test_torchs_own_gloo_dumps_have_no_times(tmp_path: Path) -> None:
    """As torch 2.13 writes them."""
    entry = {
        "process_group": ("3", "mesh_tp"), "collective_seq_id": 1, "p2p_seq_id": 0, "profiling_name": "gloo:all_reduce",
        "time_created_ns": 1795925427631812729, "input_sizes": [[1000]], "input_dtypes": ["Float"],
        "state": "scheduled", "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
        "retired": True, "is_p2p": False,
    }  # fmt: skip
    (tmp_path / "dump_0").write_bytes(pickle.dumps({"version": "2.10", "pg_config": {}, "entries": [entry]}))
    with pytest.raises(UsageError, match=r"torch's own gloo recorder has no times.*torch\.profiler"):
        read_spans(tmp_path)


def recordings_of(groups: Sequence[FlightGroup]) -> list[Recording]:
    """Four ranks, two sums in a step; rank 2 works longer. With two groups, each sum has its own."""
    code, now = OPERATIONS.index("all_reduce"), time.monotonic_ns()
    spans: dict[int, list[FlightSpan]] = {rank: [] for rank in range(4)}
    for step in range(12):
        begin = now + step * 100_000_000
        for part, end_ms in enumerate((45, 90)):
            for rank in range(4):
                came = begin + (end_ms - (2 if rank == 2 else 25)) * 1_000_000
                ended = begin + end_ms * 1_000_000
                sequence = step + 1 if len(groups) == 2 else step * 2 + part + 1
                spans[rank].append(
                    FlightSpan(step * 2 + part + 1, groups[part % len(groups)], sequence, OPERATIONS[code], 4, step,
                               came, ended, ended, "completed", (1,), (1,), "Float", "Float")
                )  # fmt: skip
    found = []
    for rank in range(4):
        recorder = FlightRecorder(256, {"rank": rank})
        found.append(replace(recorder.read(), spans=spans[rank]))
        recorder.close()
    return found


WORLD = tuple(range(4))
MESH = [FlightGroup(1, "0", "mesh_dp", WORLD)]
#: Tensors that are summed by name count their operations each.
BY_NAME = [FlightGroup(1, "Gradient.a", "by name", WORLD, "name"), FlightGroup(2, "b", "by name", WORLD, "name")]


@pytest.mark.parametrize("groups", [MESH, BY_NAME])
def test_dumps_of_byteps_own_recorder(tmp_path: Path, groups: list[FlightGroup]) -> None:
    for recording in recordings_of(groups):
        write_dump(recording, tmp_path)
    read = read_spans(tmp_path)
    assert not read.notes
    assert set(read.hosts) == set(range(4))
    found = find_slow_ranks(read)
    assert [(each.rank, each.reason) for each in found.slow] == [(2, COMPUTES)]
    assert found.path[0].rank == 2
    assert not found.notes


@pytest.mark.slow
def test_ten_thousand_tensors() -> None:
    """In each of four steps; rank 2 works 90 of 100 µs before each, the others 20."""
    tensors = 10_000
    groups = [FlightGroup(at + 1, f"tensor {at}", "by name", WORLD, "name") for at in range(tensors)]
    recordings = []
    for rank in WORLD:
        spans = []
        for number in range(4 * tensors):
            came, ended = number * 100_000 + (90_000 if rank == 2 else 20_000), number * 100_000 + 100_000
            spans.append(FlightSpan(number + 1, groups[number % tensors], number // tensors + 1, "all_reduce", 4,
                                    number // tensors, came + 1, came + 1, ended, "completed", (1,), (1,), "Float",
                                    "Float"))  # fmt: skip
        recordings.append(Recording({"rank": rank, "host": "h"}, 0, 0, spans, groups))
    found = find_slow_ranks(spans_of_recordings(recordings, {}))
    ((rank, reason, price),) = [(each.rank, each.reason, each.price) for each in found.slow]
    assert (rank, reason) == (2, COMPUTES)
    assert price == pytest.approx(0.7, abs=0.01)
    parts = [TracePart(f"rank {rank}", "a process", each) for rank, each in enumerate(recordings)]
    trace = chrome_trace(parts, [], (1, 2), (0, 0))
    assert violations(trace) == []
    assert sum(event["name"] == "thread_name" for event in trace["traceEvents"]) == 4  # not one for each tensor


def test_recorders_of_a_running_job() -> None:
    """Ranks are at different places of their latest step, and one machine does not answer."""
    recordings = recordings_of(BY_NAME)
    first = recordings[0]
    running = replace(first.spans[-1], ended_ns=0, state="scheduled")
    recordings[0] = replace(first, spans=[*first.spans[:-1], running])
    recordings[1] = replace(recordings[1], spans=recordings[1].spans[:-3])  # it has not come to step 11
    found = find_slow_ranks(spans_of_recordings(recordings, {}))
    assert [(each.rank, each.reason) for each in found.slow] == [(2, COMPUTES)]
    assert (found.steps, found.notes) == (9, ())
    with pytest.raises(UsageError, match=r"no operation has the spans of all .*: rank 0: it has not answered"):
        find_slow_ranks(spans_of_recordings(recordings[1:], {"rank 0": "it has not answered"}))
    with pytest.raises(UsageError, match=r"has operations that can be compared: rank 0: has left"):
        spans_of_recordings([], {"rank 0": "has left"})


PROGRAM = """
import sys
import time
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

dist.init_process_group("gloo")
rank = dist.get_rank()
with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=6)) as profiler:
    for step in range(8):
        for gradient in [torch.ones(1000) for _ in range(3)]:
            time.sleep(0.4 if rank == 1 else 0.1)
            dist.all_reduce(gradient)
        profiler.step()
profiler.export_chrome_trace(f"{sys.argv[1]}/rank_{rank}.json")
dist.destroy_process_group()
"""


@pytest.mark.long
def test_traces_of_a_real_training(tmp_path: Path) -> None:
    """Three processes with gloo."""
    program, traces = tmp_path / "train.py", tmp_path / "traces"
    program.write_text(PROGRAM)
    traces.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    subprocess.run([*command, str(program), str(traces)], check=True, capture_output=True, timeout=120)
    assert named(traces) == [(1, COMPUTES)]
