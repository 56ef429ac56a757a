"""Jobs whose scheduler is killed: they go on, and with the next scheduler nothing is missing."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from programs.rank import first_weights, gradients_of
from support.breaking import launch, service

from byteps_py.launch.process_plan import free_port


def test_the_launcher_starts_a_killed_scheduler_again_and_again() -> None:
    """In the middle of steps which all need it: whatever was under way is done once, and the weights are the same."""
    with launch("-np 1 --machines 2 --servers 1", "declares", BYTEPS_LOG_LEVEL="INFO") as job:
        job.until("0: step 5", "1: step 5")
        for again in range(1, 4):
            pid = job.pid("byteps_py.scheduler")
            os.kill(pid, signal.SIGKILL)
            job.until(f"bpslaunch: the scheduler was killed by SIGKILL (signal 9); starting it again ({again} of")
            job.until("scheduler WARNING: resuming the job of the journal")
            step = int(job.until("0: step ").rpartition(" ")[2])
            job.until(f"0: step {step + 5}", f"1: step {step + 5}")
        assert job.end() == 0
    assert "is back after" in job.text
    steps = sum(line.startswith("0: step ") for line in job.said)
    weights = first_weights()
    for _ in range(steps):
        weights -= gradients_of(weights, 0) + gradients_of(weights, 1)
    assert {f"{rank}: weights {weights.tobytes().hex()}" for rank in (0, 1)} <= set(job.said)


def test_without_a_launcher_it_is_started_by_hand_and_what_was_declared_meanwhile_goes_through(tmp_path: Path) -> None:
    cluster = {
        "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port()), "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "1", "BYTEPS_PLACEMENT": "servers-only", "BYTEPS_JOURNAL_DIR": str(tmp_path),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        scheduler = enter(service("scheduler", **cluster))
        server = enter(service("server", **cluster))
        ranks = [
            enter(launch("", "absent", **cluster, DMLC_ROLE="worker", DMLC_WORKER_ID=index, BYTEPS_MACHINE_ID=index))
            for index in ("0", "1")
        ]
        for index, rank in enumerate(ranks):
            rank.until(f"{index}: reduced")
        scheduler.signal(signal.SIGKILL)
        assert scheduler.end() == -signal.SIGKILL
        for rank in ranks:
            rank.until("agreed tensors are still reduced, new ones and barriers wait")
        assert ranks[1].process.stdin is not None
        ranks[1].process.stdin.close()  # now it comes to the new tensor, too
        scheduler = enter(service("scheduler", **cluster))
        for index, rank in enumerate(ranks):
            rank.until("is back after")
            rank.until(f"{index}: late is reduced")
        assert [job.end() for job in (*ranks, server, scheduler)] == [0, 0, 0, 0]
    assert not list(tmp_path.iterdir())
