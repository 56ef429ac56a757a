"""Which partition is pushed next, and whether now. Pure; time is an argument.

Servers take turns in proportion to their weights (start-time fair queueing), so that at every moment all links
carry what the placement gives them. Within a server's turn first goes what other machines have given already, and
wait for (server/awaited.py), else the highest priority. All machines follow the same rule, and so push in nearly the
same order.

Credit is for what is on the wire: it is taken when a partition is pushed and given back when its answer arrives, or
when it was due long ago (``patience_s``). An answer needs all machines, and what has no answer by then waits in its
server for a machine that has not come to it yet. If that held credit, machines whose gradients become ready at
slightly different times would fill their credits with different partitions and wait for each other.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

PATIENCE_S = 0.05


class Queued(Protocol):
    """What is sent, or asked for. ``server``: whose turn it takes; ``length``: in bytes."""

    server: int
    length: int

    def __hash__(self) -> int: ...


P = TypeVar("P", bound=Queued)


class _Turns(Generic[P]):
    """One server's queue. ``start``: the virtual time at which its next partition is due."""

    __slots__ = ("heap", "start", "weight")

    def __init__(self, weight: int) -> None:
        self.heap: list[tuple[bool, int, int, P]] = []  # is not awaited, -priority, number
        self.start = 0.0
        self.weight = weight


class PushQueue(Generic[P]):
    """``credit_bytes`` 0: no limit; may be set before the first push."""

    def __init__(self, credit_bytes: int = 0) -> None:
        self.in_flight_bytes = 0
        self.credit_bytes = credit_bytes
        self._servers: dict[int, _Turns[P]] = {}
        self._weights: Mapping[int, int] = {}
        self._length = 0
        self._virtual_time = 0.0
        self._order = itertools.count()
        self._on_wire: dict[P, float] = {}  # when it was pushed, oldest first
        #: So long after its push, a partition is no longer on the wire, answered or not.
        self.patience_s = PATIENCE_S

    def set_weights(self, weights: Mapping[int, int]) -> None:
        """Each server's part of the keys, relative to the others'; unknown servers count as 1."""
        self._weights = weights
        for server, turns in self._servers.items():
            turns.weight = weights.get(server, 1)

    def __len__(self) -> int:
        return self._length

    def add(self, part: P, priority: int, is_awaited: bool = False) -> None:
        """``is_awaited``: other machines wait for it."""
        turns = self._servers.get(part.server)
        if turns is None:
            turns = self._servers[part.server] = _Turns(self._weights.get(part.server, 1))
        if not turns.heap:  # nobody saves up turns by being idle
            turns.start = max(turns.start, self._virtual_time)
        heapq.heappush(turns.heap, (not is_awaited, -priority, next(self._order), part))
        self._length += 1

    def move(self, part: P, before: int) -> None:
        """``part``, which waits, has another server than ``before``."""
        turns = self._servers[before]
        (entry,) = (each for each in turns.heap if each[3] is part)
        turns.heap.remove(entry)
        heapq.heapify(turns.heap)
        self._length -= 1
        self.add(part, -entry[1], not entry[0])

    def hasten(self, parts: set[P]) -> None:
        """Other machines wait for these, which wait here."""
        for server in {part.server for part in parts}:
            turns = self._servers[server]
            turns.heap = [(entry[0] and entry[3] not in parts, *entry[1:]) for entry in turns.heap]
            heapq.heapify(turns.heap)

    def give_back(self, part: P) -> None:
        """``part`` was answered, or given up."""
        if self._on_wire.pop(part, None) is not None:
            self.in_flight_bytes -= part.length

    def take(self, now: float) -> P | None:
        """The next partition to push, its credit taken; None if none may go now."""
        if not self._length:
            return None
        self._write_off(now - self.patience_s)
        turns = min((t for t in self._servers.values() if t.heap), key=lambda t: (t.start, t.heap[0]))
        part = turns.heap[0][3]
        fits = not self.credit_bytes or self.in_flight_bytes + part.length <= self.credit_bytes
        if not (fits or self.in_flight_bytes == 0):
            return None
        heapq.heappop(turns.heap)
        self._length -= 1
        self._virtual_time = turns.start
        turns.start += part.length / turns.weight
        self.in_flight_bytes += part.length
        self._on_wire[part] = now
        return part

    def _write_off(self, pushed_before: float) -> None:
        while self._on_wire:
            part, pushed = next(iter(self._on_wire.items()))
            if pushed > pushed_before:
                return
            del self._on_wire[part]
            self.in_flight_bytes -= part.length

    def drop(self, parts: set[P]) -> None:
        """Forget queued partitions of a tensor that is void."""
        for turns in self._servers.values():
            turns.heap = [entry for entry in turns.heap if entry[3] not in parts]
            heapq.heapify(turns.heap)
        self._length = sum(len(turns.heap) for turns in self._servers.values())
