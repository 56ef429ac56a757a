"""What happens to processes of a job, at random: servers and the scheduler killed, servers frozen and woken, added, and
told to leave."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support.breaking import Job, arguments_of, environ_of

from byteps_py.wire.launch_protocol import GIVEN_UP_STATUS

FAULTS = (*["kill"] * 6, *["kill the scheduler"] * 2, "freeze", "add", "remove")
#: A server needs so long to start and to load its kernels; before that it is none to rely on.
_READY_S = 8.0
_WAIT_S = 60.0
#: A fault hits after up to so long: in the middle of a round.
_LATEST_S = 0.3
_MOST_ADDED = 3
_POLL_S = 0.05
_SCHEDULER, _SERVER = "byteps_py.scheduler", "byteps_py.server"


class Chaos:
    """Faults of one job, as ``seed`` decides."""

    def __init__(self, job: Job, seed: int) -> None:
        self._job = job
        self._random = random.Random(seed)
        self._frozen: int | None = None
        self._added: list[subprocess.Popen[bytes]] = []
        self._leaving: list[subprocess.Popen[bytes]] = []
        self._environ: dict[str, str] = {}  # of a CPU machine's server
        self.done: list[str] = []  # what has happened, in order

    def next(self) -> Callable[[], None]:
        """The next fault, once there are as many servers that work as it takes."""
        self._wake()
        if not self._environ:
            pids = [pid for pid in self._named(_SERVER) if "--gpu-machine" not in arguments_of(pid)]
            self._environ = environ_of(pids[0])
        self._added = [server for server in self._added if not _has_ended(server)]
        self._leaving = [server for server in self._leaving if not _has_ended(server)]
        old = [server for server in self._added if _age_s(server.pid) > _READY_S]
        possible = {"add": len(self._added) < _MOST_ADDED, "remove": bool(old)}
        fault = self._random.choice([fault for fault in FAULTS if possible.get(fault, True)])
        if fault in ("kill", "freeze"):
            ready = self._until_spare()
            number = signal.SIGSTOP if fault == "freeze" else signal.SIGKILL
            strike = functools.partial(self._signal, self._random.choice(ready), number)
        elif fault == "add":
            strike = self._add
        elif fault == "remove":
            strike = functools.partial(self._remove, self._random.choice(old))
        else:
            strike = self._kill_scheduler
        delay_s = self._random.random() * _LATEST_S

        def happen() -> None:
            time.sleep(delay_s)
            strike()
            self.done.append(fault)

        return happen

    def end(self) -> None:
        """What was added leaves."""
        self._wake()
        for server in self._added:
            while _age_s(server.pid) < _READY_S and server.poll() is None:  # it may not know SIGTERM yet
                time.sleep(_POLL_S)
            server.send_signal(signal.SIGTERM)
        for server in (*self._added, *self._leaving):
            server.wait(_WAIT_S)
            _has_ended(server)

    def _until_spare(self) -> list[int]:
        """Servers that work, once they are more than one: the last has to stay."""
        deadline_s = time.monotonic() + _WAIT_S
        while len(ready := [pid for pid in self._named(_SERVER) if _age_s(pid) > _READY_S]) < 2:
            assert time.monotonic() < deadline_s, f"fewer than two servers work:\n{self._job.text}"
            time.sleep(_POLL_S)
        return ready

    def _wake(self) -> None:
        if self._frozen is not None:
            self._signal(self._frozen, signal.SIGCONT)
            self._frozen = None

    def _signal(self, pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        if number == signal.SIGSTOP:
            self._frozen = pid

    def _kill_scheduler(self) -> None:
        self._signal(self._named(_SCHEDULER)[0], signal.SIGKILL)

    def _add(self) -> None:
        """A server that nobody starts again."""
        command = [sys.executable, "-m", _SERVER]
        self._added.append(subprocess.Popen(command, env=self._environ, stdin=subprocess.DEVNULL))

    def _remove(self, server: subprocess.Popen[bytes]) -> None:
        self._added.remove(server)
        self._leaving.append(server)
        server.send_signal(signal.SIGTERM)

    def _named(self, word: str) -> list[int]:
        return [pid for pid in sorted(self._job.pids()) if word in arguments_of(pid)]


def _has_ended(server: subprocess.Popen[bytes]) -> bool:
    """One that was added. Raises AssertionError if it ended otherwise than it should."""
    status = server.poll()
    assert status in (None, 0, -signal.SIGKILL, GIVEN_UP_STATUS), f"a server ended with status {status}"
    return status is not None


def _age_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    return 0.0
