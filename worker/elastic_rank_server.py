"""The rank server of an elastic job: ranks come, go back and come again, while one group follows another.

A process's local rank, as its launcher numbers it, is its *seat*; in a group the ranks that are there are numbered
without gaps, those first that have the latest state: all of a group take rank 0's. Owned by the loop's thread.

    HELLO ─► waiting ──group opens──► in the group ──it is dissolved, or the rank leaves it──► former ──HELLO──► waiting
                                                                                                └─process ends─► gone
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from byteps_py import rank_protocol as protocol
from byteps_py.channel import Channel, Listener
from byteps_py.errors import BytePSError, DismissedError, PeerLostError, ProtocolError
from byteps_py.rank_protocol import RankMessageKind
from byteps_py.runtime import Runtime
from byteps_py.wording import ranks_text
from byteps_py.worker.rank_server import RankServer, text_of
from byteps_py.worker.ranks import RankConnection
from byteps_py.worker.requests import Requests


@dataclass(slots=True, eq=False)
class _Waiter:
    """It has said HELLO, and nothing has been said to it."""

    channel: Channel
    seat: int
    pidfd: int
    is_back: bool  # it was in the last group, and has gone back to its last commit
    synced_in: int  # the epoch with which the latest group began that it has the state of; 0: none

    @property
    def order(self) -> tuple[int, int]:
        return -self.synced_in, self.seat


class ElasticRankServer(RankServer):
    """``on_return(reason, planned)``: ranks of the group want to be a group anew. ``patience_s``: after the first group
    has begun, this long it waits for all of its ranks."""

    waiter_class: type[_Waiter] = _Waiter

    def __init__(
        self,
        runtime: Runtime,
        listener: Listener,
        local_size: int,
        on_death: Callable[[str], None],
        on_change: Callable[[], None],
        on_return: Callable[[str, bool], None],
        patience_s: float,
    ) -> None:
        super().__init__(runtime, listener, local_size, on_death, on_change)
        self._on_return = on_return
        self._patience_s = patience_s
        self._waiters: dict[int, _Waiter] = {}  # by seat
        self._former: dict[int, RankConnection] = {}  # by seat: those that may come back
        self._seats: list[int] = []  # of the group's ranks, by local rank
        self._absent: set[int] = set()  # seats of the job's first group whose ranks have yet to come
        self._had_group = False
        self.is_dismissed = False  # this machine's ranks are to leave the job

    @property
    def waiting(self) -> int:
        """How many ranks wait for the next group."""
        return len(self._waiters)

    @property
    def has_newcomers(self) -> bool:
        """Of those that wait, not all were in the last group."""
        return not all(waiter.is_back for waiter in self._waiters.values())

    @property
    def synced_in(self) -> int:
        """The epoch with which the latest group began that one who waits has the state of; 0: none has any."""
        return max((waiter.synced_in for waiter in self._waiters.values()), default=0)

    @property
    def at_work(self) -> int:
        """How many ranks are in the present group."""
        return len(self._open.executor.ranks) if self._open else 0

    @property
    def may_return(self) -> int:
        """How many ranks of the last group are expected back."""
        return len(self._former)

    @property
    def shut_down(self) -> int:
        """How many ranks of the last group have shut down, and live: they may come back."""
        return len(self._may_return)

    @property
    def is_whole(self) -> bool:
        """All that are to come have come: of a machine that was in no group, all of its ranks."""
        return not (self._former or self._absent) and (self._had_group or len(self._waiters) == self._local_size)

    @property
    def ranks_here(self) -> int:
        return self.waiting + self.at_work + self.may_return

    # ---- groups ----------------------------------------------------------------------------------------

    def open(self, requests: Requests) -> None:
        """A group is complete: welcome whoever waits."""
        self._open = requests
        count = requests.topology.local_size
        is_first = not self._had_group and count == self._local_size
        self._had_group = True
        for rank in self._may_return.values():
            rank.forget()
        self._may_return.clear()
        self.left.clear()
        self.gone.clear()
        in_order = sorted(self._waiters.values(), key=lambda waiter: waiter.order)
        self._seats = list(range(count)) if is_first else [waiter.seat for waiter in in_order[:count]]
        self._absent = set(self._seats) - set(self._waiters)
        if self._absent:
            self._loop.call_later(self._patience_s, functools.partial(self._give_up, requests))
        waiters = [(i, self._waiters.pop(seat)) for i, seat in enumerate(self._seats) if seat in self._waiters]
        for local_rank, waiter in waiters:
            self._unwatch(waiter)
            self._welcome(waiter.channel, local_rank)
        for waiter in self._waiters.values():
            waiter.is_back = False  # of the last group it is none
        missing, host = count - len(self._seats), requests.topology.me.host
        if missing or (requests.topology.is_continued and not all(waiter.is_back for _, waiter in waiters)):
            self._on_death(f"{missing or 'some'} ranks of {host} ended as a group was formed")
        self._on_change()

    def _give_up(self, requests: Requests) -> None:
        """Its other ranks have begun, and some have yet to come: they may have died before anybody knew of them."""
        if self._open is not requests or not self._absent:
            return
        first_rank, host = requests.topology.first_rank, requests.topology.me.host
        who = ranks_text(first_rank + self._seats.index(seat) for seat in self._absent)
        self._absent.clear()
        self._on_death(f"{who} of {host} did not come within {self._patience_s:g} s (BYTEPS_START_TIMEOUT_S)")
        self._on_change()

    def dissolve(self, error: BytePSError) -> None:
        """The group can't go on: its ranks are told, and expected back."""
        here, self._open = self._open, None
        if here is None:
            return
        self._absent.clear()
        message = protocol.pack(RankMessageKind.FATAL, error=type(error).__name__, message=str(error))
        for local_rank, rank in here.executor.ranks.items():
            self._expect(self._seats[local_rank], rank)
            with contextlib.suppress(PeerLostError):  # what it said last is still to be read
                rank.send(message)

    def tell_hosts(self, added: bool, removed: bool) -> None:
        """Ranks wait to join, or are about to leave."""
        message = protocol.pack(RankMessageKind.HOSTS, added=added, removed=removed)
        for rank in list(self._open.executor.ranks.values()) if self._open else ():
            self._guard(rank, functools.partial(rank.send, message))

    def dismiss(self) -> None:
        """Whoever comes from now on is sent away, and who waits."""
        self.is_dismissed = True
        if self._absent:  # the others of the group would wait for them
            self._absent.clear()
            self._on_return("a machine was told to leave before all of its ranks had come", False)
        for waiter in list(self._waiters.values()):
            self._send_away(self._drop(waiter))
        self._on_change()

    def _send_away(self, channel: Channel) -> None:
        self._turn_away(channel, DismissedError("this machine was told to leave the job, which goes on without it"))

    def fail(self, error: BytePSError) -> None:
        super().fail(error)
        for waiter in list(self._waiters.values()):
            self._turn_away(self._drop(waiter), error)

    # ---- coming ----------------------------------------------------------------------------------------

    def _is_taken(self, seat: int) -> bool:
        if (rank := self._in_group(seat)) is not None:
            while self._serve(rank):  # it says that it goes before it comes again, on another connection
                pass
            if self._in_group(seat) is rank and self._runtime.has_ended(rank.pidfd):
                self._died(rank)  # and another process has taken its place
        return seat in self._waiters or self._in_group(seat) is not None

    def _in_group(self, seat: int) -> RankConnection | None:
        if self._open is None or seat not in self._seats:
            return None
        return self._open.executor.ranks.get(self._seats.index(seat))

    def _came(self, channel: Channel, seat: int, synced_in: int) -> None:
        if (former := self._former.pop(seat, None)) is not None:
            former.close()
        is_back = former is not None and former.pid == channel.peer_pid
        had_shut_down = self._has_returned(seat)
        if self.is_dismissed:
            self._send_away(channel)
        elif seat in self._absent:
            self._absent.discard(seat)
            self._welcome(channel, self._seats.index(seat))
            return
        else:
            self._let_wait(channel, seat, is_back, synced_in)
            if had_shut_down and self._open is not None:
                self._on_return("ranks have shut down, and come back", True)
        self._on_change()

    def _has_returned(self, seat: int) -> bool:
        """Whoever has this seat had shut down."""
        before = self._may_return.pop(self._seats.index(seat), None) if seat in self._seats else None
        if before is not None:
            before.forget()
        return before is not None

    def _let_wait(self, channel: Channel, seat: int, is_back: bool, synced_in: int) -> None:
        try:
            waiter = self.waiter_class(channel, seat, self._runtime.open_pidfd(channel.peer_pid), is_back, synced_in)
        except ProcessLookupError:
            channel.close()
            return
        self._waiters[seat] = waiter
        self._loop.add_reader(channel.fileno(), functools.partial(self._lost_patience, waiter))
        self._loop.add_reader(waiter.pidfd, functools.partial(self._lost_patience, waiter))

    def _lost_patience(self, waiter: _Waiter) -> None:
        """Its process has ended, or waits no longer: nothing else is to be heard of it before it is welcome."""
        self._drop(waiter).close()
        self._on_change()

    def _drop(self, waiter: _Waiter) -> Channel:
        del self._waiters[waiter.seat]
        self._unwatch(waiter)
        return waiter.channel

    def _unwatch(self, waiter: _Waiter) -> None:
        self._loop.remove(waiter.channel.fileno())
        self._loop.remove(waiter.pidfd)
        self._runtime.close_fd(waiter.pidfd)

    # ---- going -----------------------------------------------------------------------------------------

    def _leave(self, rank: RankConnection, here: Requests, fields: dict[str, Any]) -> None:
        if not (reason := text_of(fields.get("again", ""))):
            super()._leave(rank, here, fields)
            return
        who = here.describe(rank.local_rank, rank.pid)
        seat = self._seats[rank.local_rank]
        del here.executor.ranks[rank.local_rank]
        here.forget(rank.local_rank)
        self._expect(seat, rank)
        rank.hang_up()
        self._on_return(f"{who} goes back to its last commit after {reason}", bool(fields.get("planned")))
        self._on_change()

    def _expect(self, seat: int, rank: RankConnection) -> None:
        self._former[seat] = rank
        self._loop.change_reader(rank.fd, functools.partial(self._hear_former, seat, rank))
        self._loop.change_reader(rank.pidfd, functools.partial(self._former_ended, seat, rank))

    def _hear_former(self, seat: int, rank: RankConnection) -> None:
        """Of all that it may still say, only that it goes matters."""
        try:
            while self._former.get(seat) is rank and (message := rank.receive()) is not None:
                kind = protocol.kind_of(message)
                if kind is RankMessageKind.PING:
                    rank.send(protocol.pack(RankMessageKind.PONG))
                elif kind is RankMessageKind.LEAVE:
                    fields = protocol.fields_of(message)
                    if fields.get("again"):
                        rank.hang_up()  # it comes again, on another connection
                    elif fields.get("error"):
                        self._forget_former(seat, rank)
                    else:
                        self._former_shut_down(seat, rank)
                    return
        except PeerLostError:
            rank.hang_up()
        except ProtocolError:
            self._forget_former(seat, rank)

    def _former_shut_down(self, seat: int, rank: RankConnection) -> None:
        """As others may have done, before they heard that the group can't go on; it may initialize again."""
        del self._former[seat]
        rank.hang_up()
        self._may_return[rank.local_rank] = rank
        self._loop.change_reader(rank.pidfd, functools.partial(self._is_gone, rank))
        self._on_change()

    def _former_ended(self, seat: int, rank: RankConnection) -> None:
        self._forget_former(seat, rank)

    def _forget_former(self, seat: int, rank: RankConnection) -> None:
        if self._former.get(seat) is rank:
            del self._former[seat]
            rank.close()
            self._on_change()

    def close(self) -> None:
        super().close()
        for waiter in list(self._waiters.values()):
            self._drop(waiter).close()
        for rank in self._former.values():
            rank.close()
