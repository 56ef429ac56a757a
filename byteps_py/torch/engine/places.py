"""Which name of the service an operation of a group uses: the same on all members, from the order of calls alone.

A name is agreed on once and then used again by every operation of the same kind (operation, dtype, elements), so names
are handed out as places in a list: the first kind gets place 0, the next one place 1, and so on. A kind is not part of
its name, so members whose operations differ meet under one name, and the service tells them what differs. When all
places are taken, the kind that was used longest ago gives up its own: however many sizes a program uses, the memory
they hold is bounded. Nothing here depends on time, so all members that call alike decide alike.

Called with the group's lock held.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from byteps_py.torch.engine.lanes import Lane
from byteps_py.torch.engine.operation_kind import OperationKind

#: Kinds of operations that a group remembers.
PLACES = 256


@dataclass(slots=True, eq=False)
class Place:
    """A kind's lanes. Its operations use them in turn, so that several can be under way."""

    number: int
    lanes: list[Lane] = field(default_factory=list)
    declared: dict[int, OperationKind] = field(default_factory=dict)  # by number of the lane
    calls: int = 0

    def next_lane(self, width: int) -> int:
        """The number of the lane for the next call, of ``width`` lanes."""
        self.calls += 1
        return (self.calls - 1) % width


def lanes_for(nbytes: int) -> int:
    """How many operations of so many bytes may be under way at once; a further one waits for the first to end."""
    return 4 if nbytes <= 1 << 23 else 2


class Places:
    """The kinds that a group remembers, the one used longest ago first."""

    def __init__(self, limit: int = PLACES) -> None:
        self._limit = limit
        self._by_kind: OrderedDict[OperationKind, Place] = OrderedDict()
        self._vacant: list[Place] = []

    def all(self) -> list[Place]:
        """Those that kinds have, or had before members disagreed about them."""
        return [*self._by_kind.values(), *self._vacant]

    def find(self, kind: OperationKind) -> Place:
        """The place of ``kind``; a new one, or another kind's, if it has none."""
        place = self._by_kind.get(kind)
        if place is not None:
            self._by_kind.move_to_end(kind)
            return place
        if self._vacant:
            place = self._vacant.pop()
        elif len(self._by_kind) < self._limit:
            place = Place(len(self._by_kind))
        else:
            _, place = self._by_kind.popitem(last=False)
        place.calls = 0
        self._by_kind[kind] = place
        return place

    def forget(self, kind: OperationKind, place: Place) -> None:
        """Members have disagreed about ``kind``: its place, another kind's to the others, is the next to be used."""
        if self._by_kind.get(kind) is place:
            del self._by_kind[kind]
            self._vacant.append(place)
