"""A launcher as a process: what it prints and when, and all processes that it starts, whatever sessions these make."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.01  # what is waited for carries its own time
_MARK = "RECOVERY_BENCHMARK"


class UnforeseenError(Exception):
    """A run did something else than the fault should lead to."""


@dataclass(frozen=True)
class Line:
    at: float
    text: str


class Launcher:
    """One ``bpslaunch`` and its machine."""

    def __init__(self, command: Sequence[str], environ: dict[str, str], mark: str) -> None:
        self.mark, self.lines = mark, list[Line]()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environ, _MARK: mark},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(Line(time.monotonic(), line.rstrip("\n")))

    def pids(self, *words: str) -> list[int]:
        """Its living processes with all these on their command lines, in order of age."""
        return [pid for pid in marked(self.mark) if set(words) <= set(read_list(pid, "cmdline"))]

    def signal(self, signum: signal.Signals, *words: str) -> float:
        """To the one process with these words, or to all processes of the machine. When."""
        pids = self.pids(*words)
        if words and len(pids) != 1:
            raise UnforeseenError(f"{len(pids)} processes are {' '.join(words)}")
        return send(signum, pids)

    def said(self, pattern: str, since: float = 0.0) -> Line | None:
        return next((line for line in list(self.lines) if line.at >= since and re.search(pattern, line.text)), None)

    def close(self) -> None:
        while pids := marked(self.mark):  # one may start another meanwhile
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)
        self.process.wait()
        self._reader.join()
        if self.process.stdout is not None:
            self.process.stdout.close()


def send(signum: signal.Signals, pids: Sequence[int]) -> float:
    at_s = time.monotonic()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
    return at_s


def read_list(pid: int, name: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace").split("\0")[:-1]
    return []


def marked(mark: str) -> list[int]:
    """Processes that live and have this mark, or one that begins with it."""
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in pids if any(entry.startswith(f"{_MARK}={mark}") for entry in read_list(pid, "environ"))]


def started_s(pid: int) -> float:
    """When the process was started, on the clock of ``time.monotonic()``, to 10 ms."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:  # it has ended
        return 0.0
    return time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
