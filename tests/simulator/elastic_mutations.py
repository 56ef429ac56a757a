"""Cores that are broken on purpose, as in mutations.py, where one group of ranks follows another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.core import SchedulerCore
from byteps_py.scheduler.elastic import Elastic
from byteps_py.scheduler.reforming import Reforming
from byteps_py.scheduler.roster import Roster
from byteps_py.server.rounds import Rounds
from byteps_py.worker.elastic_desk import ElasticDesk, _Waiter
from byteps_py.worker.group import Group
from byteps_py.worker.rejoining import Rejoining
from byteps_py.worker.topology import Topology


def know_machines_by_their_index(core: pytest.MonkeyPatch) -> None:
    """Who wakes in a group that is no more takes the place of the one that has its index now."""
    real = Topology.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[Topology], membership: pb.Membership, machine_index: int) -> Topology:
        nameless = pb.Membership()
        nameless.CopyFrom(membership)
        nameless.workers_since = 1
        return real(cls, nameless, machine_index)  # type: ignore[no-any-return]

    core.setattr(Topology, "of", classmethod(of))


def take_whoever_comes_for_equal(core: pytest.MonkeyPatch) -> None:
    """Ranks that start late, on a machine whose others were in the group, are told that all were."""
    real = Reforming.ready
    core.setattr(
        Reforming, "ready", lambda self, member, waiting: real(self, member, replace(waiting, has_newcomers=False))
    )


def seat_by_number_alone(core: pytest.MonkeyPatch) -> None:
    """A rank that starts late on the first machine is rank 0, and has no state."""
    core.setattr(_Waiter, "order", property(lambda self: self.seat))


def take_whoever_shuts_down_for_done(core: pytest.MonkeyPatch) -> None:
    """Ranks that shut down and initialize again find themselves in groups of parts of them."""
    real = Reforming.ready
    core.setattr(Reforming, "ready", lambda self, member, waiting: real(self, member, replace(waiting, shut_down=0)))


def mourn_for_who_leaves_no_group(core: pytest.MonkeyPatch) -> None:
    """A machine that leaves while there is no group ends the others, too."""
    real = SchedulerCore._leave

    def leave(self: SchedulerCore, member: Any, reason: str, now_s: float) -> Any:
        with core.context() as moment:
            moment.setattr(Elastic, "is_void", lambda self, member: member.is_worker and not member.ranks)
            return real(self, member, reason, now_s)

    core.setattr(SchedulerCore, "_leave", leave)


def count_on_servers_of_outsiders(core: pytest.MonkeyPatch) -> None:
    def has_services(self: Roster, without: Any = None) -> bool:
        return len(self._workers) == 1 or any(member is not without for member in self._services())

    core.setattr(Roster, "has_services", has_services)


def stay_without_ranks(core: pytest.MonkeyPatch) -> None:
    """A service that was told to leave waits for ranks, though the last one has left by then."""
    core.setattr(Rejoining, "is_leaving", property(lambda self: False))


def newcomers_first(core: pytest.MonkeyPatch) -> None:
    """Rank 0, whose state all take, has none."""
    real = Reforming._chosen

    def chosen(self: Reforming, candidates: Any) -> Any:
        places = {each.id: each.place for each in candidates}
        return sorted(real(self, candidates), key=lambda member: places[member[0]] >= 0)

    core.setattr(Reforming, "_chosen", chosen)


def open_without_those_who_come_back(core: pytest.MonkeyPatch) -> None:
    """The next group begins with whoever is there first."""
    real = Reforming.decide

    def decide(self: Reforming, candidates: Any, now_s: float) -> Any:
        return real(self, [each for each in candidates if each.id in self._ready], now_s)

    core.setattr(Reforming, "decide", decide)


def keep_rounds_of_another_group(core: pytest.MonkeyPatch) -> None:
    """A server that takes a new group of as many machines for the old one."""
    real = Rounds.membership

    def membership(self: Rounds[Any], epoch: int, num_machines: int, now: float, since_epoch: int = 0) -> Any:
        return real(self, epoch, num_machines, now, 1)

    core.setattr(Rounds, "membership", membership)


def work_on_after_the_end(core: pytest.MonkeyPatch) -> None:
    """A group's connections stay when it is over."""

    def end(self: Group) -> None:
        self.executor.abandon()
        self.requests.memory.let_go()

    core.setattr(Group, "end", end)


def break_up_at_a_plan(core: pytest.MonkeyPatch) -> None:
    """Ranks that leave of one mind end the group for those that have yet to get the last result."""
    real = Elastic.begin

    def begin(self: Elastic, reason: str, planned: bool, now_s: float) -> Any:
        return real(self, reason, False, now_s)

    core.setattr(Elastic, "begin", begin)


def hear_nobody_who_came_back(core: pytest.MonkeyPatch) -> None:
    """A rank's last words on the connection before are not read before it comes again."""

    def is_taken(self: ElasticDesk, seat: int) -> bool:
        return seat in self._waiters or self._in_group(seat) is not None

    core.setattr(ElasticDesk, "_is_taken", is_taken)


#: Each with a seed that shows it.
ELASTIC_MUTATIONS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    know_machines_by_their_index: 6540,
    take_whoever_comes_for_equal: 139,
    mourn_for_who_leaves_no_group: 8,
    count_on_servers_of_outsiders: 504,
    stay_without_ranks: 10,
    newcomers_first: 0,
    open_without_those_who_come_back: 0,
    keep_rounds_of_another_group: 14,
    work_on_after_the_end: 3,
    break_up_at_a_plan: 44,
    hear_nobody_who_came_back: 15,
    seat_by_number_alone: 5773,
    take_whoever_shuts_down_for_done: 1,
}
