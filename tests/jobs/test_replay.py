"""An asynchronous run, whose bits differ each time, is repeated bit for bit from the logs of its machines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs.test_recovery import servers
from support.breaking import Job, launch
from support.clusters import ROOT, clean_environment

PROGRAM = str(ROOT / "tests" / "programs" / "async_training.py")
OPTIONS = "-np 1 --machines 2 --servers 1"
PARTITIONS = {"BYTEPS_PARTITION_BYTES": "16384"}
DIGEST = re.compile(r"rank (\d): (\w{64})")


def recorded(folder: Path, steps: str, staleness: str, fault: Callable[[Job], None] | None = None) -> dict[str, str]:
    """What each rank had, after each of its steps."""
    environ = {**PARTITIONS, "BYTEPS_RECORD_ARRIVALS": str(folder)}
    with launch(OPTIONS, "noisy", steps, staleness, program=PROGRAM, **environ) as job:
        if fault is not None:
            job.until("ten steps")
            fault(job)
        assert job.end() == 0, job.text
    return dict(DIGEST.findall(job.text))


def replay(folder: Path, *words: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "byteps_py.cli", "replay", *options, str(folder), *words]
    return subprocess.run(command, env=clean_environment(**PARTITIONS), capture_output=True, text=True, timeout=120)


def again(folder: Path, steps: str, staleness: str) -> dict[str, str]:
    """The same of its replay: the job that `bps replay` starts."""
    environ = {**PARTITIONS, "BYTEPS_REPLAY_ARRIVALS": str(folder)}
    with launch(OPTIONS, "noisy", steps, staleness, program=PROGRAM, **environ) as job:
        assert job.end() == 0, job.text
    return dict(DIGEST.findall(job.text))


@pytest.mark.parametrize("staleness", ["2", pytest.param("0", marks=pytest.mark.slow)])
def test_a_run_is_repeated_bit_for_bit(staleness: str, tmp_path: Path) -> None:
    first = recorded(tmp_path, "25", staleness)
    assert len(first) == 2
    assert again(tmp_path, "25", staleness) == first
    checked = replay(tmp_path)
    assert (checked.returncode, checked.stdout) == (0, "2 machines, 9 partitions, 468 changes\n")
    facts = json.loads(replay(tmp_path, options=("--json",)).stdout)
    assert facts == {"machines": 2, "partitions": 9, "changes": 468, "unsure": 0}


@pytest.mark.long
def test_the_command_starts_the_job_and_one_that_goes_on_for_longer_is_told_so(tmp_path: Path) -> None:
    first = recorded(tmp_path, "5", "0")
    job = [sys.executable, "-m", "byteps_py.launch", *OPTIONS.split(), sys.executable, PROGRAM, "noisy"]
    assert dict(DIGEST.findall(replay(tmp_path, *job, "5", "0").stdout)) == first
    longer = replay(tmp_path, *job, "6", "0")
    assert longer.returncode == 1, longer.stderr
    assert "UsageError: tensor 'AsyncOptimizer.1.0': the run that is replayed has no round 7" in longer.stderr


def kill_the_cpu_machines_server(job: Job) -> None:
    os.kill(servers(job)[0], signal.SIGKILL)
    job.until("lost server")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_run_whose_server_died_is_repeated_without_that(tmp_path: Path) -> None:
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        first = recorded(folder, "400", "3", kill_the_cpu_machines_server)
        checked = replay(folder)
        assert checked.returncode == 0, checked.stderr
        if "no log tells" not in checked.stdout:  # most often, what the dead server had added last is known
            assert again(folder, "400", "3") == first
            return
    pytest.fail("in none of 5 runs do the logs tell the whole order")


def test_logs_that_are_not_those_of_a_run(tmp_path: Path) -> None:
    nothing = replay(tmp_path)
    assert (nothing.returncode, nothing.stderr) == (
        2,
        f"bps: {tmp_path} has no logs (machine-0.jsonl, …) of BYTEPS_RECORD_ARRIVALS\n",
    )
    (tmp_path / "machine-0.jsonl").write_text('["w", 1, 0, 1, 1, 1, 0]\n')
    (tmp_path / "machine-2.jsonl").write_text("")
    assert "a record of 2 machines, in the logs of 2 machines" not in (missing := replay(tmp_path)).stderr
    assert "the log of machine 1 can't be read" in missing.stderr
    with launch("-np 1", "noisy", "1", "0", program=PROGRAM, BYTEPS_REPLAY_ARRIVALS="x") as job:
        assert job.end() == 0  # one rank has no order
