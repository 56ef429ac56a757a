"""The connections between two machines of which one has several network cards: its *rails*. Pure; any thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Rail(NamedTuple):
    """``number``: from 0, for the machine that calls. ``own``: the address that it comes from; empty: the system's
    choice. ``there``: the other end's."""

    number: int
    own: str
    there: str


def rails_between(own: Sequence[str], there: Sequence[str]) -> list[Rail]:
    """All rails between a machine that offers the addresses ``own``, perhaps none, and one that offers ``there``: the
    first card of one with the first of the other, and so on; the machine with more cards decides how many.

    >>> [rail.own + "-" + rail.there for rail in rails_between(["a0", "a1"], ["b0", "b1"])]
    ['a0-b0', 'a1-b1']
    >>> [rail.own + "-" + rail.there for rail in rails_between([], ["b0", "b1"])]
    ['-b0', '-b1']
    """
    count = max(len(own), len(there))
    return [Rail(n, own[n % len(own)] if own else "", there[n % len(there)]) for n in range(count)]
