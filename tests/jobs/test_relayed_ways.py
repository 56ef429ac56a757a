"""Ranks that reach each other through a third machine, and directly again, many times while they train: with every
dimension of a mesh, checkpoints, hosted optimizers, and in elastic jobs. The results are those of direct ways."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import time

import pytest
import torch
from support.breaking import Job, command, launch
from support.clusters import ROOT
from test_elastic_process import Training, addressed

from byteps_py.launch.process_plan import free_port

PROGRAMS = ROOT / "tests" / "programs"
RELAYED = str(PROGRAMS / "relayed.py")
#: The usual emulated machines reach each other over loopback. Their ranks take the ways of different machines.
MACHINES = "-np 1 --machines 4 --servers 1"


def carried(job: Job) -> int:
    """By all relays, in bytes."""
    return sum(int(each) for each in re.findall(r"carried (\d+)", job.text))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param("2x2x1x1 2x1x2x1 1x2x1x2", id="mesh, and checkpoints", marks=pytest.mark.long),
        pytest.param("2x1x1x2:hosted=machine 1x1x2x2:hosted=sharded", id="mesh, hosted", marks=pytest.mark.long),
    ],
)
def test_every_dimension_of_a_mesh(cases: str) -> None:
    program = [sys.executable, RELAYED, str(PROGRAMS / "parallel_layouts.py"), *cases.split()]
    with command(sys.executable, "-m", "byteps_py.launch", *MACHINES.split(), *program, OMP_NUM_THREADS="1") as job:
        assert job.end() == 0, job.text
    for number, case in enumerate(cases.split()):
        assert job.text.count(f"{case}: right") == 4 * (1 + (number > 0)), job.text
    assert carried(job) > 0, job.text


@pytest.mark.long
@pytest.mark.timeout(300)
def test_groups_of_an_elastic_job(tmp_path) -> None:
    """The next group's ranks connect anew: they begin directly, whatever the last group had."""
    torch.set_num_threads(1)
    port, training = free_port(), Training(tmp_path / "told")
    training.tell(0)

    def machine(index: int) -> contextlib.AbstractContextManager[Job]:
        own = {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(index), "BYTEPS_MACHINE_ID": f"m{index}"}
        words = (str(PROGRAMS / "elastic.py"), str(training.file))
        return launch("--elastic", *words, program=RELAYED, limit_s=200, **own, **addressed(port))

    with contextlib.ExitStack() as stack:
        scheduler = stack.enter_context(launch("--elastic", DMLC_ROLE="scheduler", **addressed(port)))
        jobs = [stack.enter_context(machine(index)) for index in range(3)]
        assert training.group(jobs[0], "start", time.monotonic()) == [1, 1, 1]
        training.train(jobs[0], 20)
        jobs[2].signal(signal.SIGKILL)
        assert training.group(jobs[0], "a machine was killed", time.monotonic()) == [1, 1]
        training.train(jobs[0], 20)
        jobs.append(stack.enter_context(machine(7)))
        assert training.group(jobs[0], "a machine joined", time.monotonic()) == [1, 1, 1]
        training.train(jobs[0], 20)
        training.tell(training.reference.step, is_last=True)
        assert [jobs[index].end() for index in (0, 1, 3)] == [0, 0, 0], jobs[0].text
        assert scheduler.end() == 0
        jobs[2].end()
    assert sum(carried(job) for job in jobs) > 0, jobs[1].text  # who calls the other has its relay
