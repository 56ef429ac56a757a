"""The rank server of an elastic job, by itself: ranks of the first group that never come, and last words."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from byteps_py.errors import PeerLostError
from byteps_py.runtime import Runtime
from byteps_py.wire import rank_link as protocol
from byteps_py.worker.core.local_ranks import RankState
from byteps_py.worker.ranks.rank_server import RankServer


def ignore(*given: object) -> None: ...


class Welcoming(RankServer):
    """``welcome``: seats and local ranks of those that it has let in."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.welcome: list[tuple[int, int]] = []

    def _welcome(self, rank: Any) -> None:
        self.welcome.append((rank.seat, rank.local_rank))


class Alone:
    """The rank server of two ranks, none of which has come."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.deaths, self.returns = list[str](), list[tuple[str, bool]]()
        loop = SimpleNamespace(
            add_reader=ignore,
            change_reader=ignore,
            remove=ignore,
            call_later=lambda *given: self.timers.append(given),
            time=time.monotonic,
        )
        listener = SimpleNamespace(fileno=lambda: -1)
        self.rank_server = Welcoming(
            Runtime(loop=cast(Any, loop)),
            cast(Any, listener),
            2,
            self.deaths.append,
            lambda: None,
            self._wants_group,
            60.0,
        )

    def _wants_group(self, reason: str, planned: bool) -> None:
        self.returns.append((reason, planned))

    @property
    def ranks(self) -> Any:
        return self.rank_server.ranks

    def count(self, state: RankState) -> int:
        return len(self.ranks.in_state(state))

    def come(self, seat: int, synced_in: int) -> None:
        """A rank, which waits."""
        connection = SimpleNamespace(pid=os.getpid(), fd=-1, pidfd=-1, watch_process=ignore, close=ignore)
        self.rank_server._came(self.ranks[seat], cast(Any, connection), synced_in)

    def present(self, connection: Any) -> Any:
        """The first rank of the group, which has come on this connection."""
        rank = self.ranks[0]
        self.ranks.comes(rank, connection, False, 0)
        self.ranks.is_welcomed(rank)
        cast(Any, self.rank_server._open).executor.ranks[0] = connection
        return rank

    def open(self) -> None:
        """A group of which these are ranks 4 and 5."""
        me = SimpleNamespace(host="node7")
        topology = SimpleNamespace(local_size=2, first_rank=4, me=me, is_continued=False, is_under_way=False, group=7)
        self.rank_server.open(cast(Any, SimpleNamespace(topology=topology, executor=SimpleNamespace(ranks={}))))


def test_ranks_that_never_come_are_given_up() -> None:
    """They may have died before anybody knew of them."""
    one = Alone()
    one.open()
    ((patience_s, give_up),) = one.timers
    assert patience_s == 60.0
    assert not one.ranks.is_whole
    give_up()
    assert one.deaths == ["ranks 4-5 of node7 did not come within 60 s (BYTEPS_START_TIMEOUT_S)"]
    assert one.ranks.is_whole
    give_up()
    assert len(one.deaths) == 1


def test_nobody_waits_for_ranks_of_a_machine_that_was_told_to_leave() -> None:
    one = Alone()
    one.open()
    one.rank_server.dismiss()
    assert one.returns == [("a machine was told to leave before all of its ranks had come", False)]
    one.timers[0][1]()
    assert one.deaths == []


def test_what_a_rank_said_before_it_hung_up_counts_though_a_word_to_it_finds_that_out() -> None:
    one = Alone()
    one.open()
    said = [protocol.Leave(return_reason="HostsUpdatedInterrupt", planned=True)]
    ends: list[str] = []

    def send(message: object) -> None:
        raise PeerLostError("it has hung up")

    connection = SimpleNamespace(
        local_rank=0, pid=7, fd=-1, pidfd=-1, send=send, hang_up=lambda: ends.append("hung up"),
        receive=lambda: said.pop() if said else None, forget=lambda: ends.append("forgotten"),
    )  # fmt: skip
    rank = one.present(connection)
    here = cast(Any, one.rank_server._open)
    here.describe, here.forget = lambda local_rank, pid: f"rank {local_rank}", lambda local_rank: None
    one.rank_server.tell_hosts(added=True, removed=False)
    assert one.deaths == []
    assert one.returns == [("rank 0 goes back to its last commit after HostsUpdatedInterrupt", True)]
    assert ends == ["hung up"]
    assert rank.state is RankState.RETURNING


def test_who_has_the_latest_state_comes_first() -> None:
    """Local rank 0 came late, when the other one had formed a group: all take the state of rank 0."""
    one = Alone()
    one.ranks.has_had_group = True
    one.come(0, synced_in=0)
    one.come(1, synced_in=7)
    assert [rank.synced_in for rank in one.ranks.waiting] == [0, 7]
    one.open()
    assert one.rank_server.welcome == [(1, 0), (0, 1)]


def test_ranks_with_the_same_state_are_in_the_launchers_order() -> None:
    one = Alone()
    one.ranks.has_had_group = True
    for seat in (1, 0):
        one.come(seat, synced_in=7)
    one.open()
    assert one.rank_server.welcome == [(0, 0), (1, 1)]


@pytest.mark.parametrize(("said", "shut_down"), [(protocol.Leave(), 1), (protocol.Leave(error="ValueError: x"), 0)])
def test_who_shuts_down_as_the_group_ends_may_come_back(said: protocol.Leave, shut_down: int) -> None:
    """It has not heard that the group can't go on, and it may be that all ranks shut down, to initialize again."""
    one = Alone()
    one.open()
    words = [said]
    ends: list[str] = []
    connection = SimpleNamespace(
        local_rank=0, pid=7, fd=-1, pidfd=-1, send=ignore, hang_up=lambda: ends.append("hung up"),
        receive=lambda: words.pop() if words else None, forget=ignore, close=lambda: ends.append("closed"),
    )  # fmt: skip
    rank = one.present(connection)
    one.rank_server.dissolve(PeerLostError("rank 5 goes back"))
    assert rank.state is RankState.RETURNING
    one.rank_server._hear_returning(rank, cast(Any, connection))
    assert rank.state is (RankState.LEFT if shut_down else RankState.ABSENT)
    assert one.count(RankState.LEFT) == shut_down
    assert ends == ["hung up" if shut_down else "closed"]
    if shut_down:
        one.rank_server._is_gone(rank, cast(Any, connection))
        assert one.count(RankState.LEFT) == 0
