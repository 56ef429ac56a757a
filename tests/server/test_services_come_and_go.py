"""How long services live: while a rank needs them, whoever has started them, and no longer. Real processes."""

from __future__ import annotations

import contextlib
import re
import signal

import pytest
from support.breaking import ERROR_STATUS as ERROR, alone, arguments_of, launch
from support.processes import wait_gone

from byteps_py.launch.process_plan import free_port


@pytest.mark.parametrize("options", ["-np 2", "-np 1 --machines 2 --servers 1"])
def test_ranks_may_leave_and_come_back_under_a_launcher(options: str) -> None:
    with launch(options, "repeat", "5") as job:
        assert job.end() == 0
    assert sorted(job.of_ranks) == ["0: 5 turns", "1: 5 turns"]


@pytest.mark.parametrize("turns", ["2", pytest.param("5", marks=pytest.mark.slow)])
def test_ranks_without_a_launcher_start_services_again_and_again(turns: str) -> None:
    job_id = f"test-{free_port()}"
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(
                alone("repeat", turns, BYTEPS_JOB_ID=job_id, BYTEPS_LOCAL_SIZE="2", BYTEPS_LOCAL_RANK=local_rank)
            )
            for local_rank in ("0", "1")
        ]
        assert [(job.end(), job.said) for job in jobs] == [(0, [f"{rank}: {turns} turns"]) for rank in (0, 1)]


@pytest.mark.parametrize("turns", ["2", pytest.param("3", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_machines_without_a_launcher_start_services_again_and_again(turns: str) -> None:
    """As under torchrun, whose port the scheduler's is next to."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GROUP_WORLD_SIZE": "2"}
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(alone("repeat", turns, **common, GROUP_RANK=rank, BYTEPS_MACHINE_ID=f"m{rank}"))
            for rank in ("0", "1")
        ]
        assert [(job.end(), job.said) for job in jobs] == [(0, [f"{rank}: {turns} turns"]) for rank in (0, 1)]


def test_services_without_a_launcher_end_with_their_ranks() -> None:
    job_id = f"test-{free_port()}"
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(alone("train", BYTEPS_JOB_ID=job_id, BYTEPS_LOCAL_SIZE="2", BYTEPS_LOCAL_RANK=rank))
            for rank in ("0", "1")
        ]
        for rank, job in enumerate(jobs):
            job.until(f"{rank}: training")
        jobs[0].signal(signal.SIGKILL)  # it had started the services
        assert [job.end() for job in jobs] == [-signal.SIGKILL, ERROR]
    assert re.search(r"^1: PeerLostError: rank 0 \(process \d+ on .*\) died", jobs[1].text, re.MULTILINE)


@pytest.mark.parametrize(("odd", "status"), [("0", -signal.SIGKILL), ("1", 0)], ids=["killed", "closed"])
def test_a_forked_child_that_outlives_its_rank_keeps_no_service(odd: str, status: int) -> None:
    with alone("forks", odd, BYTEPS_JOB_ID=f"test-{free_port()}", BYTEPS_FORCE_DISTRIBUTED="1") as job:
        job.until("0: child: UsageError: process ", "was forked from rank 0, which alone may communicate")
        assert job.process.wait() == status
        services = [pid for pid in job.pids() if "byteps_py.worker" in arguments_of(pid)]
        assert all(wait_gone(pid) for pid in services), services
        assert len(job.pids()) == 1  # the child, until the end of its input
        assert job.end() == status
