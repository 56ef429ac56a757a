"""Flight recorders of real jobs, read by torch's own analyser."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.breaking import command, environ_of
from support.clusters import ROOT, bpslaunch, clean_environment

PROGRAM = ROOT / "tests" / "programs" / "flight_recorder.py"
SIZE = 4


def analysis(folder: Path) -> str:
    """What torch's analyser says of the dumps of the only job below ``folder``."""
    (job,) = folder.iterdir()
    assert sorted(each.name for each in job.iterdir()) == [f"rank_{rank}" for rank in range(SIZE)]
    return fr_trace(job)


def fr_trace(folder: Path, *options: str) -> str:
    line = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder), *options]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, env=clean_environment())
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def run(how: str, folder: Path) -> subprocess.CompletedProcess[str]:
    done = bpslaunch(["-np", str(SIZE)], [PROGRAM, how], BYTEPS_FLIGHT_RECORDER_DIR=str(folder))
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_a_healthy_job_dumped_by_signals(tmp_path: Path) -> None:
    done = run("signal", tmp_path)
    assert "rank 0: its own handler" in done.stdout
    assert "every_kind" not in done.stdout
    assert "in main" in done.stdout  # of faulthandler, which rank 1 had registered
    assert done.stderr.count("the latest operations of this rank are in") == SIZE
    said = analysis(tmp_path)
    assert "rror" not in said, said
    assert "Not all ranks" not in said, said
    (job,) = tmp_path.iterdir()
    for rank in range(SIZE):
        with open(job / f"rank_{rank}", "rb") as file:
            dump = pickle.load(file)
        assert (dump["rank"], dump["byteps"]["size"], dump["byteps"]["lost"]) == (rank, SIZE, 0)
        kinds = {entry["profiling_name"].split(" ")[0] for entry in dump["entries"]}
        assert kinds >= {
            f"gloo:{name}"
            for name in (
                "all_reduce", "all_gather", "all_gather_v", "_all_gather_base", "_reduce_scatter_base", "broadcast",
                "reduce", "gather", "scatter", "all_to_all", "send", "recv", "barrier",
            )
        }  # fmt: skip
        for entry in dump["entries"]:
            assert entry["state"] == "completed", entry
            times = [entry[f"time_{name}_ns"] for name in ("created", "discovered_started", "discovered_completed")]
            assert times == sorted(times), entry
        along = [entry for entry in dump["entries"] if entry["mesh_dim"] == "tp"]
        assert [entry["collective_seq_id"] for entry in along] == [1, 2, 3]
        assert along[0]["nbytes"] == 14
        assert along[0]["input_dtypes"] == ["BFloat16"]
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert dump["pg_config"][along[0]["process_group"][0]]["ranks"] == str(pair)
        names = [entry["process_group"][0] for entry in dump["entries"] if entry["process_group"][1] == "by name"]
        for name in ("early", "late", "awaited"):
            assert sum(each.endswith(name) for each in names) == 3, names


MISSING = ("Not all ranks joining collective", "collective: gloo:all_reduce", "missing ranks: {2}")
ANOTHER = ("Culprit rank 2; Error type: COLLECTIVE_TYPE_MISMATCH", "found collective type: 'broadcast'")


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        pytest.param("missing", MISSING, marks=pytest.mark.slow),
        pytest.param("another", ANOTHER, marks=pytest.mark.long),
    ],
)
def test_the_culprit_of_a_stalled_job_is_named(tmp_path: Path, how: str, expected: tuple[str, ...]) -> None:
    done = run(how, tmp_path)
    assert "not complete within its timeout of 3 s" in done.stdout
    said = analysis(tmp_path)
    for text in expected:
        assert text in said, said
    assert said.count("sequence number") == 1, said  # and nothing else is wrong


@pytest.mark.slow
def test_a_job_that_hangs_is_dumped_from_all_machines(tmp_path: Path) -> None:
    """Python does not run on the rank that the others wait for."""
    launch = [sys.executable, "-m", "byteps_py.launch", "-np", "2", "--machines", "2"]
    with command(*launch, sys.executable, str(PROGRAM), "hang") as job:
        job.until(*(f"rank {rank}: hangs" for rank in range(SIZE)))
        (address,) = [line.split()[-1] for line in job.said if line.startswith("bpslaunch: job at")]
        frozen = job.pid("byteps_py.worker", DMLC_WORKER_ID="1")
        environ = {**clean_environment(), "XDG_RUNTIME_DIR": environ_of(frozen)["XDG_RUNTIME_DIR"]}

        def dump(name: str, *options: str) -> subprocess.CompletedProcess[str]:
            line = [sys.executable, "-m", "byteps_py.cli", "dump", "--scheduler", address, "-o", str(tmp_path / name)]
            return subprocess.run(
                [*line, *options], capture_output=True, text=True, timeout=60, check=False, env=environ
            )

        done = dump("all")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == (
            f"4 ranks (0-3): {tmp_path}/all/rank_N\n"
            f"  python -m torch.distributed.flight_recorder.fr_trace {tmp_path}/all\n"
        )
        assert "missing ranks: {2}" in fr_trace(tmp_path / "all")
        again = dump("all")
        assert again.returncode == 2
        assert "is not empty" in again.stderr

        os.kill(frozen, signal.SIGSTOP)
        partly = dump("some", "--timeout", "0.5", "--json")
        os.kill(frozen, signal.SIGCONT)
        found = json.loads(partly.stdout)
        assert (partly.returncode, found["ranks"]) == (1, [0, 1]), partly
        ((who, why),) = found["missing"].items()
        assert who.startswith("ranks 2-3 of worker 1 "), found
        assert why == "it has not answered"
        said = fr_trace(tmp_path / "some", "--allow-incomplete-ranks")
        assert "we missed FR dumps from ranks ({2, 3})" in said, said
