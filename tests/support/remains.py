"""What a job has while it lives, remembered, so that it can be looked for when the job is over: its processes with all
their descendants, also those that cleared their environment; sockets with a name or a port; shared memory; files.

Only what belongs to this job is looked at: other tests run beside it. Used by the test thread.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from support.processes import command_line, family, processes, wait_gone

_LISTENS = "0A"  # a TCP socket's state
_SOCKET = "socket"
_INODE = re.compile(r"^socket:\[(\d+)\]$")
_ENDING_S = 10.0
_OF_OTHERS = ("torchinductor_", "torchelastic_", "ompi", "pmix", "prte")  # torch, torchrun and mpirun keep theirs


def _began(pid: int) -> int:
    """In ticks since the machine's start: with the pid, a process's identity. 0: it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def _rows(table: str) -> Iterator[list[str]]:
    with contextlib.suppress(OSError):  # a machine without IPv6, say
        yield from (line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:])


def sockets() -> dict[str, str]:
    """By inode, what everybody listens to: an address and a port, or a name; names in the abstract namespace begin
    with @, others are files."""
    found = {}
    for table in ("tcp", "tcp6"):
        for row in _rows(table):
            if row[3] == _LISTENS:
                found[row[9]] = f"port {int(row[1].rpartition(':')[2], 16)}"
    for row in _rows("unix"):
        if len(row) > 7:
            found[row[6]] = row[7]
    return found


def _opened_by(pid: int) -> Iterator[tuple[str, str]]:
    """(inode, what it is) of a process's sockets and shared memory."""
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if socket := _INODE.match(target):
                    yield socket[1], _SOCKET
                elif target.startswith(("/memfd:", "/dev/shm/")):
                    yield str(entry.stat().st_ino), target


def _mapped_by(pid: int) -> Iterator[tuple[str, str]]:
    """The same, of shared memory that it has mapped; perhaps it has it open no more."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/memfd:" in line or " /dev/shm/" in line:
                _, _, _, _, inode, target = line.split(maxsplit=5)
                yield inode, target


class Remains:
    """``folder``: the job's own, for temporary files."""

    def __init__(self, pid: int, folder: Path) -> None:
        self._root = pid
        self._folder = folder
        self._first = _began(pid)
        self._pids: dict[int, int] = {}
        self._sockets: dict[str, str] = {}
        self._memory: dict[str, str] = {}

    def note(self, marked: Iterable[int]) -> None:
        """Remember what is there now. ``marked``: processes that are the job's, though they may not descend from it."""
        pids = {*family(self._root), *marked} - {os.getpid()}
        self._pids |= {pid: began for pid in pids if (began := _began(pid))}
        held = {(inode, target) for pid in pids for inode, target in _opened_by(pid)}
        # Sockets and memory are numbered each on their own: the same number may be both.
        self._sockets |= {inode: name for inode, name in sockets().items() if (inode, _SOCKET) in held}
        self._memory |= {inode: target for inode, target in held if target != _SOCKET}

    def left(self, others: Iterable[int]) -> list[str]:
        """What is still there of it, in words. Processes of ``others``, who are jobs of the same machine, may share."""
        found = [f"process {pid}: {command_line(pid)}" for pid, began in self._pids.items() if _lives(pid, began)]
        found += [f"{target} in process {pid}" for pid, target in self._sharers(set(others))]
        deadline = time.monotonic() + _ENDING_S
        # A connection that nobody has accepted keeps its socket for a moment, and nothing tells when.
        while (open_ := self._sockets.keys() & sockets().keys()) and not found and time.monotonic() < deadline:
            time.sleep(0.01)
        found += [f"socket {self._sockets[inode]}" for inode in open_]
        names = [name for name in self._sockets.values() if name.startswith("/")]
        found += [f"socket file {name}" for name in names if os.path.lexists(name)]
        return found + [f"file {path}" for path in self._files()]

    def _files(self) -> list[Path]:
        journals = self._folder / "byteps"  # the folder would be the user's, and stays
        tops = [path for path in self._folder.iterdir() if not path.name.startswith(_OF_OTHERS)]
        return sorted(path for top in tops for path in (top, *top.rglob("*")) if path != journals)

    def _sharers(self, others: set[int]) -> Iterator[tuple[int, str]]:
        """Who holds shared memory of the job: nobody could have it who was there before."""
        for pid, _, state in processes():
            if self._memory and state != "Z" and pid not in others and _began(pid) >= self._first:
                for _, target in self._memory.items() & {*_opened_by(pid), *_mapped_by(pid)}:
                    yield pid, target


def _lives(pid: int, began: int) -> bool:
    """It has memory: one without is just ending."""
    return _began(pid) == began and not wait_gone(pid, 0 if command_line(pid) else _ENDING_S)
