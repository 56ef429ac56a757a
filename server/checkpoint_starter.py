"""Starts `bps checkpoint` every so often, on one of the job's CPU machines: the trainers have no work with it.

The program is a child process with a low priority, which ends with this server. All servers get the same list of
servers, and the CPU machine's with the lowest member id writes. The loop's thread calls.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from byteps_py.config.settings import Settings
from byteps_py.proto import control_pb2 as pb
from byteps_py.system.log import logger
from byteps_py.system.loop import EventLoop

#: How many checkpoints are kept.
KEPT = 3
LONGEST_S = 600.0
_END_S = 2.0

#: Starts the program, as its server's child.
StartProgram = Callable[[Sequence[str]], "subprocess.Popen[Any]"]


def start_program(command: Sequence[str]) -> subprocess.Popen[Any]:
    """Its output goes to this server's log."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def chosen_server(servers: Iterable[pb.Member]) -> pb.Member | None:
    """The server whose machine writes checkpoints; None if there is no CPU machine."""
    candidates = [each for each in servers if each.kind == pb.MACHINE_KIND_CPU]
    return min(candidates, key=lambda each: each.member_id, default=None)


class CheckpointStarter:
    """``settings.shadow_dir`` is the folder of the checkpoints. ``start``: starts the program. ``longest_s``: a program
    that takes longer, and longer than the time between two checkpoints, is ended."""

    def __init__(
        self, settings: Settings, loop: EventLoop, start: StartProgram = start_program, longest_s: float = LONGEST_S
    ) -> None:
        self._longest_s = longest_s
        self._settings = settings
        self._loop = loop
        self._start = start
        self._is_chosen = False
        self._has_states: Callable[[], bool] = lambda: False
        self._has_warned = False
        self._has_starved = False  # the last program took too long: the next one does not give way
        self._child: subprocess.Popen[Any] | None = None
        self._pidfd = -1
        self._has_torch = _has_torch()

    @property
    def is_running(self) -> bool:
        """A checkpoint is being written."""
        return self._child is not None

    def begin(self, has_states: Callable[[], bool]) -> None:
        """Start the program every ``settings.shadow_every_s``, the first time after that. ``has_states``: this server
        keeps some."""
        self._has_states = has_states
        if not self._has_torch:
            logger.warning(
                "BYTEPS_SHADOW_DIR is set, but this machine can't write checkpoints, because it has no PyTorch: "
                "pip install '.[torch]' (a build for the CPU is enough). Training goes on without"
            )
        self._loop.call_later(self._settings.shadow_every_s, self._due)

    def membership(self, own_address: str, servers: Sequence[pb.Member]) -> None:
        """The job's servers have changed."""
        chosen = chosen_server(servers)
        self._is_chosen = chosen is not None and chosen.address == own_address
        if chosen is None and servers and servers[0].address == own_address and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "BYTEPS_SHADOW_DIR is set, but the job has no CPU machine, whose server would write checkpoints: start "
                "one, or run `bps checkpoint` on a machine of your choice"
            )

    def close(self) -> None:
        """End the program; what it has half written is removed by it, or by the next one."""
        self._is_chosen = False
        child = self._child
        if child is None:
            return
        child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the disk does not answer; it ends when that does
                child.wait(_END_S)
        self._forget()

    def _due(self) -> None:
        self._loop.call_later(self._settings.shadow_every_s, self._due)
        if self._is_chosen and self._has_torch and self._child is None and self._has_states():
            self._run()

    def _run(self) -> None:
        settings = self._settings
        command = [
            sys.executable, "-P", "-m", "byteps_py.cli", "checkpoint", settings.shadow_dir, "--keep", str(KEPT),
            "--scheduler", settings.scheduler_address, "--with-parent", str(os.getpid()),
            *(["--normal-priority"] if self._has_starved else []),
        ]  # fmt: skip
        try:
            child = self._child = self._start(command)
            self._pidfd = os.pidfd_open(child.pid)
        except OSError as error:
            logger.warning("no checkpoint is written: %s can't be started: %s", " ".join(command), error)
            if self._child is not None:
                self._child.kill()
                self._child = None
            return
        self._loop.add_reader(self._pidfd, self._ended)
        limit_s = max(self._longest_s, settings.shadow_every_s)
        self._loop.call_later(limit_s, lambda: self._give_up(child, limit_s))

    def _give_up(self, child: subprocess.Popen[Any], limit_s: float) -> None:
        if child is self._child:
            folder = self._settings.shadow_dir
            logger.warning(
                "a checkpoint was not written to %s within %g s: given up. The disk or the network is slow, or this "
                "machine is busy; the next one is written with the normal priority", folder, limit_s,
            )  # fmt: skip
            self._has_starved = True
            child.kill()

    def _ended(self) -> None:
        child = self._child
        if child is None or child.poll() is None:
            return
        if child.returncode:
            how = f"exit status {child.returncode}"
            if child.returncode < 0:
                how = signal.Signals(-child.returncode).name
            folder = self._settings.shadow_dir
            logger.warning("no checkpoint was written to %s: bps checkpoint ended with %s", folder, how)
        else:
            self._has_starved = False
        self._forget()

    def _forget(self) -> None:
        self._loop.remove(self._pidfd)
        os.close(self._pidfd)
        self._child, self._pidfd = None, -1


def _has_torch() -> bool:
    """Without loading it."""
    try:
        return importlib.util.find_spec("torch") is not None
    except (ImportError, ValueError):
        return False
