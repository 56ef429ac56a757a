"""When the ranks of an elastic job become a group anew, and who is in it. Pure: time is an argument.

    AT WORK ──all leave of one mind, to let others in or go──► PLANNED ──somebody is lost, or does not come──► BROKEN
       │ └────────────a machine, or a rank, is lost───────────────────────────────────────────────────────►│
       └◄──all that are to come have come, or had their time to: the next group◄──────────────────────────────┘

A member of the group is a machine. It is *ready* when all its ranks that are to come back have, and says how many.
Those with the latest state come first in the next one, so that rank 0, whose state all take, has what was committed if
anybody has; among equals those that were in the group before, in their order, then newcomers. Whoever is not ready by
the deadline is left behind, and much earlier who has shut down and may be done. In PLANNED the group still works, for
ranks that have yet to get the last result; in BROKEN nothing that it says counts any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.cluster_config import ClusterConfig
from byteps_py.scheduler.job import Outgoing, failure, to_each
from byteps_py.scheduler.roster import MemberRecord, Roster
from byteps_py.wording import count_text

#: Ranks that leave of one mind do so within moments. One that has not by then waits in vain for one that has.
PLANNED_S = 10.0
#: Ranks that shut down and initialize again do so within moments, too. One that does not is done.
SHUT_DOWN_S = 10.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A machine that is present. ``place``: its index in the group before, -1 if it was in none."""

    id: int
    place: int
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a machine says of its ranks that wait. ``has_newcomers``: not all of them were in the group before.
    ``synced_in``: the epoch with which the latest group began that one of them has the state of, 0 if none has any.
    ``shut_down``: so many others have shut down, and their processes live."""

    ranks: int
    has_newcomers: bool = False
    synced_in: int = 0
    shut_down: int = 0


@dataclass(frozen=True, slots=True)
class KeepWaiting:
    """``sentence``: for what."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Break:
    """Tell all that the group can't go on."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Open:
    """``members``: (id, ranks) of the next group, in order. ``late``: those that have not come in time.
    ``is_continued``: all its ranks were in the group before, and are equal."""

    members: tuple[tuple[int, int], ...]
    late: tuple[int, ...]
    is_continued: bool


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job can't go on. ``sentence``: why."""

    sentence: str


Decision = KeepWaiting | Break | Open | GiveUp


@dataclass(slots=True)
class Reforming:
    """``reset_limit`` 0, ``max_ranks`` 0: none."""

    min_ranks: int
    max_ranks: int
    timeout_s: float
    reset_limit: int
    reason: str = ""
    is_active: bool = False
    is_broken: bool = False
    count: int = 0  # groups after the first one
    _since_s: float = 0.0
    _ready: dict[int, Waiting] = field(default_factory=dict)  # by member

    def begin(self, reason: str, planned: bool, now_s: float) -> bool:
        """Something happened to the group. True if all are to be told, who did not know."""
        news = not planned and not self.is_broken
        if not self.is_active or (news and not self.is_broken):
            self.reason = reason
        if not self.is_active:
            self._since_s = now_s
        self.is_active = True
        self.is_broken = self.is_broken or not planned
        return news

    def ready(self, member: int, waiting: Waiting) -> None:
        self._ready[member] = waiting

    def waiting_ranks(self, member: int) -> int:
        return self._ready[member].ranks if member in self._ready else 0

    def has_nobody(self, member: int) -> bool:
        """It has said that it has no ranks, and that none may come back."""
        waiting = self._ready.get(member)
        return waiting is not None and not waiting.ranks and not waiting.shut_down

    def forget(self, member: int) -> None:
        """It has left, or was lost."""
        self._ready.pop(member, None)

    def has_room(self, at_work: int, newcomers: int) -> bool:
        """So many more ranks may join."""
        return not self.max_ranks or at_work + newcomers <= self.max_ranks

    def decide(self, candidates: Sequence[Candidate], now_s: float) -> Decision:
        """What is to be done now; called after every event, and when time has passed. Only while ``is_active``."""
        waited_s = now_s - self._since_s
        is_late = waited_s >= self.timeout_s
        away = [each for each in candidates if each.place >= 0 and each.id not in self._ready]
        if away and not self.is_broken and waited_s >= min(PLANNED_S, self.timeout_s):
            return Break(f"{self.reason}; {count_text(len(away), 'machine')} did not follow within {waited_s:.0f} s")
        if away and not is_late:
            return KeepWaiting(f"{self.reason}; waiting for {count_text(len(away), 'machine')} to come back")
        stay = [each.id for each in candidates if each.place >= 0 and not each.is_leaving]
        shut_down = sum(self._ready[member].shut_down for member in stay if member in self._ready)
        if shut_down and waited_s < min(SHUT_DOWN_S, self.timeout_s):
            return KeepWaiting(
                f"{self.reason}; waiting for {count_text(shut_down, 'rank')} to come back after shutdown()"
            )
        chosen = self._chosen(candidates)
        size = sum(ranks for _, ranks in chosen)
        if size < max(1, self.min_ranks):
            text = f"{count_text(size, 'rank')} left, and at least {max(1, self.min_ranks)} are wanted (BYTEPS_MIN_NP)"
            if is_late:
                return GiveUp(f"{self.reason}; {text}; no others came within {self.timeout_s:g} s")
            return KeepWaiting(f"{self.reason}; {text}: waiting for others to join")
        if self.reset_limit and self.count >= self.reset_limit:
            return GiveUp(
                f"{self.reason}; the group was formed anew {count_text(self.count, 'time')} (BYTEPS_RESET_LIMIT)"
            )
        newcomers = {each.id for each in candidates if each.place < 0}
        newcomers |= {member for member, waiting in self._ready.items() if waiting.has_newcomers}
        is_continued = not self.is_broken and newcomers.isdisjoint(member for member, _ in chosen)
        return Open(tuple(chosen), tuple(each.id for each in away), is_continued)

    def _chosen(self, candidates: Sequence[Candidate]) -> list[tuple[int, int]]:
        came = [each for each in candidates if self.waiting_ranks(each.id) and not each.is_leaving]
        came.sort(key=lambda each: (each.place < 0, each.place, each.id))
        chosen: list[tuple[int, int]] = []
        for each in came:
            ranks = self.waiting_ranks(each.id)
            if each.place >= 0 or self.has_room(sum(ranks for _, ranks in chosen), ranks):
                chosen.append((each.id, ranks))
        return sorted(chosen, key=lambda member: -self._ready[member[0]].synced_in)

    def opened(self, members: Sequence[int]) -> None:
        """The next group is at work."""
        self.count += 1
        self.is_active = self.is_broken = False
        self.reason = ""
        for member in members:
            self._ready.pop(member, None)


#: What a communication service says of its group. It says nothing of the next one before that is open.
_OF_A_GROUP = ("declare", "arrive", "join", "idle", "gone", "sight", "applied", "unreachable", "settled", "reform")


class Elastic:
    reforming_class: type[Reforming] = Reforming

    def __init__(self, config: ClusterConfig, roster: Roster) -> None:
        self._roster = roster
        self._reforming = self.reforming_class(
            config.min_ranks, config.max_ranks, config.elastic_timeout_s, config.reset_limit
        )

    @property
    def is_active(self) -> bool:
        return self._reforming.is_active

    @property
    def is_broken(self) -> bool:
        return self._reforming.is_broken

    @property
    def reason(self) -> str:
        return self._reforming.reason

    def is_void(self, member: MemberRecord) -> bool:
        """What it says of its group counts no more: that is none any more, or it is in none."""
        return member.is_worker and (self.is_broken or not member.ranks)

    def is_stale(self, member: MemberRecord, message: pb.MemberMessage) -> bool:
        """It was said of a group that is over. A rank that has shut down may end at any time, also in the next one."""
        kind = message.WhichOneof("body")
        if kind in ("gone", "settled"):
            said = message.gone if kind == "gone" else message.settled
            return said.epoch != self._roster.workers_since or self.is_void(member)
        return kind in _OF_A_GROUP and self.is_void(member)

    def begin(self, reason: str, planned: bool, now_s: float) -> Outgoing:
        """The group is to be formed anew."""
        if not self._reforming.begin(reason, planned, now_s):
            return []
        message = failure("PeerLostError", reason)
        message.failure.again = True
        return to_each(self._roster.workers(), message)

    def gathered(self, member: MemberRecord, ready: pb.Gathered) -> Outgoing:
        """A machine's ranks wait to be in the next group."""
        if member.ranks and ready.epoch != self._roster.workers_since:
            return []  # said before it heard that it is in this group
        if not ready.others:
            waiting = Waiting(ready.ranks, ready.newcomers, ready.synced_in, ready.shut_down)
            self._reforming.ready(member.id, waiting)
        at_work = sum(len(worker.ranks) for worker in self._roster.workers())
        has_room = self._reforming.has_room(at_work, ready.ranks)
        if self.is_active or not ready.ranks or not has_room or not self._roster.epoch:
            return []
        return self._notify(added=True)

    @property
    def is_deserted(self) -> bool:
        """Others wait to join the group, and it has no ranks any more. (A launcher of several machines ends their
        services only once all ranks have ended.)"""
        is_empty = all(self._reforming.has_nobody(worker.id) for worker in self._roster.workers())
        outside = (member for member in self._roster.present() if member.is_worker and not member.ranks)
        return not self.is_active and is_empty and any(self._reforming.waiting_ranks(each.id) for each in outside)

    def drain(self, member: MemberRecord) -> Outgoing:
        """A machine is to leave; its ranks do so at their next commit."""
        return self._notify(removed=True) if member.ranks and not self.is_active else []

    def _notify(self, added: bool = False, removed: bool = False) -> Outgoing:
        return to_each(self._roster.workers(), pb.SchedulerMessage(hosts=pb.Hosts(added=added, removed=removed)))

    def forget(self, member: MemberRecord) -> None:
        """It has left, or was lost."""
        self._reforming.forget(member.id)

    def decide(self, now_s: float) -> Decision:
        candidates = [
            Candidate(m.id, m.facts.machine_index, m.is_draining) for m in self._roster.present() if m.is_worker
        ]
        return self._reforming.decide(candidates, now_s)

    def leave_behind(self, late: Iterable[int]) -> Outgoing:
        """These have not come in time, and are told."""
        members = [member for member in self._roster.present() if member.id in set(late)]
        why = "its ranks did not come back in time (BYTEPS_ELASTIC_TIMEOUT_S)"
        return to_each(members, failure("PeerLostError", why))

    def opened(self, members: Iterable[tuple[int, int]]) -> None:
        self._reforming.opened([member for member, _ in members])
