"""Measures the way to a summation service: sends to it what it sends back, both directions at once.

Runs on the loop's thread before the cluster is complete, when nothing else is under way. The bytes in flight grow
with every answer for a while, as TCP's own window does; then what comes back is counted.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq

from byteps_py.config.settings import Settings
from byteps_py.dataplane.dialer import DialTarget, Owner
from byteps_py.errors import ProtocolError
from byteps_py.runtime import Runtime
from byteps_py.wire.data_link import Header, Kind

_CHUNK_BYTES = 64 << 10
_FIRST_IN_FLIGHT = 4
_MOST_IN_FLIGHT = 64
_WARM_UP_S = 0.05
_MEASURE_S = 0.2
#: A slow link has few answers in that time; but these should be enough to tell.
_FEWEST_CHUNKS = 12
_LIMIT_S = 4.0


class Probe(Owner):
    """``on_result(mbit)`` is called once: goodput each way; 0 if the service did not answer in time."""

    def __init__(
        self, runtime: Runtime, settings: Settings, sender: int, address: str, on_result: Callable[[float], None]
    ) -> None:
        loop = self._loop = runtime.loop
        self._on_result = on_result
        self._header = Header(Kind.PROBE, sender, length=_CHUNK_BYTES)
        self._chunk = bytes(_CHUNK_BYTES)
        self._in_flight = 0
        self._first_answer_s = 0.0
        self._counting_since_s = 0.0  # when the first answer that does not count arrived
        self._counted = 0
        self._rate_mbit = 0.0
        self._is_sending = True
        self._is_closed = False
        self._context = runtime.zmq_context()
        self._dialer = runtime.dialer(
            self._context, loop, DialTarget(address, f"the service at {address}"), sender, settings, self
        )
        loop.call_later(_LIMIT_S, self.close)

    def _send(self, count: int) -> None:
        for _ in range(count):
            self._dialer.send(self._header, self._chunk)
        self._in_flight += count

    def on_open(self) -> None:
        self._send(_FIRST_IN_FLIGHT)

    def on_message(self, header: Header, payload: zmq.Frame) -> None:
        if header.kind is Kind.PROBE:
            self._returned(self._loop.time())
        else:  # it refuses; the job's own messages will say why
            self.close()

    def on_broken(self) -> None:
        self.close()

    def on_damaged(self, number: int | None) -> None:
        self.close()

    def on_refused(self, error: ProtocolError) -> None:
        self.close()

    def _returned(self, now_s: float) -> None:
        self._in_flight -= 1
        self._first_answer_s = self._first_answer_s or now_s
        if not self._is_sending:
            if not self._in_flight:  # the way is free again for the next turn
                self.close()
            return
        if now_s - self._first_answer_s < _WARM_UP_S:
            self._send(min(2, _MOST_IN_FLIGHT - self._in_flight))
            return
        if not self._counting_since_s:
            self._counting_since_s = now_s
        else:
            self._counted += 1
            took_s = now_s - self._counting_since_s
            if took_s >= _MEASURE_S and self._counted >= _FEWEST_CHUNKS:
                self._rate_mbit = self._counted * _CHUNK_BYTES * 8 / took_s / 1e6
                self._is_sending = False
                return
        self._send(1)

    def close(self) -> None:
        """Give up what is in flight, if anything, and report."""
        if self._is_closed:
            return
        self._is_closed = True
        self._dialer.close()
        self._context.term()
        self._on_result(self._rate_mbit)
