"""Cores that are broken on purpose, as in mutations.py, where one group of ranks follows another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.core import SchedulerCore
from byteps_py.scheduler.elastic import Elastic, Reforming
from byteps_py.scheduler.member_links.links import MemberLinks
from byteps_py.scheduler.roster import Roster
from byteps_py.server.rounds import Rounds
from byteps_py.worker.core.local_ranks import RankState
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.group import Group
from byteps_py.worker.ranks.rank_server import RankServer
from byteps_py.worker.scheduler_messages import Rejoining

from .mutations import Mutation, with_roster
from .parts import Parts


def with_elastic(elastic: type[Elastic], core: type[SchedulerCore] = SchedulerCore) -> type[MemberLinks]:
    core = type("SchedulerCore", (core,), {"elastic_class": elastic})
    return type("MemberLinks", (MemberLinks,), {"core_class": core})


def with_reforming(reforming: type[Reforming]) -> type[MemberLinks]:
    return with_elastic(type("Elastic", (Elastic,), {"reforming_class": reforming}))


class KnowMachinesByTheirIndex(Mutation):
    """Who wakes in a group that is no more takes the place of the one that has its index now."""

    class topology(Topology):
        @classmethod
        def of(cls, membership: pb.Membership, place: int, shadow_copies: int = 1) -> Topology:
            nameless = pb.Membership()
            nameless.CopyFrom(membership)
            nameless.workers_since = 1
            return super().of(nameless, place, shadow_copies)


class _Equals(Reforming):
    def ready(self, member: Any, waiting: Any) -> Any:
        return super().ready(member, replace(waiting, has_newcomers=False))


class TakeWhoeverComesForEqual(Mutation):
    """Ranks that start late, on a machine whose others were in the group, are told that all were."""

    member_links = with_reforming(_Equals)


class _Done(Reforming):
    def ready(self, member: Any, waiting: Any) -> Any:
        return super().ready(member, replace(waiting, shut_down=0))


class TakeWhoeverShutsDownForDone(Mutation):
    """Ranks that shut down and initialize again find themselves in groups of parts of them."""

    member_links = with_reforming(_Done)


class _Mourns(Elastic):
    is_mourning = False

    def is_void(self, member: Any) -> bool:
        return member.is_worker and not member.ranks if self.is_mourning else super().is_void(member)


class _MournsAtLeave(SchedulerCore):
    def _leave(self, member: Any, leave: pb.Leave, now_s: float) -> Any:
        self._elastic.is_mourning = True
        try:
            return super()._leave(member, leave, now_s)
        finally:
            self._elastic.is_mourning = False


class MournForWhoLeavesNoGroup(Mutation):
    """A machine that leaves while there is no group ends the others, too."""

    member_links = with_elastic(_Mourns, _MournsAtLeave)


class _CountsOutsiders(Roster):
    def has_services(self, without: Any = None) -> bool:
        return len(self._workers) == 1 or any(member is not without for member in self._services())


class CountOnServersOfOutsiders(Mutation):
    member_links = with_roster(_CountsOutsiders)


class StayWithoutRanks(Mutation):
    """A service that was told to leave waits for ranks, though the last one has left by then."""

    class rejoining(Rejoining):
        @property
        def is_leaving(self) -> bool:
            return False


class _NewcomersFirst(Reforming):
    def _chosen(self, candidates: Any) -> Any:
        places = {each.id: each.place for each in candidates}
        return sorted(super()._chosen(candidates), key=lambda member: places[member[0]] >= 0)


class NewcomersFirst(Mutation):
    """Rank 0, whose state all take, has none."""

    member_links = with_reforming(_NewcomersFirst)


class _Impatient(Reforming):
    def decide(self, candidates: Any, now_s: float) -> Any:
        return super().decide([each for each in candidates if each.id in self._ready], now_s)


class OpenWithoutThoseWhoComeBack(Mutation):
    """The next group begins with whoever is there first."""

    member_links = with_reforming(_Impatient)


class KeepRoundsOfAnotherGroup(Mutation):
    """A server that takes a new group of as many machines for the old one."""

    class rounds(Rounds[Any]):
        def membership(
            self, epoch: int, num_machines: int, now: float, since_epoch: int = 0, has_share: bool = True
        ) -> Any:
            return super().membership(epoch, num_machines, now, 1, has_share)


class WorkOnAfterTheEnd(Mutation):
    """A group's connections stay when it is over."""

    class group(Group):
        def end(self) -> None:
            self.executor.abandon()
            self.requests.memory.release()


class _Unplanned(Elastic):
    def begin(self, reason: str, planned: bool, now_s: float) -> Any:
        return super().begin(reason, False, now_s)


class BreakUpAtAPlan(Mutation):
    """Ranks that leave of one mind end the group for those that have yet to get the last result."""

    member_links = with_elastic(_Unplanned)


class HearNobodyWhoCameBack(Mutation):
    """A rank's last words on the connection before are not read before it comes again."""

    class rank_server(RankServer):
        def _is_taken(self, rank: Any) -> bool:
            return rank.is_in_group or rank.state is RankState.WAITING


#: Each with a seed that shows it.
ELASTIC_MUTATIONS: dict[type[Parts], int] = {
    KnowMachinesByTheirIndex: 2249,
    TakeWhoeverComesForEqual: 139,
    MournForWhoLeavesNoGroup: 8,
    CountOnServersOfOutsiders: 504,
    StayWithoutRanks: 10,
    NewcomersFirst: 20,
    OpenWithoutThoseWhoComeBack: 3,
    KeepRoundsOfAnotherGroup: 14,
    WorkOnAfterTheEnd: 3,
    BreakUpAtAPlan: 44,
    HearNobodyWhoCameBack: 11,
    TakeWhoeverShutsDownForDone: 1,
}
