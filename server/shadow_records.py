"""The records of a run's steps, which ranks send to a server, and what is attached to them. Pure; one thread.

What is attached comes in pieces: in any order, and again on a new connection, perhaps of another cut.

    ARRIVING ──the record and all pieces are there──► HELD     its owner hears HELD
    ARRIVING ──a later record of the rank is HELD, or the server has no memory──► dropped     its owner hears LACKS
    HELD     ──a later record of the rank is durable──► dropped

A record that is ARRIVING is in no description: nobody finds half of it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from byteps_py.wire.data_link import Header, ShadowRecord


class SizedMemory(Protocol):
    """Bytes that the shell holds: a sum, or a piece. The core only passes them through."""

    @property
    def nbytes(self) -> int: ...


class AttachedPieces:
    """``nbytes`` in pieces. The bytes are the shell's."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._starts: list[int] = []  # ascending
        self._pieces: list[tuple[SizedMemory, int, int]] = []  # what lies there: these bytes of a message
        self._arrived = 0

    @property
    def is_whole(self) -> bool:
        """All bytes are there."""
        return self._arrived == self.nbytes

    def add(self, offset: int, data: SizedMemory) -> None:
        """A piece has come, perhaps once more, or of another cut: what is there already is left out."""
        end = at = offset + data.nbytes
        for number in reversed(range(bisect.bisect_left(self._starts, end))):  # gaps from the last one to the first one
            self._fill(max(offset, self._end(number)), at, offset, data, number + 1)
            at = min(at, self._starts[number])
            if at <= offset:
                return
        self._fill(offset, at, offset, data, 0)

    def _fill(self, start: int, stop: int, offset: int, data: SizedMemory, place: int) -> None:
        if start < stop:
            self._starts.insert(place, start)
            self._pieces.insert(place, (data, start - offset, stop - offset))
            self._arrived += stop - start

    def _end(self, number: int) -> int:
        _, first, last = self._pieces[number]
        return self._starts[number] + last - first

    def cut(self, start: int, stop: int) -> Iterator[tuple[SizedMemory, int, int]]:
        """The messages that have bytes ``start`` to ``stop``, and which of their own bytes these are."""
        at = max(0, bisect.bisect_right(self._starts, start) - 1)
        while at < len(self._starts) and self._starts[at] < stop:
            data, first, last = self._pieces[at]
            shift = first - self._starts[at]
            yield data, max(first, start + shift), min(last, stop + shift)
            at += 1


@dataclass(slots=True, eq=False)
class StepRecord:
    """The record of rank ``rank`` after ``step``. ``said``: None if only pieces have come. ``origin``, ``header``: to
    answer."""

    rank: int
    step: int
    pieces: AttachedPieces
    origin: object
    header: Header
    said: ShadowRecord | None = None
    said_bytes: int = 0

    @property
    def is_held(self) -> bool:
        """All of it is there."""
        return self.said is not None and self.pieces.is_whole

    @property
    def nbytes(self) -> int:
        """With the pieces that have yet to come."""
        return self.said_bytes + self.pieces.nbytes


@dataclass(slots=True, eq=False)
class RunRecords:
    """The records of one run, by rank and step."""

    _of_rank: dict[int, dict[int, StepRecord]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(self._of_rank.values())

    def __iter__(self) -> Iterator[StepRecord]:
        """By rank, as they began; of a rank, by step."""
        for records in self._of_rank.values():
            for step in sorted(records):
                yield records[step]

    @property
    def nbytes(self) -> int:
        """The bytes of all records."""
        return sum(record.nbytes for record in self)

    def find(self, rank: int, step: int) -> StepRecord | None:
        """The record, if something of it is there."""
        return self._of_rank.get(rank, {}).get(step)

    def add(self, record: StepRecord) -> None:
        """Something of it has come."""
        self._of_rank.setdefault(record.rank, {})[record.step] = record

    def drop(self, record: StepRecord) -> None:
        """Forget it."""
        del self._of_rank[record.rank][record.step]

    def newest_held(self, rank: int, until: float = math.inf) -> int:
        """The step of a rank's newest record that is held, of those up to ``until``; 0: there is none."""
        found = self._of_rank.get(rank, {}).items()
        return max((step for step, record in found if step <= until and record.is_held), default=0)

    def outdated(self, durable: int) -> list[StepRecord]:
        """The records that nobody needs once a step is durable: before the newest one of the rank up to that step."""
        newest = {rank: self.newest_held(rank, durable) for rank in self._of_rank}
        return [record for record in self if record.step < newest[record.rank]]

    def arriving_before(self, record: StepRecord) -> list[StepRecord]:
        """Earlier ones of the same rank of which something is missing."""
        return [each for each in self if each.rank == record.rank and each.step < record.step and not each.is_held]
