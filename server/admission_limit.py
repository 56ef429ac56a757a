"""Partitions whose first sum is not taken yet: how many there may be. Pure; one thread.

A server is told by nobody which tensors there are: it learns of one from the first machine that gives to it, and keeps
what it gave until all have. So a machine that makes up keys, or indices, would fill its memory, were there no bound.
"""

from __future__ import annotations


class AdmissionLimit:
    """Counts them, by key."""

    #: Far more than the tensors of any model; 1.8 KB each, beside what was given to them.
    most_keys = 1 << 16
    #: Of all keys: 16 GB in the smallest partitions.
    most_partitions = 1 << 19

    def __init__(self) -> None:
        self._by_key: dict[int, int] = {}
        self._partitions = 0

    def objection(self, key: int) -> str:
        """Why another one can't begin; empty if it can."""
        if len(self._by_key) >= self.most_keys and key not in self._by_key:
            what = f"{self.most_keys} others"
        elif self._partitions >= self.most_partitions:
            what = f"{self.most_partitions} partitions"
        else:
            return ""
        return f"tensor key {key:#018x}: {what} have begun here that not all machines have given to"

    def begun(self, key: int) -> None:
        self._by_key[key] = self._by_key.get(key, 0) + 1
        self._partitions += 1

    def ended(self, key: int) -> None:
        """One of its partitions was summed for the first time, or is forgotten."""
        self._partitions -= 1
        self._by_key[key] -= 1
        if not self._by_key[key]:
            del self._by_key[key]
