"""Ranks started by torchrun and by Open MPI's mpirun, for real. srun needs a cluster of its own: see test_launchers.py
for its variables. Every rank runs tests/programs/rank.py, which checks its sums."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
from support.breaking import RANK, Job, command, launch
from support.open_mpi import OPEN_MPI_ANYWHERE, as_machines, require_open_mpi

from byteps_py.launch.cluster_plan import free_port

Started = contextlib.AbstractContextManager[Job]


def torchrun(*options: str, program: tuple[str, ...], **environ: str) -> Started:
    return command(sys.executable, "-m", "torch.distributed.run", *options, *program, **environ)


def mpirun(*options: str, program: tuple[str, ...], **environ: str) -> Started:
    return command("mpirun", *options, *program, **{**OPEN_MPI_ANYWHERE, **environ})


def go_on_side_by_side(first: Started, second: Started) -> None:
    """Two jobs of two ranks, both at work at the same time."""
    with first as one, second as other:
        for job in (one, other):
            job.until("0: training", "1: training")
        assert [job.end() for job in (one, other)] == [0, 0]
    for job in (one, other):
        assert {"0: closed", "1: closed"} <= set(job.said)


@pytest.mark.slow
def test_two_jobs_by_torchrun_do_not_meet() -> None:
    one, other = (torchrun("--nproc-per-node=2", program=(RANK, "told")) for _ in range(2))
    go_on_side_by_side(one, other)


def test_two_jobs_by_mpirun_do_not_meet_even_behind_a_shell_of_their_own() -> None:
    require_open_mpi()
    script = f"'{sys.executable}' '{RANK}' told; exit $?"  # so that ranks have different parents
    one, other = (mpirun("-np", "2", program=("sh", "-c", script)) for _ in range(2))
    go_on_side_by_side(one, other)


def test_two_machines_by_torchrun_and_a_cpu_machine_by_hand() -> None:
    port = free_port()
    number = {"DMLC_NUM_SERVER": "1"}
    by_hand = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port + 1), "DMLC_NUM_WORKER": "2"}
    where = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(launch("", DMLC_ROLE="server", **by_hand, **number))]
        for index in ("0", "1"):
            agent = torchrun(*where, f"--node-rank={index}", program=(RANK, "short"), **number)
            jobs.append(stack.enter_context(agent))
        assert [job.end() for job in jobs] == [0, 0, 0], "\n".join(job.text for job in jobs)
    assert {"0: reduced", "1: reduced"} <= set(jobs[1].said)
    assert {"2: reduced", "3: reduced"} <= set(jobs[2].said)


@pytest.mark.slow
def test_torchrun_starts_its_ranks_again() -> None:
    with torchrun("--nproc-per-node=2", "--max-restarts=1", program=(RANK, "dies_once")) as job:
        assert job.end() == 0
    assert "0: PeerLostError: rank 1 " in job.text
    assert {"0: reduced", "1: reduced"} <= set(job.said)


def test_two_machines_by_mpirun(tmp_path: Path) -> None:
    require_open_mpi()
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    options = [*as_machines(tmp_path, 2, 2), "-x", "MASTER_ADDR", "-x", "MASTER_PORT"]
    with mpirun(*options, program=(sys.executable, RANK, "short"), **where) as job:
        assert job.end() == 0, job.text
    assert {f"{rank}: reduced" for rank in range(4)} <= set(job.said)


def test_machines_of_different_sizes_by_mpirun_are_refused(tmp_path: Path) -> None:
    require_open_mpi()
    with mpirun(*as_machines(tmp_path, 2, 1), program=(sys.executable, RANK, "short")) as job:
        assert job.end() > 0
    assert "ConfigurationError: mpirun started 3 ranks, 2 of them on this machine" in job.text
