"""Ranks started by torchrun, by Open MPI's mpirun and by hand, for real. srun needs a cluster of its own: see
test_launchers.py for its variables. Every rank runs tests/programs/rank.py, which checks its sums."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
from support.breaking import ERROR_STATUS, RANK, Job, command, launch
from support.clusters import ROOT
from support.open_mpi import OPEN_MPI_ANYWHERE, as_machines, require_open_mpi

from byteps_py.launch.process_plan import free_port

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


def by_hand(how: str, rank: int, size: int, port: int, **more: str) -> Started:
    """As Kubernetes operators, DeepSpeed's launcher and scripts start their processes: with torch's variables alone."""
    world = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    program = str(ROOT / "tests" / "programs" / "torch_variables.py")
    return command(sys.executable, program, how, **{"OMP_NUM_THREADS": "1", **world, **more})


@pytest.mark.parametrize(
    ("how", "size", "machines", "words"),
    [
        ("init", 2, 1, ("first", "second")),
        pytest.param("group", 2, 1, ("group",), marks=pytest.mark.slow),
        pytest.param("init", 2, 2, ("first", "second"), marks=pytest.mark.long),
        pytest.param("init", 4, 2, ("first", "second"), marks=pytest.mark.slow),
    ],
)
def test_ranks_with_nothing_but_torch_variables(how: str, size: int, machines: int, words: tuple[str, ...]) -> None:
    port, local_size = free_port(), size // machines
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(by_hand(how, rank, size, port, BYTEPS_MACHINE_ID=f"m{rank // local_size}"))
            for rank in range(size)
        ]
        assert [job.end() for job in jobs] == [0] * size, "\n".join(job.text for job in jobs)
    for rank, job in enumerate(jobs):
        place = f"{rank} of {size}, {rank % local_size} of {local_size}, machine {rank // local_size}"
        average = f"{(size - 1) / 2:g}"
        assert [line for line in job.said if "average" in line] == [f"{at}: {place}; average {average}" for at in words]


@pytest.mark.slow  # test_launchers.py has the rule
def test_ranks_with_nothing_but_torch_variables_of_a_launcher_for_each_machine() -> None:
    port = free_port()
    with contextlib.ExitStack() as stack:
        local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        jobs = [stack.enter_context(by_hand("init", rank, 2, port, **local)) for rank in range(2)]
        assert [job.end() for job in jobs] == [0, 0], "\n".join(job.text for job in jobs)
    assert "first: 1 of 2, 0 of 1, machine 1; average 0.5" in jobs[1].said


def test_a_rank_that_others_do_not_join_says_so() -> None:
    limit = {"BYTEPS_START_TIMEOUT_S": "1"}
    with by_hand("init", 0, 2, free_port(), **limit) as first, by_hand("init", 1, 2, free_port(), **limit) as second:
        assert [first.end(), second.end()] == [ERROR_STATUS] * 2
    assert "RendezvousError: rank 1 of 2 has not come to torch's store" in first.text
    assert "RendezvousError: rank 1 of WORLD_SIZE=2 does not reach rank 0 there: MASTER_ADDR=127.0.0.1" in second.text
