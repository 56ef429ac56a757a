"""Elastic jobs on the scheduler: when the ranks form the next group, its members, and the messages to them. Pure.

    AT_WORK ──all ranks leave together, to let others join or leave──► PLANNED ──a machine is lost or late──► BROKEN
       │ └────────────a machine, or a rank, is lost──────────────────────────────────────────────────────────►│
       └◄──every expected machine is ready, or has had its time: the next group opens◄────────────────────────┘

A member of the group is a machine. It is *ready* when all its ranks that are to return have returned; it then says how
many they are. Machines with the latest state come first in the next group, so that rank 0, whose state all ranks take,
has the committed state if any rank has it. Among equals, machines of the previous group come first, in their order,
then newcomers. A machine that is not ready by the deadline is left behind; a machine whose ranks have shut down, and
may be done, is left behind much earlier. In PLANNED the group still works, for ranks that have yet to get the last
result. In BROKEN its messages do not count.

Reforming decides, and knows neither members nor messages. Elastic applies it to the members of the roster.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.job import Outgoing, failure, to_each
from byteps_py.scheduler.roster import ClusterConfig, MemberRecord, Roster
from byteps_py.wording import count_text

#: Ranks that leave together do so within moments. A machine that has not left by then is stuck: others wait in vain.
PLANNED_S = 10.0
#: Ranks that shut down and initialize again do so within moments, too. A rank that does not is done.
SHUT_DOWN_S = 10.0

#: The messages of a communication service about its group. It sends none about the next group before that is open.
_OF_A_GROUP = (
    "declare",
    "arrive",
    "join",
    "idle",
    "ranks_shut_down",
    "stack_report",
    "applied",
    "unreachable",
    "shutdown_confirmed",
    "reform",
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A connected machine. ``place``: its index in the previous group, -1 if it was in none. ``number``: as configured
    (DMLC_WORKER_ID)."""

    id: int
    place: int
    is_leaving: bool = False
    number: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A machine's report of its ranks that wait. ``has_newcomers``: not all of them were in the previous group.
    ``synced_in``: the epoch that opened the latest group whose state one of them has, 0 if none has any.
    ``shut_down``: how many other ranks have shut down while their processes live."""

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
    """The group can't go on, and all its machines must learn of it."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Open:
    """``members``: (id, ranks) of the next group, in order. ``late``: the machines that were not ready in time.
    ``is_continued``: all its ranks were in the previous group, and have equal states. ``is_under_way``: one of them has
    the state of an earlier group."""

    members: tuple[tuple[int, int], ...]
    late: tuple[int, ...]
    is_continued: bool
    is_under_way: bool = False


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job can't go on. ``sentence``: why."""

    sentence: str


Decision = KeepWaiting | Break | Open | GiveUp


class GroupState(enum.Enum):
    """See the diagram of this module."""

    AT_WORK = "at work"
    PLANNED = "leaving together"
    BROKEN = "broken"


@dataclass(slots=True)
class Reforming:
    """``timeout_s``: how long machines have to be ready. ``reset_limit`` 0, ``max_ranks`` 0: no limit.
    ``keeps_ranks``: each group has as many ranks as the first one, with the same numbers (BYTEPS_MAX_RESTARTS).

    A part of a state machine, which calls a method for each thing that happens."""

    min_ranks: int
    max_ranks: int
    timeout_s: float
    reset_limit: int
    keeps_ranks: bool = False
    state: GroupState = GroupState.AT_WORK
    reason: str = ""  # why the group is not at work
    count: int = 0  # groups after the first one
    _since_s: float = 0.0  # when the group stopped to be at work
    _ready: dict[int, Waiting] = field(default_factory=dict)  # by member

    def begin(self, reason: str, planned: bool, now_s: float) -> bool:
        """Something happened to the group. True if its members have to learn that it can't go on."""
        was = self.state
        breaks = not planned and was is not GroupState.BROKEN
        if was is GroupState.AT_WORK:
            self._since_s = now_s
        if was is GroupState.AT_WORK or breaks:
            self.reason = reason
        if was is GroupState.AT_WORK:
            self.state = GroupState.PLANNED
        if breaks:
            self.state = GroupState.BROKEN
        return breaks

    def wait_anew(self, now_s: float) -> None:
        """Machines that are waited for have all of their time from now on."""
        self._since_s = now_s

    def ready(self, member: int, waiting: Waiting) -> None:
        """All ranks of a machine that are to return have returned; ``waiting`` says how many they are."""
        self._ready[member] = waiting

    def waiting_ranks(self, member: int) -> int:
        """The number of ranks of a machine that wait to be in the next group."""
        return self._ready[member].ranks if member in self._ready else 0

    def has_nobody(self, member: int) -> bool:
        """True if it has said that it has no ranks, and that none may return."""
        waiting = self._ready.get(member)
        return waiting is not None and not waiting.ranks and not waiting.shut_down

    def has_nobody_at_work(self, member: int) -> bool:
        """True if it has said so: its ranks of the group have ended, or wait for the next one."""
        return member in self._ready

    def forget(self, member: int) -> None:
        """The member has left, or was lost."""
        self._ready.pop(member, None)

    def has_room(self, at_work: int, newcomers: int) -> bool:
        """True if ``newcomers`` ranks may join ``at_work`` others."""
        return not self.max_ranks or at_work + newcomers <= self.max_ranks

    def decide(self, candidates: Sequence[Candidate], now_s: float) -> Decision:
        """The next step. Call it after every event, and when time has passed; only while the group is not AT_WORK."""
        waited_s = now_s - self._since_s
        is_late = waited_s >= self.timeout_s
        away = [each for each in candidates if each.place >= 0 and each.id not in self._ready]
        if away and self.state is GroupState.PLANNED and waited_s >= min(PLANNED_S, self.timeout_s):
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
        needed = max(1, self.min_ranks)
        if size < needed:
            source = "BYTEPS_MAX_RESTARTS: it keeps their number" if self.keeps_ranks else "BYTEPS_MIN_NP"
            text = f"{count_text(size, 'rank')} left, but the job needs at least {needed} ({source})"
            if is_late:
                return GiveUp(f"{self.reason}; {text}; no others joined within {self.timeout_s:g} s")
            return KeepWaiting(f"{self.reason}; {text}: waiting for others to join")
        if self.reset_limit and self.count >= self.reset_limit:
            times = count_text(self.count, "time")
            return GiveUp(f"{self.reason}; the group was already re-formed {times}, the limit (BYTEPS_RESET_LIMIT)")
        newcomers = {each.id for each in candidates if each.place < 0}
        newcomers |= {member for member, waiting in self._ready.items() if waiting.has_newcomers}
        is_continued = self.state is GroupState.PLANNED and newcomers.isdisjoint(member for member, _ in chosen)
        is_under_way = any(self._ready[member].synced_in for member, _ in chosen)
        return Open(tuple(chosen), tuple(each.id for each in away), is_continued, is_under_way)

    def _chosen(self, candidates: Sequence[Candidate]) -> list[tuple[int, int]]:
        present = [each for each in candidates if self.waiting_ranks(each.id) and not each.is_leaving]
        present.sort(key=lambda each: (each.place < 0, each.place, each.id))
        chosen: list[tuple[int, int]] = []
        for each in present:
            ranks = self.waiting_ranks(each.id)
            if each.place >= 0 or self.has_room(sum(ranks for _, ranks in chosen), ranks):
                chosen.append((each.id, ranks))
        if self.keeps_ranks:
            numbers = {each.id: each.number for each in present}
            return sorted(chosen, key=lambda member: numbers[member[0]])
        return sorted(chosen, key=lambda member: -self._ready[member[0]].synced_in)

    def opened(self, members: Sequence[int]) -> None:
        """The next group is at work."""
        self.count += 1
        self.state = GroupState.AT_WORK
        self.reason = ""
        for member in members:
            self._ready.pop(member, None)


class Elastic:
    """The group of an elastic job, and the machines that wait to join it.

    A component of SchedulerCore, which calls a method for each step of a group's life and carries out the decision of
    ``decide``.
    """

    reforming_class: type[Reforming] = Reforming

    def __init__(self, config: ClusterConfig, roster: Roster) -> None:
        self._roster = roster
        self._reforming = self.reforming_class(
            config.min_ranks, config.max_ranks, config.elastic_timeout_s, config.reset_limit, config.max_restarts > 0
        )

    @property
    def state(self) -> GroupState:
        """See the diagram of this module."""
        return self._reforming.state

    @property
    def reason(self) -> str:
        """Why the group is not at work; empty while it is."""
        return self._reforming.reason

    @property
    def waits_for_all(self) -> bool:
        """True if all machines that are lost are expected to come back, even the last one."""
        return self._reforming.keeps_ranks

    def wait_anew(self, now_s: float) -> None:
        """See Reforming."""
        self._reforming.wait_anew(now_s)

    def is_void(self, member: MemberRecord) -> bool:
        """True if its messages about its group do not count: the group is broken, or it is in none."""
        return member.is_worker and (self.state is GroupState.BROKEN or not member.ranks)

    def is_stale(self, member: MemberRecord, message: pb.MemberMessage) -> bool:
        """True for a message about a group that is over. A rank that has shut down may end at any time, also while the
        next group is at work."""
        kind = message.WhichOneof("body")
        if kind == "keep_states":
            return message.keep_states.epoch != self._roster.workers_since
        if kind in ("ranks_shut_down", "shutdown_confirmed"):
            said = message.ranks_shut_down if kind == "ranks_shut_down" else message.shutdown_confirmed
            return said.epoch != self._roster.workers_since or self.is_void(member)
        return kind in _OF_A_GROUP and self.is_void(member)

    def begin(self, reason: str, planned: bool, now_s: float) -> Outgoing:
        """The group is to be re-formed."""
        if not self._reforming.begin(reason, planned, now_s):
            return []
        message = failure("PeerLostError", reason)
        message.failure.group_only = True
        return to_each(self._roster.workers(), message)

    def gathered(self, member: MemberRecord, ready: pb.Gathered) -> Outgoing:
        """A machine's ranks wait to be in the next group."""
        if member.ranks and ready.epoch != self._roster.workers_since:
            return []  # sent before it learned that it is in this group
        if not ready.others:
            waiting = Waiting(ready.ranks, ready.newcomers, ready.synced_in, ready.shut_down)
            self._reforming.ready(member.id, waiting)
        at_work = sum(len(worker.ranks) for worker in self._roster.workers())
        has_room = self._reforming.has_room(at_work, ready.ranks)
        if self.state is not GroupState.AT_WORK or not ready.ranks or not has_room or not self._roster.epoch:
            return []
        return self._notify(added=True)

    @property
    def is_deserted(self) -> bool:
        """True if the group has no ranks any more, and others wait to join it. (A launcher of several machines ends
        their services only once all ranks have ended.)"""
        is_empty = all(self._reforming.has_nobody(worker.id) for worker in self._roster.workers())
        outside = (member for member in self._roster.present() if member.is_worker and not member.ranks)
        is_awaited = any(self._reforming.waiting_ranks(each.id) for each in outside)
        return self.state is GroupState.AT_WORK and is_empty and is_awaited

    @property
    def is_succeeded(self) -> bool:
        """True if the group has no ranks any more, and processes that were started in their place wait on its machines:
        a rank may be killed between shutdown() and init()."""
        workers = self._roster.workers()
        is_over = all(self._reforming.has_nobody_at_work(worker.id) for worker in workers)
        is_awaited = any(self._reforming.waiting_ranks(worker.id) for worker in workers)
        return self.state is GroupState.AT_WORK and self._roster.epoch > 0 and is_over and is_awaited

    def drain(self, member: MemberRecord) -> Outgoing:
        """A machine is to leave; its ranks leave at their next commit."""
        return self._notify(removed=True) if member.ranks and self.state is GroupState.AT_WORK else []

    def _notify(self, added: bool = False, removed: bool = False) -> Outgoing:
        return to_each(self._roster.workers(), pb.SchedulerMessage(hosts=pb.Hosts(added=added, removed=removed)))

    def forget(self, member: MemberRecord) -> None:
        """The member has left, or was lost."""
        self._reforming.forget(member.id)

    def first_opened(self, membership: pb.Membership) -> None:
        """The first group is at work. Its machines have reported waiting ranks before: those are in it."""
        for member in self._roster.workers():
            self._reforming.forget(member.id)
        if self._reforming.keeps_ranks:
            ranks = sum(worker.local_size for worker in membership.workers)
            self._reforming.min_ranks = self._reforming.max_ranks = ranks

    def decide(self, now_s: float) -> Decision:
        """See ``Reforming.decide``; the candidates are the connected machines."""
        candidates = [
            Candidate(m.id, m.facts.machine_index, m.is_draining, m.home[1])
            for m in self._roster.present()
            if m.is_worker
        ]
        return self._reforming.decide(candidates, now_s)

    def leave_behind(self, late: Iterable[int]) -> Outgoing:
        """Tell these machines that they are not in the next group."""
        members = [member for member in self._roster.present() if member.id in set(late)]
        why = "its ranks did not come back in time (BYTEPS_ELASTIC_TIMEOUT_S)"
        return to_each(members, failure("PeerLostError", why))

    def opened(self, members: Iterable[tuple[int, int]]) -> None:
        """The next group, (id, ranks) of each member, is at work."""
        self._reforming.opened([member for member, _ in members])
