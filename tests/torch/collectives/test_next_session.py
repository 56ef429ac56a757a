"""A rank that leaves a group of an elastic job, and trains by itself until it is part of the next one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from byteps_py.config.settings import Settings
from byteps_py.errors import HostsUpdatedInterrupt, NotInitializedError, RendezvousError
from byteps_py.session import Session, open_session
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.job_connections import NextSession

WAIT_S = 30.0


class _Groups:
    """``open``: of a job of one. Each group after the first one is there once ``next_is_there`` is set."""

    def __init__(self, refused: Exception | None = None) -> None:
        self.opened: list[Session] = []
        self.next_is_there = threading.Event()
        self._refused = refused

    def open(self, settings: Settings) -> Session:
        if self.opened:
            if not self.next_is_there.wait(WAIT_S):
                raise RendezvousError("the test has ended")
            if self._refused is not None:
                raise self._refused
        self.opened.append(open_session(settings))
        return self.opened[-1]


def _between(groups: _Groups) -> Context:
    context = Context(groups.open)
    context.open(Settings())
    context.leave_for_next(HostsUpdatedInterrupt())
    return context


def test_between_groups_a_rank_has_its_place_and_no_operations() -> None:
    groups = _Groups()
    context = _between(groups)
    assert (context.is_open, context.is_between, context.is_next_ready) == (False, True, False)
    assert (context.place.rank, context.place.size) == (0, 1)
    with pytest.raises(HostsUpdatedInterrupt):
        context.session.check_open()
    groups.next_is_there.set()
    context.open()
    assert (context.is_open, context.is_between) == (True, False)
    assert context.session is groups.opened[1]
    context.close()


def test_a_group_that_can_not_be_had_is_an_error_of_open() -> None:
    groups = _Groups(RendezvousError("dismissed"))
    context = _between(groups)
    groups.next_is_there.set()
    with pytest.raises(RendezvousError, match="dismissed"):
        context.open()
    assert (context.is_open, context.is_between) == (False, False)
    with pytest.raises(NotInitializedError):
        context.session.check_open()


@pytest.mark.parametrize("way", [Context.close, lambda context: context.release("init")])
def test_a_rank_that_ends_between_groups_leaves_the_next_one(way: Callable[[Context], None]) -> None:
    groups = _Groups()
    context = _between(groups)
    groups.next_is_there.set()
    way(context)
    assert len(groups.opened) == 2
    with pytest.raises(NotInitializedError):
        groups.opened[1].check_open()
    assert (context.is_open, context.is_between) == (False, False)


def test_it_is_ready_once_its_thread_has_the_session() -> None:
    groups = _Groups()
    first = NextSession(lambda: groups.open(Settings()))
    first.wait()
    assert first.is_ready
    assert first.take() is groups.opened[0]
    second = NextSession(lambda: groups.open(Settings()))
    assert not second.is_ready
    groups.next_is_there.set()
    assert second.take() is groups.opened[1]
    assert second.is_ready
    for session in groups.opened:
        session.close()
