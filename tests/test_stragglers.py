"""A rank, and a server, that are ten times slower than the others: named on every machine and in ``bps status``, while
what waits for them stays inside the credit. Real processes."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from support.breaking import arguments_of, environ_of, launch

from byteps_py.cli.status import to_text
from byteps_py.scheduler import query
from byteps_py.settings import Settings

CREDIT = 256 << 10


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


def test_a_slow_rank_and_a_slow_server_are_named_and_hold_no_more_than_the_credit() -> None:
    environ = {
        "BYTEPS_PARTITION_BYTES": str(64 << 10),
        "BYTEPS_SCHEDULING_CREDIT": str(CREDIT),
        "PS_HEARTBEAT_TIMEOUT": "30",
    }
    with launch("-np 1 --machines 2 --servers 2", "straggles", **environ) as job:
        job.until("0: training", "1: training")
        rank_pid = job.pid("straggles", DMLC_WORKER_ID="1")
        services = {pid: arguments_of(pid) for pid in job.pids()}
        server_pid, _ = (pid for pid, a in services.items() if "byteps_py.server" in a and "--gpu-machine" not in a)
        named = f"rank 1 (process {rank_pid}; worker 1 (rank 1, host "
        answers = re.compile(
            rf"server tcp://\S+ \(host \S+, pid {server_pid}\) answers after .* times theirs; it, its "
        )
        with starved(server_pid):
            job.until(named, f", pid {server_pid}) answers after ")
            reply = query.status(Settings.from_env(environ_of(rank_pid)), 30)
        said = [line for line in job.said if named in line]
        assert re.search(r" from step to step, \d+ times the [\d.]+ m?s of the others: 1 rank waits for it$", said[0])
        assert any(answers.search(line) for line in job.said)
        text = to_text(reply)
        assert f"slow: {named}" in text, text
        assert all(member.statistics.bytes_in_flight <= 2 * CREDIT for member in reply.members)  # of both machines
        assert job.end() == 0
        # Nobody else was said to be slow.
        slow = [line for line in job.said if " from step to step, " in line or " answers after " in line]
        assert all(named in line or answers.search(line) for line in slow), job.text
