"""Which partition is pushed next, and whether now. Pure; time is an argument.

Servers take turns in proportion to their weights (start-time fair queueing), so that at every moment all links
carry what the placement gives them. Within a server's turn first goes what other machines have given already, and
wait for (server/round_state.py), else the highest priority. All machines follow the same rule, and so push in nearly
the same order, but each machine begins a round of the servers with another one.

When a machine begins, with nothing in flight, servers have a head start (``topology.turn_starts``): so many bytes go
to them before it is the others' turn.

Credit bounds what a machine has pushed and has no answer to, and so what servers hold: it is taken when a partition is
pushed, and given back when its answer arrives. An answer needs all machines, and gradients become ready at slightly
different times: machines fill their credits with different partitions, and would wait for each other. So what others
wait for goes whatever is in flight; to complete a round frees memory, and gives all of them an answer. A machine that
is late by more than ``patience_s`` holds no machine's credit.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

#: Longer than an answer takes where no machine is late.
PATIENCE_S = 1.0


class Queued(Protocol):
    """A message to send, or a request. ``server``: whose turn it takes; ``length``: in bytes."""

    server: int
    length: int

    def __hash__(self) -> int: ...


P = TypeVar("P", bound=Queued)


class _Turns(Generic[P]):
    """One server's queue. ``start``: the virtual time at which its next partition is due."""

    __slots__ = ("heap", "start", "weight")

    def __init__(self, weight: int, start: float) -> None:
        self.heap: list[tuple[bool, int, int, P]] = []  # is not awaited, -priority, number
        self.start = start
        self.weight = weight


class PushQueue(Generic[P]):
    """``credit_bytes`` 0: no limit; may be set before the first push."""

    def __init__(self, credit_bytes: int = 0) -> None:
        self.in_flight_bytes = 0
        self.credit_bytes = credit_bytes
        self._servers: dict[int, _Turns[P]] = {}
        self._weights: Mapping[int, int] = {}
        self._head_starts: Mapping[int, int] = {}
        self._length = 0
        self._virtual_time = 0.0
        self._order = itertools.count()
        self._in_flight: dict[P, float] = {}  # when it was pushed, oldest first
        #: So long after its push, a partition takes no credit any more, answered or not.
        self.patience_s = PATIENCE_S

    def set_weights(self, weights: Mapping[int, int], head_start_bytes: Mapping[int, int] | None = None) -> None:
        """Each server's part of the keys, relative to the others'; unknown servers count as 1.

        ``head_start_bytes``: what goes to a server first whenever there is nothing in flight; 0 if not said.
        """
        self._weights, self._head_starts = weights, head_start_bytes or {}
        for server, turns in self._servers.items():
            turns.weight = weights.get(server, 1)

    def __len__(self) -> int:
        return self._length

    def add(self, part: P, priority: int, is_awaited: bool = False) -> None:
        """``is_awaited``: other machines wait for it."""
        if not self._length and not self._in_flight:  # all has its answer: head starts are granted again
            self._servers.clear()
        turns = self._servers.get(part.server)
        if turns is None:
            weight = self._weights.get(part.server, 1)
            start = self._virtual_time - self._head_starts.get(part.server, 0) / weight
            turns = self._servers[part.server] = _Turns(weight, start)
        elif not turns.heap:  # no server saves up turns by being idle
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
        if self._in_flight.pop(part, None) is not None:
            self.in_flight_bytes -= part.length

    def take(self, now: float) -> P | None:
        """The next partition to push, its credit taken; None if none may go now."""
        if not self._length:
            return None
        self._write_off(now - self.patience_s)
        turns = self._next()
        if turns is None:
            return None
        part = heapq.heappop(turns.heap)[3]
        self._length -= 1
        self._virtual_time = max(self._virtual_time, turns.start)
        turns.start += part.length / turns.weight
        self.in_flight_bytes += part.length
        self._in_flight[part] = now
        return part

    def _next(self) -> _Turns[P] | None:
        """Of the servers that wait, the one whose turn it is; without credit, only of those whose next is awaited."""
        waiting = [turns for turns in self._servers.values() if turns.heap]
        turns = min(waiting, key=_due)
        in_flight_bytes = self.in_flight_bytes + turns.heap[0][3].length
        if self.in_flight_bytes and self.credit_bytes and in_flight_bytes > self.credit_bytes:
            return min((turns for turns in waiting if not turns.heap[0][0]), key=_due, default=None)
        return turns

    def _write_off(self, pushed_before: float) -> None:
        while self._in_flight:
            part, pushed = next(iter(self._in_flight.items()))
            if pushed > pushed_before:
                return
            del self._in_flight[part]
            self.in_flight_bytes -= part.length

    def drop(self, parts: set[P]) -> None:
        """Forget queued partitions of a tensor that is void."""
        for turns in self._servers.values():
            turns.heap = [entry for entry in turns.heap if entry[3] not in parts]
            heapq.heapify(turns.heap)
        self._length = sum(len(turns.heap) for turns in self._servers.values())


def _due(turns: _Turns[P]) -> tuple[float, tuple[bool, int, int, P]]:
    return turns.start, turns.heap[0]
