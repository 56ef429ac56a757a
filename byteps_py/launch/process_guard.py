"""No process that the launcher or its ranks started outlives the launcher, however it ends.

Every process of a launch has the launch's token in its variable ``BYTEPS_LAUNCH_TOKEN``, and so do its descendants,
also those in a session of their own. ``sweep`` finds them by it. ``ProcessGuard`` is a process forked from the
launcher. It sweeps when the launcher has ended, also by SIGKILL: then its end of a pipe closes. In addition the kernel
kills the launcher's direct children when the launcher dies (PR_SET_PDEATHSIG).

One thread: the launcher forks while it has no other.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

from byteps_py.system import jobs
from byteps_py.system.jobs import TOKEN_VARIABLE

SWEEP_LIMIT_S = 10.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with(launcher_pid: int) -> Callable[[], None]:
    """A function to call in a new child before its program starts: the kernel then kills the child when its parent
    dies."""

    def set_death_signal() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != launcher_pid:  # the launcher died before the line above
            os.kill(os.getpid(), signal.SIGKILL)

    return set_death_signal


def _carries(pid: int, token: str) -> bool:
    """True if the process has ``token``. False also if it has ended, is a zombie, which has no environment any more, or
    belongs to another user."""
    try:
        variables = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    entry = f"{TOKEN_VARIABLE}=".encode()
    return any(v.startswith(entry) and token.encode() in v[len(entry) :].split(b":") for v in variables)


def carriers(token: str) -> list[int]:
    """The ids of the processes that carry ``token``, without this one."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and _carries(pid, token)]


def sweep(token: str, limit_s: float = SWEEP_LIMIT_S) -> list[int]:
    """Kill every process that carries ``token`` with SIGKILL, and wait for its end. Returns the ids of those that are
    left after ``limit_s``: none, as a rule."""
    deadline = time.monotonic() + limit_s
    # Repeated, because a process may have forked while the list was made.
    while found := carriers(token):
        if time.monotonic() > deadline:
            return found
        for pid in found:
            _kill_and_wait(pid, token, deadline)
    return []


def _kill_and_wait(pid: int, token: str, deadline: float) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _carries(pid, token):  # else another process has got the id between the two looks
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
    finally:
        os.close(pidfd)


class ProcessGuard:
    """Guards from its creation until ``close``, which is called when no process is left to guard.

    ``pidfd`` is readable when the guard's process has died before that: something killed it, and nothing guards.
    """

    def __init__(self, token: str) -> None:
        reader, self._writer = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid == 0:
            _guard_main(reader, token)
        os.close(reader)
        self.pidfd = os.pidfd_open(self._pid)

    def close(self) -> int:
        """End the guard. Returns the exit status of its process, as ``subprocess`` gives it."""
        os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        os.close(self.pidfd)
        os.close(self._writer)
        return os.waitstatus_to_exitcode(status)


def _guard_main(pipe: int, token: str) -> None:
    """The guard's program. It must never return into the launcher's code."""
    try:
        os.setsid()  # Ctrl-C, and the end of the terminal, are for the launcher
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, signal.SIG_IGN)
        os.dup2(pipe, 0)
        # An open copy of the launcher's output would keep its reader waiting, and one of the pipe's other end this
        # process.
        os.closerange(1, os.sysconf("SC_OPEN_MAX"))
        os.read(0, 1)  # nothing is ever written: it returns when the launcher has ended
        sweep(token)
        jobs.clear()
    finally:
        os._exit(0)
