"""Pieces of other machines' ranks that have come here whole, and whether those who gave them know. Pure.

They keep a piece until they know: what they have sent may be lost with a connection. It is said along with the next
request for the same rank's pieces, as it is where ranks go from round to round; else after a while by itself. What was
on a connection that broke is said again: of each name two rounds at most, more nobody keeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Way(NamedTuple):
    """From whom, for whom, and in which name pieces come: ``source`` and ``target`` are global ranks."""

    machine: int
    key: int
    source: int
    target: int


class Receipts:
    """What is said to whom: pairs of a Way and a round."""

    def __init__(self) -> None:
        self._parts: dict[tuple[Way, int], int] = {}  # bytes that have come, of pieces that have not come whole
        self._whole: dict[Way, list[int]] = {}  # the last two rounds
        self._unsaid: dict[Way, list[int]] = {}

    def came(self, way: Way, round_: int, nbytes: int, total: int) -> None:
        """``nbytes`` more of the piece of a round, which has ``total``."""
        if not total:
            return  # nobody keeps anything
        got = self._parts.pop((way, round_), 0) + nbytes
        if got < total:
            self._parts[way, round_] = got
            return
        self._whole[way] = [*self._whole.get(way, [])[-1:], round_]
        self._unsaid.setdefault(way, []).append(round_)

    def say(self, way: Way) -> int:
        """The round to say along with a request; 0 if there is none."""
        rounds = self._unsaid.get(way)
        if not rounds:
            return 0
        round_ = rounds.pop(0)
        if not rounds:
            del self._unsaid[way]
        return round_

    @property
    def are_due(self) -> bool:
        """Something is not said yet."""
        return bool(self._unsaid)

    def take_due(self) -> list[tuple[Way, int]]:
        """What is not said yet, and now will be."""
        due = [(way, round_) for way, rounds in self._unsaid.items() for round_ in rounds]
        self._unsaid.clear()
        return due

    def said(self, machine: int) -> Iterable[tuple[Way, int]]:
        """What a machine was told, or will be, and may not have heard."""
        return [(way, round_) for way, rounds in self._whole.items() if way.machine == machine for round_ in rounds]

    def clear(self) -> None:
        self._parts.clear()
        self._whole.clear()
        self._unsaid.clear()
