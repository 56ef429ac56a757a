"""Whether the owner of a lender's machine needs it: by the cores that other processes keep busy, or by a command that
the owner gives. Reads /proc. One thread."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from byteps_py.lending.lender import OwnerLoad

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
