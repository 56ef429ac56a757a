"""The rates at which this machine's link carries data, in each direction, from the counters of its network interface.

How long transfers take (link_usage.py) does not tell a link that is slow in one direction from one that is slow in
both: if a machine sends slowly, its acknowledgements wait behind what it sends, and so what it receives takes long as
well. Bytes that come in are counted when they come in. A link carries at least what it has carried in any ten
milliseconds; half of its bytes went at the median rate or faster, which is close to what it can carry while it carries
anything.

Owned by the loop's thread, which counts for a fifth of a second, and rests for as long; longer while nothing moves.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from byteps_py.config.settings import Settings
from byteps_py.proto import control_pb2 as pb
from byteps_py.system import machine
from byteps_py.system.loop import EventLoop

_EVERY_S, _ROW, _REST_S, _IDLE_S = 0.01, 20, 0.2, 1.0
#: A sample that comes so late is of a busy machine: it shows a lower rate than the link's.
_LATE_S = 0.04
#: Fewer bytes between two reports are no evidence.
_LEAST_BYTES = 32 << 10

Sample = tuple[int, float]  # bytes, and bytes per second


class InterfaceCounters:
    """The bytes that network interfaces have sent and received, together. ``folders``: of their statistics. Raises
    OSError if the system does not count them."""

    def __init__(self, *folders: Path) -> None:
        self._files: list[int] = []
        try:
            for name in ("tx_bytes", "rx_bytes"):
                self._files += [os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC) for folder in folders]
        except OSError:
            self.close()
            raise

    def read(self) -> tuple[int, int]:
        """(sent, received)"""
        counts = [int(os.pread(file, 32, 0)) for file in self._files]
        half = len(counts) // 2
        return sum(counts[:half]), sum(counts[half:])

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


class LinkRateMeter:
    """Counts until it is closed. ``counters``: see InterfaceCounters; they are closed with it."""

    def __init__(self, counters: InterfaceCounters, loop: EventLoop) -> None:
        self._counters, self._loop = counters, loop
        self._before: tuple[float, int, int] | None = None
        self._left = _ROW
        self._row_bytes = 0  # counted when the present row of samples began
        self._samples: tuple[list[Sample], list[Sample]] = [], []
        self._is_closed = False
        loop.call_later(_REST_S, self._count)

    def _count(self) -> None:
        if self._is_closed:
            return
        try:
            now_s, (sent, received) = self._loop.time(), self._counters.read()
        except OSError:  # the interface is gone
            self.close()
            return
        if self._before is not None and 0 < (took_s := now_s - self._before[0]) <= _LATE_S:
            for samples, nbytes in zip(
                self._samples, (sent - self._before[1], received - self._before[2]), strict=True
            ):
                if nbytes > 0:
                    samples.append((nbytes, nbytes / took_s))
        if self._left == _ROW:
            self._row_bytes = sent + received
        self._before, self._left = (now_s, sent, received), self._left - 1
        if self._left:
            self._loop.call_later(_EVERY_S, self._count)
            return
        is_idle = sent + received - self._row_bytes < _LEAST_BYTES
        self._before, self._left = None, _ROW
        self._loop.call_later(_IDLE_S if is_idle else _REST_S, self._count)

    def report(self) -> pb.InterfaceRates:
        """Of both directions, since the last report in which they had enough bytes."""
        (sent_bytes, sent_s), (received_bytes, received_s) = map(_taken, self._samples)
        return pb.InterfaceRates(
            sent_bytes=sent_bytes, sent_s=sent_s, received_bytes=received_bytes, received_s=received_s
        )

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._counters.close()


def _taken(samples: list[Sample]) -> tuple[int, float]:
    """All bytes, and the seconds that they take at the median rate, if they are enough; they are forgotten then."""
    nbytes = sum(each for each, _ in samples)
    if nbytes < _LEAST_BYTES:
        return 0, 0.0
    took_s = nbytes / median_rate(samples)
    samples.clear()
    return nbytes, took_s


def median_rate(samples: Sequence[Sample]) -> float:
    """Half of all bytes went at this rate or a higher one.

    >>> median_rate([(10, 1.0), (30, 3.0), (25, 2.5)])
    2.5
    """
    left = sum(nbytes for nbytes, _ in samples) / 2
    for nbytes, rate in sorted(samples, key=lambda each: each[1]):
        left -= nbytes
        if left <= 0:
            return rate
    return 0.0


def open_interface_counters(settings: Settings) -> InterfaceCounters | None:
    """Those of the links whose addresses this machine offers. None: it has none, or the system does not count."""
    with contextlib.suppress(OSError):
        hosts = machine.rails(settings) or (machine.bindable_host(settings),)
        names = {name: None for host in hosts if (name := machine.interface_of(host))}
        return InterfaceCounters(*(Path("/sys/class/net", name, "statistics") for name in names)) if names else None
    return None


def open_link_rate_meter(settings: Settings, loop: EventLoop) -> LinkRateMeter | None:
    """With ``open_interface_counters``; None if there are none. The system does not count what travels by RDMA: the
    rest would show slow links where there are none."""
    if settings.rdma:
        return None
    counters = open_interface_counters(settings)
    return LinkRateMeter(counters, loop) if counters is not None else None
