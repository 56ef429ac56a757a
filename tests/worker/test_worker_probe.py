"""What a probe finds out about a link, in virtual time: a queue that carries so many bytes a second, and a delay."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from byteps_py.config.settings import Settings
from byteps_py.dataplane.dialer import DialTarget, Owner
from byteps_py.runtime import Runtime
from byteps_py.wire.data_link import Header, Kind
from byteps_py.worker.io.probe import Probe

LIMIT_S = 5.0
#: Connecting and authenticating take so many round trips, and a connection's first window so many bytes.
HANDSHAKE, FIRST_WINDOW = 4, 14_600


class VirtualLoop:
    lateness_s = 0.0

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (self.now_s + delay_s, next(self._order), call))

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while self._calls and not is_done():
            self.now_s, _, call = heapq.heappop(self._calls)
            call()


class EchoingLink:
    """A connection. Each way has a queue; a window that doubles with what comes back says how much is in it."""

    descriptor, is_open = 1, True

    def __init__(self, loop: VirtualLoop, owner: Owner, mbit: float, round_trip_s: float) -> None:
        self._loop, self._owner = loop, owner
        self._bytes_per_s, self._round_trip_s = mbit * 125_000, round_trip_s
        self._free_s = [0.0, 0.0]  # when each way has carried all that it was given
        self._unsent: list[int] = []
        self._window, self._outside = FIRST_WINDOW, 0
        self._is_closed = False
        loop.call_later(HANDSHAKE * round_trip_s, lambda: None if self._is_closed else owner.on_open())

    def send(self, header: Header, payload: bytes) -> int:
        self._unsent.append(len(payload))
        self._fill()
        return 0

    def _fill(self) -> None:
        while self._unsent and self._outside < self._window:
            nbytes = self._unsent.pop(0)
            self._outside += nbytes
            there_s = self._carry(0, self._loop.time(), nbytes)
            back_s = self._carry(1, there_s, nbytes)
            self._loop.call_later(back_s - self._loop.time(), lambda nbytes=nbytes: self._returned(nbytes))

    def _carry(self, way: int, at_s: float, nbytes: int) -> float:
        self._free_s[way] = max(self._free_s[way], at_s) + nbytes / self._bytes_per_s
        return self._free_s[way] + self._round_trip_s / 2

    def _returned(self, nbytes: int) -> None:
        if self._is_closed:
            return
        self._outside -= nbytes
        self._window += nbytes
        self._owner.on_message(Header(Kind.PROBE, 0), cast(Any, bytes(nbytes)))
        self._fill()

    def close(self) -> None:
        self._is_closed = True


def measured(mbit: float, round_trip_s: float) -> tuple[float, float]:
    """The rate that a probe of such a link tells, and when."""
    loop, found = VirtualLoop(), list[float]()

    class DistantProbe(Probe):
        round_trip_of = staticmethod(lambda _: round_trip_s)

    def dialer(_: object, loop: VirtualLoop, target: DialTarget, sender: int, settings: Settings, owner: Owner) -> Any:
        return EchoingLink(loop, owner, mbit, round_trip_s)

    context = SimpleNamespace(term=lambda: None)
    runtime = SimpleNamespace(loop=loop, dialer=dialer, zmq_context=lambda: context)
    DistantProbe(cast(Runtime, runtime), Settings(), 0, "tcp://there:1", found.append)
    loop.run_until(lambda: bool(found))
    return found[0], loop.now_s


@pytest.mark.parametrize("round_trip_s", [0.0002, 0.01, 0.1, 0.2])
@pytest.mark.parametrize("mbit", [0.5, 1.0, 2.0, 5.0, 20.0, 100.0, 1000.0])
def test_a_probe_tells_the_rate_in_time(mbit: float, round_trip_s: float) -> None:
    found_mbit, took_s = measured(mbit, round_trip_s)
    assert took_s <= LIMIT_S
    assert 0.45 * mbit <= found_mbit <= 1.05 * mbit


def test_a_link_that_carries_hardly_anything_is_not_taken_for_one_without_an_answer() -> None:
    """0 would stand for the rate of the others, and where all are so slow for that of loopback."""
    found_mbit, _ = measured(0.1, 0.2)
    assert 0 < found_mbit <= 0.105
