"""Measures the way to a summation service: sends to it what it sends back, both directions at once.

Runs on the loop's thread before the cluster is complete, when nothing else is under way. The bytes in flight grow
with every answer for a while, as TCP's own window does; then what comes back is counted. Over a long link (see
long_links.py) that while lasts as long as each period of some round trips brings much more than the one before. There
messages are small at first: of a few Mbit/s, a single large one takes all the time that there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import zmq

from byteps_py.config.settings import Settings
from byteps_py.dataplane.dialer import Dialer, DialTarget, Owner
from byteps_py.dataplane.long_links import LONG_S, round_trip_of
from byteps_py.errors import ProtocolError
from byteps_py.runtime import Runtime
from byteps_py.system import machine
from byteps_py.system.network_interfaces import Rail
from byteps_py.wire.data_link import Header, Kind

_CHUNK_BYTES = 64 << 10
_FIRST_IN_FLIGHT = 4
_MOST_IN_FLIGHT = 64
#: Over a long link: of the first messages. As long as so many are in flight, the next ones are twice as large.
_SMALL_CHUNK_BYTES, _MANY_IN_FLIGHT = 4 << 10, 32
#: The same: what is in flight is at most so many times what a period has brought. More would only wait.
_OVER_PERIOD = 4
_WARM_UP_S = 0.05
#: Over a long link: what fills one of 10 Gbit/s with a round trip of 50 ms; periods of so many round trips; a link is
#: full once so many in a row have not brought so many times the most so far; and the time that all periods may take.
_MOST_OVER_LONG_LINKS = 1024
_ROUND_TRIPS, _LEVEL_PERIODS, _GROWTH, _MOST_WARM_UP_S = 2, 2, 1.2, 2.5
_MEASURE_S = 0.2
#: A slow link has few answers in that time; but these should be enough to tell.
_FEWEST_CHUNKS = 12
_LIMIT_S = 4.5
_MBIT = 8e-6


class _Rail(Owner):
    """One connection, over one network card (railed_link.py)."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self.in_flight = 0  # messages
        self.dialer: Dialer

    def send(self, chunk: bytes, sender: int) -> None:
        self.dialer.send(Header(Kind.PROBE, sender, length=len(chunk)), chunk)
        self.in_flight += 1

    def on_addresses(self, addresses: Sequence[str]) -> None:
        self._probe.add_rails(addresses)

    def on_open(self) -> None:
        self._probe.opened(self)

    def on_message(self, header: Header, payload: zmq.Frame) -> None:
        if header.kind is Kind.PROBE:
            self.in_flight -= 1
            self._probe.returned(len(payload))
        else:  # it refuses; the job's own messages will say why
            self._probe.close()

    def on_broken(self) -> None:
        self._probe.close()

    def on_damaged(self, number: int | None) -> None:
        self._probe.close()

    def on_refused(self, error: ProtocolError) -> None:
        self._probe.close()


class Probe:
    """``on_result(mbit)`` is called once: goodput each way; 0 if the service did not answer in time."""

    round_trip_of = staticmethod(round_trip_of)

    def __init__(
        self, runtime: Runtime, settings: Settings, sender: int, address: str, on_result: Callable[[float], None]
    ) -> None:
        loop = self._loop = runtime.loop
        self._on_result = on_result
        self._sender = sender
        self._chunk = bytes(_CHUNK_BYTES)
        self._in_flight = 0  # messages
        self._in_flight_bytes = 0
        self._most_in_flight_bytes = _MOST_IN_FLIGHT * _CHUNK_BYTES
        self._period_s = _WARM_UP_S
        self._is_long = False
        self._opened_s = 0.0
        self._first_answer_s = 0.0
        self._period_began_s = 0.0
        self._returned_in_period = self._most_returned = self._level_periods = 0  # bytes, of both
        self._returned_bytes = 0  # in all
        self._counting_since_s = 0.0  # when the first answer that does not count arrived
        self._counted = self._counted_bytes = 0
        self._rate_mbit = 0.0
        self._is_sending = True
        self._is_closed = False
        self._context = runtime.zmq_context()
        self._address, self._cards = address, machine.network_cards(settings)
        self._rails: list[_Rail] = []

        def new_rail(place: Rail) -> _Rail:
            rail = _Rail(self)
            there = DialTarget(place.there, f"the service at {place.there}", rail=place.number, source=place.own)
            rail.dialer = runtime.dialer(self._context, loop, there, sender, settings, rail)
            return rail

        self._new_rail = new_rail
        self._rails.append(new_rail(self._cards.rails_to([address])[0]))
        loop.call_later(_LIMIT_S, self._expire)

    def add_rails(self, addresses: Sequence[str]) -> None:
        """The service can be reached at these as well."""
        for place in self._cards.rails_to((self._address, *addresses))[len(self._rails) :]:
            self._rails.append(self._new_rail(place))

    def _send(self, count: int) -> None:
        for _ in range(count):
            rails = [rail for rail in self._rails if rail.dialer.is_open]
            if self._in_flight_bytes >= self._most_in_flight_bytes or not rails:
                return
            min(rails, key=lambda rail: rail.in_flight).send(self._chunk, self._sender)
            self._in_flight += 1
            self._in_flight_bytes += len(self._chunk)

    def opened(self, rail: _Rail) -> None:
        """A connection is open. The first one begins; the others join."""
        if rail is not self._rails[0]:
            return
        self.add_rails(())
        self._opened_s = self._loop.time()
        round_trip_s = self.round_trip_of(rail.dialer.descriptor)
        if round_trip_s > LONG_S:
            self._is_long, self._chunk = True, bytes(_SMALL_CHUNK_BYTES)
            self._most_in_flight_bytes = _MOST_OVER_LONG_LINKS * _CHUNK_BYTES
            self._period_s = max(_WARM_UP_S, _ROUND_TRIPS * round_trip_s)
        self._send(_FIRST_IN_FLIGHT)

    def returned(self, nbytes: int) -> None:
        """A message has come back."""
        now_s = self._loop.time()
        self._in_flight -= 1
        self._in_flight_bytes -= nbytes
        self._returned_bytes += nbytes
        if not self._first_answer_s:
            self._first_answer_s = self._period_began_s = now_s
        if not self._is_sending:
            if not self._in_flight:  # the way is free again for the next turn
                self.close()
            return
        if not self._counting_since_s and self._is_warming_up(now_s, nbytes):
            if self._in_flight >= _MANY_IN_FLIGHT and len(self._chunk) < _CHUNK_BYTES:
                self._chunk = bytes(2 * len(self._chunk))
            self._send(2)
            return
        if not self._counting_since_s:
            self._counting_since_s = now_s
        else:
            self._counted += 1
            self._counted_bytes += nbytes
            took_s = now_s - self._counting_since_s
            if took_s >= max(_MEASURE_S, self._period_s if self._is_long else 0.0) and self._counted >= _FEWEST_CHUNKS:
                self._rate_mbit = self._counted_bytes * _MBIT / took_s
                self._is_sending = False
                return
        self._send(1)

    def _is_warming_up(self, now_s: float, nbytes: int) -> bool:
        """An answer has come. TCP's window still grows."""
        self._returned_in_period += nbytes
        if now_s - self._period_began_s < self._period_s:
            return True
        if not self._is_long or now_s - self._first_answer_s >= _MOST_WARM_UP_S:
            return False
        self._level_periods += 1
        if self._returned_in_period >= _GROWTH * self._most_returned:
            self._most_returned, self._level_periods = self._returned_in_period, 0
            self._most_in_flight_bytes = min(_MOST_OVER_LONG_LINKS * _CHUNK_BYTES, _OVER_PERIOD * self._most_returned)
        self._returned_in_period, self._period_began_s = 0, now_s
        return self._level_periods < _LEVEL_PERIODS

    def _expire(self) -> None:
        """The answers so far show a rate all the same: where packets are lost, the last answers may take long, and
        over a slow link the first ones."""
        if not self._is_closed and not self._rate_mbit:
            now_s = self._loop.time()
            if self._counted:
                self._rate_mbit = self._counted_bytes * _MBIT / (now_s - self._counting_since_s)
            elif self._returned_bytes:
                self._rate_mbit = self._returned_bytes * _MBIT / (now_s - self._opened_s)
        self.close()

    def close(self) -> None:
        """Give up what is in flight, if anything, and report."""
        if self._is_closed:
            return
        self._is_closed = True
        for rail in self._rails:
            rail.dialer.close()
        self._context.term()
        self._on_result(self._rate_mbit)
