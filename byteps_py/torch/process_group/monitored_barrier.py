"""A barrier through the store: it finds missing members even if the job's services can't be reached. Any thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store

from byteps_py.errors import StallError
from byteps_py.torch.collectives.members import Members

_counts: dict[str, int] = {}
_lock = threading.Lock()


def barrier(store: Store, members: Members, timeout_s: float, is_thorough: bool) -> None:
    """Return when every member has called it. Raises StallError after ``timeout_s``.

    The first member's error names the first missing member, or all of them if ``is_thorough``. The errors begin like
    gloo's, which scripts look for.
    """
    with _lock:
        call = _counts[members.prefix] = _counts.get(members.prefix, 0) + 1
    deadline = time.monotonic() + timeout_s
    key = f"{members.prefix}/monitored/{call}"
    if members.position:
        store.set(f"{key}/{members.position}", "here")
        if not _appears(store, f"{key}/go", deadline):
            raise StallError(
                f"Rank {members.ranks[members.position]} successfully reached monitoredBarrier, but received errors "
                f"while waiting for send/recv from rank {members.ranks[0]}: no answer within {timeout_s:g} s. That "
                "rank may be missing, or it waits for others: see its error"
            )
        return
    missing = []
    for position in range(1, members.count):
        if not _appears(store, f"{key}/{position}", deadline):
            missing.append(members.ranks[position])
            if not is_thorough:
                break
    if missing:
        raise StallError(
            f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} failed to pass monitoredBarrier in "
            f"{timeout_s * 1000:g} ms; look at what {'they are' if len(missing) > 1 else 'it is'} doing"
        )
    store.set(f"{key}/go", "go")


def _appears(store: Store, key: str, deadline: float, clock: Callable[[], float] = time.monotonic) -> bool:
    # Stores round waits down to milliseconds. A wait that ends before the deadline would look like a failed store.
    left_ms = max(0, math.ceil(1000 * (deadline - clock())))
    try:
        store.wait([key], timedelta(milliseconds=left_ms + 1))
    except RuntimeError:  # each kind of store raises a type of its own
        if clock() < deadline:
            raise
        return False
    return True
