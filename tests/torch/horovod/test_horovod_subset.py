"""Jobs of some of the ranks that a launcher started."""

from __future__ import annotations

import doctest
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from support import warm
from support.clusters import bpslaunch, clean_environment

import byteps_py.torch as hvd
from byteps_py.config.settings import Settings
from byteps_py.torch.horovod import api
from byteps_py.torch.horovod.api import among

PROGRAM = Path(__file__).parents[2] / "programs" / "subset.py"


def test_settings_of_some_of_the_ranks() -> None:
    two_machines = Settings(num_workers=2, worker_id=1, local_size=2, local_rank=1, job_id="j", num_servers=1)
    assert among(two_machines, []) is two_machines
    assert among(two_machines, range(4)) is two_machines
    inside = among(two_machines, [2, 3])
    assert (inside.num_workers, inside.num_servers, inside.local_size, inside.local_rank) == (1, 0, 2, 1)
    assert inside.job != among(two_machines, [3]).job
    assert among(two_machines, [3]).is_alone
    with pytest.raises(hvd.ConfigurationError, match="several machines"):
        among(two_machines, [1, 3])
    with pytest.raises(ValueError, match="does not have this rank, 3"):
        among(two_machines, [0, 1])
    for ranks in ([3, 2], [3, 3], [-1, 3], [3, 4]):
        with pytest.raises(ValueError, match="ascending ranks from 0 to 3"):
            among(two_machines, ranks)


def test_the_example() -> None:
    assert doctest.testmod(api).failed == 0


@pytest.mark.slow
def test_under_our_launcher() -> None:
    run = bpslaunch(["-np", "3"], [PROGRAM])
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("all is well") == 3


@pytest.mark.slow
def test_without_a_launcher() -> None:
    job = f"test-{uuid.uuid4()}"
    ranks = [
        warm.Popen(
            [sys.executable, PROGRAM],
            env=clean_environment(BYTEPS_JOB_ID=job, BYTEPS_LOCAL_RANK=str(rank), BYTEPS_LOCAL_SIZE="3"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0, 0], outputs
    assert all("all is well" in output for output in outputs)
