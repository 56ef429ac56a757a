"""What a communication service looks for again and again, and only as long as there may be something."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError
from byteps_py.proto import control_pb2 as pb
from byteps_py.worker.core.deadlines import Starting
from byteps_py.worker.core.pace import RankPace
from byteps_py.worker.core.pieces import Receipt
from byteps_py.worker.group import Group
from byteps_py.worker.service import CommunicationService


class Loop:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.stops = 0

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.timers.append((delay_s, callback))

    def stop(self) -> None:
        self.stops += 1

    def run_timers(self) -> None:
        timers, self.timers = self.timers, []
        for _, callback in timers:
            callback()


class Service(CommunicationService):
    """Without processes. ``lost``: why its group was."""

    def __init__(self, group: object) -> None:
        self.lost: list[str] = []
        self.loop = Loop()
        self._loop = cast(Any, self.loop)
        self._group = cast(Any, group)
        self._shutdown_drain = cast(Any, SimpleNamespace(gone=set(), is_waiting=False))
        self._is_settling = self._looks_for_vain_waits = False
        self._reported_s = -10.0

    def heartbeat(self) -> pb.Heartbeat:
        return pb.Heartbeat(statistics=pb.Statistics(rounds=1))

    def _group_lost(self, error: BytePSError, report: bool = True) -> None:
        self.lost.append(str(error))


# ---- waits that are in vain ------------------------------------------------------------------------------


def test_waits_in_vain_are_looked_for_once_ranks_have_left() -> None:
    waits = SimpleNamespace(may_be_vain=False, vain=lambda now: ("", False))
    service = Service(SimpleNamespace(waits=waits))
    service._look_for_vain_waits()
    assert not service.loop.timers
    waits.may_be_vain = True
    for _ in range(2):
        service._look_for_vain_waits()
        assert len(service.loop.timers) == 1
    service.loop.run_timers()
    assert (service.lost, len(service.loop.timers)) == ([], 1)
    waits.vain = lambda now: ("rank 1 has left", True)
    service.loop.run_timers()
    assert service.lost == ["rank 1 has left"]


def test_of_a_group_that_is_over_no_wait_is_in_vain() -> None:
    waits = SimpleNamespace(may_be_vain=True, vain=lambda now: ("rank 1 has left", True))
    service = Service(SimpleNamespace(waits=waits))
    service._look_for_vain_waits()
    service._group = cast(Any, SimpleNamespace(waits=SimpleNamespace(may_be_vain=False)))
    service.loop.run_timers()
    assert (service.lost, service.loop.timers) == ([], [])


# ---- ranks that wait to leave ----------------------------------------------------------------------------


def test_ranks_that_wait_to_leave_are_looked_at_until_all_have_heard() -> None:
    answers = [True, True, False]
    service = Service(SimpleNamespace(drain=lambda gone: answers.pop(0), requested=lambda request: None))
    service._settle()
    service._requested(Receipt(1, 7, 1, 0, 1))  # it may be what they wait for
    assert len(service.loop.timers) == 1
    service.loop.run_timers()
    assert (answers, service.loop.timers) == ([], [])
    service._requested(Receipt(1, 7, 1, 0, 1))  # nobody waits


# ---- waits that have taken long --------------------------------------------------------------------------


def a_group(longer_than: Callable[[float, float], list[pb.Waiting]]) -> Any:
    group = object.__new__(Group)
    group._loop = cast(Any, SimpleNamespace(time=lambda: 100.0))
    group.requests = cast(Any, SimpleNamespace(barrier_since=None))
    group.executor = cast(Any, SimpleNamespace(pace=RankPace(0), ranks={0: SimpleNamespace(direct_waits={})}))
    group.waits = cast(Any, SimpleNamespace(longer_than=longer_than))
    return group


@pytest.mark.parametrize("what", ["", "a tensor", "a barrier", "another rank"])
def test_all_tensors_are_looked_at_only_if_a_rank_has_waited_for_something(what: str) -> None:
    asked: list[tuple[float, float]] = []

    def longer_than(age_s: float, now: float) -> list[pb.Waiting]:
        asked.append((age_s, now))
        return [pb.Waiting(name=what)]

    group = a_group(longer_than)
    group.executor.pace.ready(0, 1, 7, 1, 98.5)  # not for long
    if what == "a tensor":
        group.executor.pace.ready(1, 2, 7, 1, 97.0)
    elif what == "a barrier":
        group.requests.barrier_since = 97.0
    elif what == "another rank":
        group.executor.ranks[0].direct_waits[1] = object()
    assert [waiting.name for waiting in group.waiting(2.0)] == ([what] if what else [])
    assert asked == ([(2.0, 100.0)] if what else [])


# ---- heartbeats ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_slow", "whole"), [(False, 11), (True, 3)])
def test_where_links_are_slow_most_heartbeats_only_say_that_the_process_lives(is_slow: bool, whole: int) -> None:
    requests = SimpleNamespace(report_spans=list)
    group = SimpleNamespace(has_slow_links=is_slow, requests=requests, pair_usage=list, network=None)
    service, said = Service(group), list[pb.Heartbeat]()
    for beat in range(11):  # in two seconds
        service.loop.now_s = beat * 0.2
        said.append(service._report())
    assert [each.bare for each in said].count(False) == whole
    assert all(each.bare or each.statistics.rounds for each in said)


# ---- the start -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stay", "has_come", "status"), [(False, False, 1), (False, True, 0), (True, False, 0)])
def test_a_service_to_which_no_rank_comes_ends(stay: bool, has_come: bool, status: int) -> None:
    service = Service(None)
    service._exit_code, service._stay, service._settings = 0, stay, Settings(start_timeout_s=17.0)
    service._ready = cast(Any, SimpleNamespace(expect=lambda pairs: None, when_done=lambda then: None))
    service._starting = Starting(1, lambda: None)
    service.begin()
    limits = [callback for delay_s, callback in service.loop.timers if delay_s == 17.0]
    assert len(limits) == (not stay)
    service._starting.ranks_here(int(has_come))
    for limit in limits:
        limit()
    assert (service._exit_code, service.loop.stops) == (status, status)
