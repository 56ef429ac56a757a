"""A short burst of filler, to see what this machine's link carries while a job trains.

A machine whose link was slow has got less to send, and so shows no higher rate when its link is fast again. So the
scheduler asks it for a burst now and then (scheduler/rate_watch.py). It sends filler to summation services of other
machines, which send it back, and the interface's counters show all bytes that its link carries meanwhile, those of the
training as well.

    ├─ look ─ look ─ … ─┼──── does not count ────┼─────── counts ───────┤
                      └ the known rate in two looks: the burst ends here

A limiter that hands out tokens lets a link that was not full be faster for a while. The bytes that it has saved are
spent in the first part, which lasts until a link of the usual rate would have carried ``_BUCKET_BYTES`` more than one
of the known rate. So only the last part counts. It looks until its connections have got their part of the other
machines' links, which are full of gradients: the first looks show less than what the link carries.

Owned by the loop's thread. It ends after a few seconds at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import zmq

from byteps_py.config.settings import Settings
from byteps_py.dataplane.dialer import Dialer, DialTarget, Owner
from byteps_py.dataplane.link_rate import InterfaceCounters, open_interface_counters
from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.system import machine
from byteps_py.system.log import logger
from byteps_py.system.loop import EventLoop
from byteps_py.system.network_interfaces import Rail
from byteps_py.wire.data_link import READER, Header, Kind

#: Fewer connections get too small a part of links that others use as well.
_CONNECTIONS = 8
_LOOK_S, _FIRST_S, _LAST_S = 0.05, 0.1, 0.15
#: On low rates, connections need some seconds to get their part of links whose queues are full.
_MOST_LOOKS = 40
#: What counts is taken again while it is so many times the last one, unless it is near the usual rate.
_GROWTH, _NEAR, _MOST_COUNTS = 1.05, 0.9, 8
#: Of tokens, and how long it may take at most to spend them.
_BUCKET_BYTES, _MOST_FIRST_S = 256 << 10, 0.6
#: A look that shows so many times the known rate is worth a measurement. One that shows less than that, but more than
#: so many times, and the next one as well, are of a link that carries what is known.
_WORTH, _FULL = 1.15, 0.85
#: On their way, there and back, at the usual rate.
_IN_FLIGHT_S, _MOST_IN_FLIGHT = 0.12, 16 << 20
_LEAST_CHUNK, _MOST_CHUNK = 4 << 10, 64 << 10
_OPEN_S, _LIMIT_S = 1.0, 6.0
_MBIT = 8e-6


@dataclass(frozen=True, slots=True)
class BurstTarget:
    """Where to send, and what to expect. ``addresses``: of summation services of other machines; ``known_mbit``: what
    this machine's link is known to carry; ``usual_mbit``: what it may carry again."""

    addresses: tuple[str, ...]
    known_mbit: float
    usual_mbit: float

    @property
    def first_s(self) -> float:
        """For how long the burst does not count.

        >>> BurstTarget((), 200.0, 400.0).first_s, BurstTarget((), 10.0, 20.0).first_s
        (0.1, 0.2097152)
        """
        saved_s = _BUCKET_BYTES * _MBIT / max(self.usual_mbit - self.known_mbit, 1e-3)
        return min(_MOST_FIRST_S, max(_FIRST_S, saved_s))


Place = tuple[zmq.Context[zmq.Socket[bytes]], EventLoop, Settings]


class LinkBurst:
    """``on_result(mbit)`` is called once: what the link carried in the slower direction; 0 if no service answered.

    ``counters``: of the machine's interface, closed with the burst; without them, what came back counts.
    """

    def __init__(
        self,
        loop: EventLoop,
        settings: Settings,
        target: BurstTarget,
        counters: InterfaceCounters | None,
        on_result: Callable[[float], None],
    ) -> None:
        self._loop, self._target, self._counters, self._on_result = loop, target, counters, on_result
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._returned_bytes = 0
        self._mark: tuple[float, int, int] | None = None
        self._looks = self._full_looks = self._counts = 0
        self._counted_mbit = 0.0
        self._has_begun = self._is_closed = False
        count = max(_CONNECTIONS, len(target.addresses)) if target.addresses else 0
        in_flight = min(_MOST_IN_FLIGHT, target.usual_mbit / _MBIT * _IN_FLIGHT_S) / max(1, count)
        self._chunk = bytes(int(min(_MOST_CHUNK, max(_LEAST_CHUNK, in_flight / 4))))
        self._each = max(2, math.ceil(in_flight / len(self._chunk)))
        self._waiting = count  # connections that are not open yet
        self._connections = [
            _FillerConnection(self, (self._context, loop, settings), address, number)
            for number, address in enumerate(islice(cycle(target.addresses), count))
        ]
        self._loop.call_later(_OPEN_S if count else 0.0, self._begin)
        self._loop.call_later(_LIMIT_S, self.close)

    def opened(self) -> None:
        """One more connection is open."""
        self._waiting -= 1
        if not self._waiting:
            self._begin()

    def _begin(self) -> None:
        if self._has_begun or self._is_closed:
            return
        self._has_begun = True
        able = [each for each in self._connections if each.dialer.is_open]
        if not able:
            self.close()
        for each in able:
            for _ in range(self._each):
                each.send(self._chunk)

    def returned(self, connection: _FillerConnection, nbytes: int) -> None:
        """A service has sent some back."""
        if not self._has_begun or self._is_closed:
            return
        connection.send(self._chunk)
        self._returned_bytes += nbytes
        if self._mark is None:
            self._take()
            self._loop.call_later(_LOOK_S, self._look)

    def _take(self) -> tuple[float, float]:
        """The rates in both directions since the last call in Mbit/s, the slower one first."""
        try:
            counted = self._counters.read() if self._counters is not None else (self._returned_bytes,) * 2
        except OSError:  # the interface is gone
            counted = 0, 0
        before, self._mark = self._mark, (self._loop.time(), *counted)
        if before is None:
            return 0.0, 0.0
        took_s, *nbytes = (now - then for now, then in zip(self._mark, before, strict=True))
        slower, faster = (max(0.0, each) * _MBIT / took_s if took_s > 0 else 0.0 for each in sorted(nbytes))
        return slower, faster

    def _look(self) -> None:
        if self._is_closed:
            return
        slower, faster = self._take()
        self._looks += 1
        self._full_looks = self._full_looks + 1 if faster >= _FULL * self._target.known_mbit else 0
        if faster >= _WORTH * self._target.known_mbit:
            self._loop.call_later(self._target.first_s, self._count)
        elif self._full_looks == 2:
            self._end(faster)
        elif self._looks == _MOST_LOOKS:
            self._end(slower)
        else:
            self._loop.call_later(_LOOK_S, self._look)

    def _count(self) -> None:
        if not self._is_closed:
            self._take()
            self._loop.call_later(_LAST_S, self._counted)

    def _counted(self) -> None:
        if self._is_closed:
            return
        before, (mbit, _) = self._counted_mbit, self._take()
        self._counted_mbit, self._counts = max(mbit, before), self._counts + 1
        is_near = mbit >= _NEAR * self._target.usual_mbit
        if is_near or mbit < _GROWTH * before or self._counts == _MOST_COUNTS:
            self._end(self._counted_mbit)
        else:
            self._loop.call_later(_LAST_S, self._counted)

    def close(self) -> None:
        """End the burst at once, what is on its way as well. Its result is 0 if there was none."""
        if not self._is_closed:
            self._end(0.0)

    def _end(self, mbit: float) -> None:
        self._is_closed = True
        for each in self._connections:
            each.dialer.close()
        self._context.term()
        if self._counters is not None:
            self._counters.close()
        self._on_result(mbit)


class _FillerConnection(Owner):
    """To one service, which knows it as that of a reader: the job's own connections stay as they are. Of several
    ``number``s, each goes over another network card, where there are several."""

    def __init__(self, burst: LinkBurst, place: Place, address: str, number: int) -> None:
        self._burst, self._place, self._number = burst, place, number
        self._cards, self._addresses = machine.network_cards(place[-1]), [address]
        self._is_moved = False
        self.dialer = self._dial(self._cards.rails_to(self._addresses)[0])

    def _dial(self, rail: Rail) -> Dialer:
        context, loop, settings = self._place
        there = DialTarget(rail.there, f"the service at {rail.there}", rail=rail.number, source=rail.own)
        return Dialer(context, loop, there, READER, settings, self)

    def send(self, chunk: bytes) -> None:
        if self.dialer.is_open:
            self.dialer.send(Header(Kind.PROBE, READER, length=len(chunk)), chunk)

    def on_addresses(self, addresses: Sequence[str]) -> None:
        self._addresses += addresses

    def on_open(self) -> None:
        rails = self._cards.rails_to(self._addresses)
        rail = rails[self._number % len(rails)]
        if rail.number and not self._is_moved:
            self._is_moved = True
            self.dialer.close()
            self.dialer = self._dial(rail)
            return
        self._burst.opened()

    def on_message(self, header: Header, payload: zmq.Frame) -> None:
        if header.kind is Kind.PROBE:
            self._burst.returned(self, len(payload))

    def on_broken(self) -> None:
        self.dialer.close()

    def on_refused(self, error: ProtocolError) -> None:
        self.dialer.close()


class LinkBursts:
    """Those of one service, one at a time."""

    def __init__(self, loop: EventLoop, settings: Settings) -> None:
        self._loop, self._settings = loop, settings
        self._burst: LinkBurst | None = None

    def begin(self, probe: pb.Probe, send: Callable[[pb.MemberMessage], object]) -> None:
        """Do what the scheduler asks for; ``send`` tells it the result. An earlier burst ends: nobody waits for it."""
        self.close()

        def done(mbit: float) -> None:
            self._burst = None
            logger.info(
                "a probe shows that the link of this machine carries %.3g Mbit/s: %.3g are known, %.3g were usual",
                mbit,
                probe.known_mbit,
                probe.usual_mbit,
            )
            send(pb.MemberMessage(probed=pb.Probed(number=probe.number, mbit=mbit)))

        target = BurstTarget(tuple(probe.addresses), probe.known_mbit, probe.usual_mbit)
        counters = open_interface_counters(self._settings)
        self._burst = LinkBurst(self._loop, self._settings, target, counters, done)

    def close(self) -> None:
        """End the burst, if there is one."""
        if self._burst is not None:
            self._burst.close()
