"""The memory of a process: how its allocator keeps it, and how much the machine or the container has left. Any thread.

Call the functions that set the allocator once, before threads start. libzmq allocates every large message separately.
By default glibc maps fresh memory for each, and unmaps it at once. So every page of every message is faulted in again,
and the faults cost as much as moving the data.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

# From glibc's malloc.h; they never change.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc refuses more


def use_one_heap() -> bool:
    """Use one heap for all threads, so that memory which one thread frees is available to the others.

    A flood of TLS handshakes makes a scheduler grow by 12 MB with one heap, and by 33 MB with one for each of gRPC's
    threads. Returns False if the C library has no such setting (musl).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_ARENA_MAX, 1) == 1


def keep_freed_memory(retained_bytes: int) -> bool:
    """Serve allocations up to 32 MB from the heap, and keep up to ``retained_bytes`` of freed memory in it.

    All threads share one heap, because one thread allocates a message and another frees it. Returns False if the C
    library has no such settings (musl); then everything works, but slower.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    retained = min(retained_bytes, (1 << 31) - 1)  # mallopt takes an int
    settings = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        (_M_TRIM_THRESHOLD, retained),
        (_M_TOP_PAD, 16 << 20),
    )
    refused = [option for option, value in settings if mallopt(option, value) != 1]
    return not refused


_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> float:
    """The bytes that can be allocated without swapping; infinity where the system does not say. The container's limit
    counts."""
    left = math.inf
    for line in _text(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            left = float(value.split()[0]) * 1024
    limit, used = _text(cgroup / "memory.max").strip(), _text(cgroup / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        left = min(left, max(0, int(limit) - int(used)))
    return left


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
