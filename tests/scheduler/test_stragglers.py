"""A rank, and a server, that are ten times slower than the others: named on every machine and in ``bps status``, while
what the machines have in flight stays inside the credit. Real processes."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.breaking import arguments_of, environ_of, launch

from byteps_py.cli.job import to_text
from byteps_py.config.settings import Settings
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import query

CREDIT = 256 << 10  # an eighth of the tensor's bytes


@contextmanager
def starved(pid: int) -> Iterator[None]:
    """The process runs for a tenth of the time."""
    over = threading.Event()

    def alternate() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(0.45)
            os.kill(pid, signal.SIGCONT)
            over.wait(0.05)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def watched(settings: Settings) -> Iterator[dict[int, int]]:
    """The most bytes that each machine has had in flight, of all that its heartbeats tell meanwhile."""
    most: dict[int, int] = {}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            for each in query.status(settings, 30).members:
                if each.member.role == pb.ROLE_COMMUNICATION:
                    machine = each.member.machine_index
                    most[machine] = max(most.get(machine, 0), each.statistics.bytes_in_flight)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("credit", [CREDIT, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_slow_rank_and_a_slow_server_are_named_and_hold_no_more_than_the_credit(credit: int) -> None:
    """Also without a credit (0), where all of a tensor is on its way at once."""
    environ = {
        "BYTEPS_PARTITION_BYTES": str(64 << 10),
        "BYTEPS_SCHEDULING_CREDIT": str(credit),
        "PS_HEARTBEAT_TIMEOUT": "30",
        "PS_HEARTBEAT_INTERVAL": "0.05",
    }
    with launch("-np 1 --machines 2 --servers 2", "straggles", **environ) as job:
        job.until("0: training", "1: training")
        rank_pid = job.pid("straggles", DMLC_WORKER_ID="1")
        services = {pid: arguments_of(pid) for pid in job.pids()}
        server_pid, _ = (pid for pid, a in services.items() if "byteps_py.server" in a and "--gpu-machine" not in a)
        named = f"rank 1 (process {rank_pid}; worker 1 (rank 1, host "
        answers = re.compile(
            rf"server tcp://\S+ \(host \S+, pid {server_pid}\) answers after .* times as long; the service, its "
        )
        settings = Settings.from_env(environ_of(rank_pid))
        with watched(settings) as most, starved(server_pid):
            job.until(named, f", pid {server_pid}) answers after ")
            reply = query.status(settings, 30)
        said = [line for line in job.said if named in line]
        assert re.search(r" from step to step, \d+ times the [\d.]+ m?s of the others: 1 rank waits for it$", said[0])
        assert any(answers.search(line) for line in job.said)
        text = to_text(reply)
        assert f"slow: {named}" in text, text
        # Reached, by who waits for the others, and never passed, as each partition is smaller than the credit. In the
        # servers more may wait: what has no answer after PATIENCE_S gives its credit back, see worker/core/credit.py.
        assert set(most) == {0, 1}
        assert not credit or max(most.values()) == credit, most
        assert job.end() == 0
        # Nobody else was said to be slow.
        slow = [line for line in job.said if " from step to step, " in line or " answers after " in line]
        assert all(named in line or answers.search(line) for line in slow), job.text


def test_of_short_steps_the_slow_rank_is_named_too() -> None:
    """By a difference of 40 ms, which is less than an operating system may keep a process waiting, now and then."""
    with launch("-np 2", "straggles_shortly") as job:
        job.until("0: training", "1: training")
        job.until(f"rank 1 (process {job.pid('straggles_shortly', BYTEPS_LOCAL_RANK='1')}; ", "1 rank waits for it")
        assert job.end() == 0
