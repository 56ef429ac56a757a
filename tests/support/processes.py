"""What a test leaves behind: threads, children, descriptors, shared memory. Also: other processes, looked at.

Used by the test thread. Knows nothing of the package under test.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SHM = Path("/dev/shm")
# Started once per process by the library and ended with it.
_LIBRARY_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_LIBRARY_THREADS = ("tqdm_monitor", "pymp-resource_tracker")
_LIBRARY_FILES = ("/dev/urandom", "/dev/random", "/dev/nvidia", "/proc/", "/sys/")


def processes() -> Iterator[tuple[int, int, str]]:
    """(pid, parent's pid, state letter) of every process that can be seen."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                file = os.open(
                    f"/proc/{name}/stat", os.O_RDONLY
                )  # after every test: by pathlib it takes several times as long
            except OSError:  # gone meanwhile
                continue
            try:
                text = os.read(file, 1024).decode(errors="replace")
            except OSError:
                continue
            finally:
                os.close(file)
            # The name, in parentheses, may hold anything.
            state, parent, *_ = text.rpartition(")")[2].split(maxsplit=2)
            yield int(name), int(parent), state


def children(*pids: int) -> set[int]:
    """Of any of ``pids``."""
    return {child for child, parent, _ in processes() if parent in pids}


def family(pid: int) -> set[int]:
    """``pid`` and all its descendants."""
    below: dict[int, list[int]] = {}
    for child, parent, _ in processes():
        below.setdefault(parent, []).append(child)
    found, waiting = set(), [pid]
    while waiting:
        found.add(waiting[-1])
        waiting += below.get(waiting.pop(), [])
    return found


#: Of other processes, whose children count as this one's.
more_parents: list[int] = []


def _started() -> set[int]:
    return children(os.getpid(), *more_parents)


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def wait_gone(pid: int, timeout_s: float = 30.0) -> bool:
    """True once process ``pid`` has ended (a zombie has), False if it is still there after ``timeout_s``."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], max(0.0, timeout_s))[0])
    finally:
        os.close(pidfd)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed the folder
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _shared_memory() -> set[str]:
    found = set()
    with contextlib.suppress(OSError), os.scandir(_SHM) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                if entry.stat().st_uid == os.getuid():
                    found.add(entry.name)
    return found


def _belongs_to_others(name: str) -> bool:
    """True if a process outside this one's family has the segment open or mapped, or it is gone by now."""
    path = _SHM / name
    own = family(os.getpid())
    for pid, _, _ in processes():
        if pid not in own:
            with contextlib.suppress(OSError):
                if str(path) in Path(f"/proc/{pid}/maps").read_text():
                    return True
                with os.scandir(f"/proc/{pid}/fd") as fds:
                    if any(os.readlink(fd.path) == str(path) for fd in fds):
                        return True
    return not path.exists()


@dataclass(frozen=True)
class Snapshot:
    """What exists at one moment."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    descriptors: frozenset[tuple[int, str]]
    shared_memory: frozenset[str]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(
            frozenset(threading.enumerate()),
            frozenset(_started()),
            frozenset(_descriptors().items()),
            frozenset(_shared_memory()),
        )

    def leaks(self, limit_s: float = 20.0) -> list[str]:
        """What has come since and is still there, in words, after up to ``limit_s`` for what is just ending.

        Leaked children are killed, so that a later test is not blamed for them.
        """
        deadline = time.monotonic() + limit_s
        gc.collect()  # closes what only a reference cycle holds
        if self._is_all(wait_s=1.0):
            return []
        gc.unfreeze()  # cycles that began before the test, too
        gc.collect()
        found = []
        for thread in set(threading.enumerate()) - self.threads:
            is_librarys = isinstance(thread, threading._DummyThread)  # not Python's: autograd's, of a GPU
            if not is_librarys and not thread.name.startswith(_LIBRARY_THREADS):
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    found.append(f"thread {thread.name!r}")
        for pid in _started() - self.children:
            line = command_line(pid)
            if any(word in line for word in _LIBRARY_CHILDREN):
                continue
            ended = wait_gone(pid, deadline - time.monotonic())
            if pid in _started():  # ended, but nobody has asked for its status
                found.append(
                    f"child process {pid} ({line or 'a zombie'}), {'never waited for' if ended else 'running'}"
                )
                kill(pid)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        # gRPC closes its own in the background, and nothing tells when.
        while (left := self._new_descriptors()) and time.monotonic() < deadline:
            time.sleep(0.01)
        found += [f"descriptor {fd} -> {target}" for fd, target in left]
        new_segments = sorted(_shared_memory() - self.shared_memory)
        return found + [f"shared memory {_SHM / name}" for name in new_segments if not _belongs_to_others(name)]

    def _is_all(self, wait_s: float) -> bool:
        """Nothing has come since that is still there, or soon will not be."""
        deadline = time.monotonic() + wait_s
        while not (is_all := self._holds(Snapshot.take())) and time.monotonic() < deadline:
            time.sleep(0.01)
        return is_all

    def _holds(self, now: Snapshot) -> bool:
        return (
            now.threads <= self.threads
            and now.children <= self.children
            and now.descriptors <= self.descriptors
            and now.shared_memory <= self.shared_memory
        )

    def _new_descriptors(self) -> list[tuple[int, str]]:
        tracker = sys.modules.get("multiprocessing.resource_tracker")
        library_fd = tracker._resource_tracker._fd if tracker else None
        now = sorted(_descriptors().items())
        return [
            (fd, target)
            for fd, target in now
            if (fd, target) not in self.descriptors and fd != library_fd and not target.startswith(_LIBRARY_FILES)
        ]
