"""A log of the latest calls of each member of a group, compared when an operation takes long.

If members call different operations of kinds that are new, the service detects the difference at once, because the
operations have the same name. If one of them calls a kind that was agreed on long ago, each waits under a name of its
own. So a member that waits for long writes its latest calls to torch's store, and reads those that other waiting
members have written. Any thread.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque

from torch._C._distributed_c10d import Store

from byteps_py.errors import MismatchError
from byteps_py.torch.collectives.members import Members

#: Calls that a member remembers: another member may be that far behind.
_REMEMBERED = 256


class CallLog:
    """``record`` every call; ``compare`` when an operation takes long. ``store``: of the process group, for the members
    of one group."""

    def __init__(self, members: Members, store: Store) -> None:
        self._members = members
        self._store = store
        self._lock = threading.Lock()
        self._calls: deque[tuple[int, tuple[object, ...], str]] = deque(maxlen=_REMEMBERED)
        self.count = 0  # calls so far

    def record(self, what: tuple[object, ...], name: str) -> int:
        """The number of this call, from 1. ``what``: a description that must be the same on all members. ``name``: that
        of its tensor or stream."""
        with self._lock:
            self.count += 1
            self._calls.append((self.count, what, name))
            return self.count

    def compare(self, number: int) -> str:
        """Describes which operations the other waiting members have called. Raises MismatchError if a member has called
        another operation as its ``number``-th one, or an earlier one."""
        with self._lock:
            own = {number: (": ".join(map(str, what)), name) for number, what, name in self._calls}
        key = f"{self._members.prefix}/calls"
        written: dict[int, bytes] = {}
        with contextlib.suppress(RuntimeError):  # the store's process has ended, which is reported elsewhere
            self._store.set(f"{key}/{self._members.position}", json.dumps(list(own.items())))
            for position, rank in enumerate(self._members.ranks):
                if position != self._members.position and self._store.check([f"{key}/{position}"]):
                    written[rank] = self._store.get(f"{key}/{position}")
        found: list[str] = []
        for rank, text in written.items():
            theirs = _read(text)
            self._check(number, own, rank, theirs)
            if not theirs:  # its call is just beginning, or it is another version: nothing to compare
                continue
            last = max(theirs)
            found.append(f"rank {rank} has called {theirs[last][0]} (its operation {last} of the group)")
        return "; ".join(found)

    def _check(
        self, number: int, own: dict[int, tuple[str, str]], rank: int, theirs: dict[int, tuple[str, str]]
    ) -> None:
        # Where both have one name, the service is about to report the difference, and the group stays usable.
        differing = [n for n in own if n <= number and n in theirs and theirs[n][0] != own[n][0]]
        differing = [n for n in differing if theirs[n][1] != own[n][1]]
        if differing:
            first = min(differing)
            group = ", ".join(map(str, self._members.ranks))
            me = self._members.ranks[self._members.position]
            raise MismatchError(
                f"operation {first} of a process group of ranks {group}: rank {me} called {own[first][0]}, rank {rank} "
                f"{theirs[first][0]}; call the same operations in the same order, with the same shapes and dtypes, on "
                "every rank. The group can't be used any more"
            )


def _read(text: bytes) -> dict[int, tuple[str, str]]:
    """The calls that a member has written, by number; empty if the text is something else."""
    try:
        return {int(number): (str(what), str(name)) for number, (what, name) in json.loads(text)}
    except (ValueError, TypeError, OverflowError, RecursionError):
        return {}
