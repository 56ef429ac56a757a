"""Elastic jobs on the scheduler: what the roster's machines are to a group that is formed anew, and who is told.

Pure. ``reforming.py`` decides; this one knows members and messages.
"""

from __future__ import annotations

from collections.abc import Iterable

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.cluster import ClusterConfig
from byteps_py.scheduler.member import MemberRecord
from byteps_py.scheduler.outgoing import Outgoing, failure, to_each
from byteps_py.scheduler.reforming import Candidate, Decision, Reforming, Waiting
from byteps_py.scheduler.roster import Roster

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
