"""Detects that this process was forked. A child is a copy of its rank, and only the rank may communicate. Any
thread."""

from __future__ import annotations

import os

from byteps_py.errors import UsageError

count = 0  # forks in this process's ancestry since the import of this module; cheaper to read than the pid


def _count() -> None:
    global count
    count += 1


os.register_at_fork(after_in_child=_count)


def forked_error(rank: object) -> UsageError:
    """The error of every session method in a forked child of ``rank``."""
    return UsageError(
        f"process {os.getpid()} was forked from rank {rank}, which alone may communicate; start new ranks with "
        "bpslaunch or spawn"
    )
