"""The local ranks of one machine: one object and one state for each, from its first message to its process's end.

    ABSENT ─comes─► WAITING ─is welcomed─► PRESENT ─shuts down─► LEFT ─its process ends─► GONE
      │                ▲                   ▲     │
      └─is expected─► LATE           drains└──►DRAINING
                       RETURNING ◄─goes back, or the group ends─┘

``TRANSITIONS`` is the whole table. A rank that is RETURNING, LEFT or GONE may come again, on another connection; where
nothing is known of a rank any more it is ABSENT. A job that is not elastic has one group, which is never dissolved.

Pure: it knows neither sockets nor processes. The rank server carries out what follows from a transition, and is the
only one that causes any.

``PeerIntroductions``: local ranks that want to deal with each other directly ask for it under the key of their group.
Once all have asked, each is given the ways to the others (byteps_py/session/peers).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from byteps_py.errors import ProtocolError
from byteps_py.worker.core import IllegalTransitionError


class RankState(enum.Enum):
    """Where a local rank stands. Each value completes the sentence "the rank …"."""

    ABSENT = "has not come, or nothing is known of it any more"
    LATE = "belongs to the group, which has begun, and has yet to come"
    WAITING = "has sent a Hello, and waits for the group to begin"
    PRESENT = "takes part in the group"
    DRAINING = "takes part in the group, and leaves once other ranks have taken what it gave them"
    RETURNING = "is out of the group, and is expected to come again"
    LEFT = "has shut down; its process lives, and may come again"
    GONE = "has shut down, and its process has ended"


class RankEvent(enum.Enum):
    """What happens to a local rank."""

    COMES = "a process sends a Hello"
    IS_EXPECTED = "a group begins that the rank belongs to, before it has come"
    IS_WELCOMED = "the group takes it in"
    IS_TURNED_AWAY = "it is told why it can't take part"
    DRAINS = "it is about to leave, once other ranks have taken what it gave them"
    IS_DRAINED = "they have, or are gone"
    GOES_BACK = "it leaves the group to come again, or the group can't go on"
    SHUTS_DOWN = "it leaves in order"
    ENDS = "its process or its connection ends, or it says that an exception ends it"
    IS_FORGOTTEN = "a group begins without it, or the group does not wait for it any more"


_STATE, _EVENT = RankState, RankEvent
_IN_GROUP = {
    _EVENT.DRAINS: _STATE.DRAINING,
    _EVENT.GOES_BACK: _STATE.RETURNING,
    _EVENT.SHUTS_DOWN: _STATE.LEFT,
    _EVENT.ENDS: _STATE.ABSENT,
}
TRANSITIONS: dict[RankState, dict[RankEvent, RankState]] = {
    _STATE.ABSENT: {
        _EVENT.COMES: _STATE.WAITING,
        _EVENT.IS_EXPECTED: _STATE.LATE,
        _EVENT.IS_FORGOTTEN: _STATE.ABSENT,
    },
    _STATE.LATE: {
        _EVENT.COMES: _STATE.WAITING,
        _EVENT.IS_EXPECTED: _STATE.LATE,
        _EVENT.IS_FORGOTTEN: _STATE.ABSENT,
    },
    _STATE.WAITING: {
        _EVENT.IS_WELCOMED: _STATE.PRESENT,
        _EVENT.IS_TURNED_AWAY: _STATE.ABSENT,
        _EVENT.ENDS: _STATE.ABSENT,
    },
    _STATE.PRESENT: {**_IN_GROUP, _EVENT.IS_TURNED_AWAY: _STATE.ABSENT},
    _STATE.DRAINING: {**_IN_GROUP, _EVENT.IS_DRAINED: _STATE.PRESENT},
    _STATE.RETURNING: {
        _EVENT.COMES: _STATE.WAITING,
        _EVENT.SHUTS_DOWN: _STATE.LEFT,
        _EVENT.ENDS: _STATE.ABSENT,
    },
    _STATE.LEFT: {
        _EVENT.COMES: _STATE.WAITING,
        _EVENT.ENDS: _STATE.GONE,
        _EVENT.IS_FORGOTTEN: _STATE.ABSENT,
    },
    _STATE.GONE: {_EVENT.COMES: _STATE.WAITING, _EVENT.IS_FORGOTTEN: _STATE.ABSENT},
}
IN_GROUP = (RankState.PRESENT, RankState.DRAINING)
_WITHOUT_PROCESS = (RankState.ABSENT, RankState.LATE, RankState.GONE)


C = TypeVar("C")


class LocalRank(Generic[C]):
    """``seat``: its number on this machine, as the launcher counts. ``local_rank``: its number in the present group,
    or in the last one it belonged to; -1 before. ``connection``: of its process, opaque here; None where there is none.

    Data of the last Hello: ``is_back``, the process was in the last group and has gone back to its last commit;
    ``synced_in``, the epoch with which the latest group began that it has the state of (0: none).
    ``left_s``, ``gone_s``: when it left the present group, and when its process ended after that; None if it has not.
    They outlive the states LEFT and GONE, until a group takes the rank in or another group begins.
    ``turn``: when it came here or into the group, among all of this machine; messages go out in that order.
    """

    def __init__(self, seat: int) -> None:
        self.seat = seat
        self.state = RankState.ABSENT
        self.local_rank = -1
        self.connection: C | None = None
        self.is_back = False
        self.synced_in = 0
        self.left_s: float | None = None
        self.gone_s: float | None = None
        self.turn = 0

    def happens(self, event: RankEvent) -> None:
        """Go to the next state. Raises IllegalTransitionError."""
        after = TRANSITIONS[self.state].get(event)
        if after is None:
            raise IllegalTransitionError.of(f"local rank {self.seat}", self.state, event)
        self.state = after
        if after in _WITHOUT_PROCESS:
            self.connection = None

    @property
    def is_in_group(self) -> bool:
        return self.state in IN_GROUP


class LocalRanks(Generic[C]):
    """All local ranks of a machine, by seat, and the group that some of them are, or were last. ``is_elastic``: one
    group may follow another; else there is one, which takes its ranks in as they have come."""

    rank_class: type[LocalRank[C]] = LocalRank
    #: Each rank has the same number in each group, whatever state it has.
    keep_numbers = False

    def __init__(self, count: int, is_elastic: bool = False) -> None:
        self._is_elastic = is_elastic
        self._all = [self.rank_class(seat) for seat in range(count)]
        self.group: list[LocalRank[C]] = []  # by local rank
        self.has_had_group = False
        self.are_counted = False  # the scheduler was told how many wait: the next group has no others
        self._turns = 0

    def __getitem__(self, seat: int) -> LocalRank[C]:
        return self._all[seat]

    def in_state(self, *states: RankState) -> list[LocalRank[C]]:
        """In the order in which they came."""
        return sorted((rank for rank in self._all if rank.state in states), key=lambda rank: rank.turn)

    @property
    def waiting(self) -> list[LocalRank[C]]:
        return self.in_state(RankState.WAITING)

    @property
    def is_whole(self) -> bool:
        """All that are to come have come: of a machine that was in no group, all of its ranks."""
        is_expecting = any(rank.state in (RankState.LATE, RankState.RETURNING) for rank in self._all)
        return not is_expecting and (self.has_had_group or len(self.waiting) == len(self._all))

    @property
    def left(self) -> dict[int, float]:
        """Local ranks that were in the present group and are not, and since when."""
        return {rank.local_rank: rank.left_s for rank in self._all if rank.left_s is not None}

    @property
    def gone(self) -> dict[int, float]:
        """Those of ``left`` whose process has ended, too: they can't come back."""
        return {rank.local_rank: rank.gone_s for rank in self._all if rank.gone_s is not None}

    def connections(self, *states: RankState) -> list[C]:
        return [rank.connection for rank in self.in_state(*states) if rank.connection is not None]

    # ---- events ----------------------------------------------------------------------------------------

    def comes(self, rank: LocalRank[C], connection: C, is_back: bool, synced_in: int) -> None:
        """A process sends a Hello for this seat."""
        rank.happens(RankEvent.COMES)
        rank.connection, rank.is_back, rank.synced_in = connection, is_back, synced_in
        self._number(rank)

    def is_welcomed(self, rank: LocalRank[C]) -> None:
        rank.happens(RankEvent.IS_WELCOMED)
        rank.left_s = rank.gone_s = None
        self._number(rank)

    def _number(self, rank: LocalRank[C]) -> None:
        self._turns += 1
        rank.turn = self._turns

    def begins(self, count: int) -> list[LocalRank[C]]:
        """A group begins that has ``count`` ranks of this machine: the first one, to which all ranks belong, by their
        seats; another one those that wait, first the ranks with the latest state, and perhaps fewer. Those of it that
        wait are welcome, and returned in the order in which they are to be told. Those of the first one that have yet
        to come are LATE."""
        waiting = self.waiting
        is_first = not (self.has_had_group or self.are_counted) and count == len(self._all)
        self.has_had_group, self.are_counted = True, False
        by_state = sorted(waiting, key=lambda rank: (0 if self.keep_numbers else -rank.synced_in, rank.seat))
        # Where numbers are kept, ranks do not move up if one has died since they were counted.
        keeps_all = self.keep_numbers and count == len(self._all)
        self.group = self._all[:] if is_first or keeps_all else by_state[:count]
        for rank in self._all:
            rank.left_s = rank.gone_s = None
            if rank.state is RankState.WAITING:
                rank.is_back = rank.is_back and rank in self.group  # of those that wait on, none was in the last group
            elif rank.state is not RankState.RETURNING:
                rank.happens(RankEvent.IS_EXPECTED if is_first else RankEvent.IS_FORGOTTEN)
        for local_rank, rank in enumerate(self.group):
            rank.local_rank = local_rank
        members = [rank for rank in self.group if rank.state is RankState.WAITING]
        if not self._is_elastic:
            members.sort(key=lambda rank: rank.turn)
        for rank in members:
            self.is_welcomed(rank)
        return members

    def forget_late(self) -> list[LocalRank[C]]:
        """The group does not wait any more for those that have yet to come. Returns them."""
        late = self.in_state(RankState.LATE)
        for rank in late:
            rank.happens(RankEvent.IS_FORGOTTEN)
        return late


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
