"""The memory that this machine, or the container on it, has left. Any thread."""

from __future__ import annotations

import math
from pathlib import Path

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
