"""The lender's process: asks the pool, looks at the owner's load, starts and drains servers. lender.py decides what to
do. One thread, which waits in sigtimedwait: nothing here is urgent.

``OwnerWatch`` says whether the owner of the machine needs it: by the cores that other processes keep busy, or by a
command that the owner gives. It reads /proc.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from byteps_py.config.addresses import place_of
from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError
from byteps_py.launch.process_guard import die_with
from byteps_py.lending.lender import (
    Action,
    DrainServer,
    Ended,
    Event,
    Exit,
    LenderPolicy,
    Limits,
    Log,
    OwnerLoad,
    StartServer,
    StopLending,
    Told,
)
from byteps_py.lending.pool import SHARED, JobRequest
from byteps_py.lending.pool_service import ask
from byteps_py.system.log import logger

_ASK_S = 1.0
_ASK_TIMEOUT_S = 2.0
_NICENESS = 10  # the owner's processes come first also before they are noticed
_DRAIN_S = 35  # a server that finds no other to take its partitions goes on for 30 s
_WAITED_FOR = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
#: The variables of the lender's environment that a server needs, beside those about the job.
_KEPT = ("BYTEPS_SECRET", "BYTEPS_SECRET_FILE", "BYTEPS_ENCRYPT", "BYTEPS_LOG_LEVEL", "BYTEPS_LOG_FORMAT",
         "BYTEPS_LOG_DIR", "DMLC_NODE_HOST", "DMLC_INTERFACE", "BYTEPS_INTERFACES")  # fmt: skip


_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # of "cpu" in /proc/stat: user, nice, system, irq, softirq, steal
_COMMAND_S = 5.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class OwnerWatch:
    """The owner's use of this machine between two calls of ``look``.

    ``free_cores``: as many may be busy with other processes than those that this process has started. ``busy_when``: a
    command; while it exits with 0, the owner needs the machine.
    """

    def __init__(self, free_cores: float, busy_when: Sequence[str] = ()) -> None:
        self._free_cores, self._busy_when = free_cores, busy_when
        self._before = time.monotonic(), _busy_ticks(), _own_ticks(os.getpid())

    def look(self) -> OwnerLoad:
        """The use since the last call."""
        if self._busy_when and _succeeds(self._busy_when):
            return OwnerLoad(True, f"`{' '.join(self._busy_when)}` has exited with 0")
        now = time.monotonic(), _busy_ticks(), _own_ticks(os.getpid())
        took_s, busy, own = (after - before for after, before in zip(now, self._before, strict=True))
        self._before = now
        cores = max(0.0, busy - max(0, own)) / _TICKS_PER_S / took_s if took_s else 0.0
        return OwnerLoad(cores > self._free_cores, f"other processes keep {cores:.1f} cores busy")


def _succeeds(command: Sequence[str]) -> bool:
    quiet = subprocess.DEVNULL
    try:
        return (
            subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=_COMMAND_S, check=False).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def _busy_ticks() -> int:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(int(fields[at]) for at in _BUSY_FIELDS)


def _own_ticks(root: int) -> int:
    """Of a process and its descendants, those that live and those that it has waited for."""
    found: dict[int, tuple[int, int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(") ")[2].split()
            except OSError:  # it has ended
                continue
            found[int(entry.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in found.items():
        children.setdefault(parent, []).append(pid)
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        total += found.get(pid, (0, 0))[1]
        waiting += children.get(pid, [])
    return total


@dataclass(slots=True)
class _LentServer:
    """The server of one job, under a bpslaunch of its own."""

    process: subprocess.Popen[bytes]
    cores: frozenset[int]


class LenderProcess:
    """Lends this machine to the pool of ``settings``, within ``limits``. ``run`` may be called once."""

    def __init__(self, settings: Settings, limits: Limits, watch: OwnerWatch) -> None:
        self._settings, self._limits, self._watch = settings, limits, watch
        self._policy = LenderPolicy(limits)
        self._servers: dict[str, _LentServer] = {}
        self._cores = sorted(os.sched_getaffinity(0))[-limits.cores :]
        self._is_over = False
        self._is_silent = False  # the pool, as far as it has been logged

    def run(self) -> None:
        """Lend until SIGTERM or SIGINT; then drain all servers and return."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
        try:
            logger.warning("lending %s to the pool at %s", self._limits.describe(), self._settings.scheduler_address)
            next_s = time.monotonic()
            while not self._is_over:
                if (now_s := time.monotonic()) >= next_s:
                    self._handle(self._watch.look())
                    self._ask_pool()
                    next_s = max(now_s, next_s + _ASK_S)
                info = signal.sigtimedwait(_WAITED_FOR, max(0.0, next_s - time.monotonic()))
                if info is not None and info.si_signo != signal.SIGCHLD:
                    self._handle(StopLending())
                    next_s = time.monotonic()
                self._reap()
            self._tell("Leave", {"name": self._limits.name})
        finally:
            for server in self._servers.values():
                server.process.kill()
                server.process.wait()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED_FOR)

    def _ask_pool(self) -> None:
        offer = self._policy.offer(time.monotonic())
        answer = self._tell("Lend", {"name": offer.name, "slots": offer.slots, "refused": offer.refused})
        if answer is not None:
            self._handle(Told([JobRequest(**each) for each in answer]))

    def _tell(self, method: str, values: dict[str, object]) -> Any:
        """The pool's answer; None if there is none: then everything stays as it is."""
        try:
            answer = ask(self._settings, method, values, _ASK_TIMEOUT_S)
        except BytePSError as error:
            if not self._is_silent:
                logger.warning("%s; what is lent stays lent", error)
            self._is_silent = True
            return None
        if self._is_silent:
            logger.warning("the pool answers again")
        self._is_silent = False
        return answer

    def _reap(self) -> None:
        for scheduler, server in list(self._servers.items()):
            if (status := server.process.poll()) is not None:
                del self._servers[scheduler]
                self._handle(Ended(scheduler, status))

    def _handle(self, event: Event) -> None:
        for action in self._policy.handle(event, time.monotonic()):
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case StartServer(job):
                self._start(job)
            case DrainServer(scheduler):
                self._servers[scheduler].process.terminate()
            case Log(text):
                logger.warning("%s", text)
            case Exit():
                self._is_over = True

    def _start(self, job: JobRequest) -> None:
        own = len(self._cores) // self._limits.slots or 1
        taken = [core for server in self._servers.values() for core in server.cores]
        cores = sorted(self._cores, key=lambda core: (taken.count(core), core))[:own]
        parent = os.getpid()

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED_FOR)
            os.sched_setaffinity(0, cores)
            os.nice(_NICENESS)
            die_with(parent)()

        command = [sys.executable, "-P", "-m", "byteps_py.launch", "--grace-period", str(_DRAIN_S)]
        process = subprocess.Popen(
            command, env=self._environment(job, own), stdin=subprocess.DEVNULL, preexec_fn=prepare,
        )  # fmt: skip
        self._servers[job.scheduler] = _LentServer(process, frozenset(cores))

    def _environment(self, job: JobRequest, cores: int) -> dict[str, str]:
        host, port = place_of(job.scheduler)
        ours = ("BYTEPS_", "DMLC_", "PS_")
        kept = {name: text for name, text in os.environ.items() if name in _KEPT or not name.startswith(ours)}
        return {
            **kept,
            **{name: job.variables[name] for name in SHARED if name in job.variables},
            "DMLC_ROLE": "server",
            "DMLC_PS_ROOT_URI": host,
            "DMLC_PS_ROOT_PORT": str(port),
            "BYTEPS_LINK_MBIT": f"{self._limits.mbit / self._limits.slots:g}",
            "BYTEPS_SERVER_ENGINE_THREAD": str(cores),
            "BYTEPS_MACHINE_ID": f"lender {self._limits.name}",
            "BYTEPS_SHADOW_KEEP_S": "0",  # the owner gets the memory back when the job ends
        }


def usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def parse_command(text: str) -> Sequence[str]:
    """A command line of the owner, for the shell."""
    return ("/bin/sh", "-c", text) if text.strip() else ()
