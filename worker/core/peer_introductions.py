"""Which local ranks want to know each other, to deal with each other directly. Pure; owned by the loop's thread.

Ranks that make a group ask for it under its key, each when it comes to it. Once all have, each is given the ways
to the others; what the ranks say to each other then does not pass through here (byteps_py/session/peers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from byteps_py.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Introduce:
    """Give ``rank`` the way to ``other``."""

    rank: int
    other: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell ``rank`` that all members have asked for ``key``."""

    rank: int
    key: int


class PeerIntroductions:
    """All by local rank. A rank that leaves may come back, while others have yet to leave: a rank that is here for the
    nth time meets those that are, too."""

    def __init__(self) -> None:
        #: By key, and how often those who ask have been here before: the members, and those who have asked.
        self._asked: dict[tuple[int, int], tuple[tuple[int, ...], set[int]]] = {}
        self._stays: Counter[int] = Counter()  # that are over
        self._known: set[tuple[int, int]] = set()  # (rank, other rank that it has the way to)

    def ask(self, rank: int, key: int, members: Sequence[int]) -> list[Introduce | Tell]:
        """``rank`` wants to deal with the other ``members``. Raises ProtocolError if they don't ask for the same."""
        stay = (key, self._stays[rank])
        wanted, asked = self._asked.setdefault(stay, (tuple(members), set()))
        if rank not in members or tuple(members) != wanted:
            raise ProtocolError(f"local rank {rank} asks to meet {list(members)}, others under that key {list(wanted)}")
        asked.add(rank)
        if len(asked) < len(wanted):
            return []
        del self._asked[stay]
        new = [(one, other) for one in wanted for other in wanted if one != other and (one, other) not in self._known]
        self._known.update(new)
        return [*(Introduce(one, other) for one, other in new), *(Tell(one, key) for one in wanted)]

    def forget(self, rank: int) -> None:
        """It has left. A rank that comes in its place is another one."""
        self._stays[rank] += 1
        self._known = {pair for pair in self._known if rank not in pair}
        for _, asked in self._asked.values():
            asked.discard(rank)
        self._asked = {stay: entry for stay, entry in self._asked.items() if entry[1]}
