"""Connections to a listener that have not proven who they are: how many, for how long, how much they may send, and how
they end.

Owned by the loop thread. ZeroMQ says nothing of a connection but its descriptor, and can't be told to end one. So who
does not prove itself in time is cut off beneath it, and who sends more than a proof takes: an incomplete message is
memory that ZeroMQ holds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

#: An honest one needs milliseconds, or seconds on a machine that is busy with starting up.
PATIENCE_S = 4.0
#: So often they are looked at, while there are any.
WATCH_S = 0.05
#: Of a proof and all that goes with it: a few hundred bytes, twice.
MOST_BYTES = 1 << 16
_BYTES_RECEIVED = struct.Struct("@Q")
_BYTES_RECEIVED_AT = 128  # in Linux's struct tcp_info
#: More than this many at once are cut off, the oldest first.
MOST = 256


@dataclass(frozen=True, slots=True)
class _Connection:
    since_s: float
    end: socket.socket  # a duplicate of our own: ZeroMQ's number may be another connection's by now


class Strangers:
    """``port``: of the listener; nothing else's connections are ever touched. ``close`` gives back what is held of
    those that are left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.port = 0
        self._clock = clock
        self._call_later: Callable[[float, Callable[[], None]], None] | None = None
        self._is_watching = False  # a timer runs
        self._waiting: dict[int, _Connection] = {}  # by descriptor, the oldest first
        self.cut_off = 0

    def watch(self, call_later: Callable[[float, Callable[[], None]], None]) -> None:
        """From now on look at them every WATCH_S."""
        self._call_later = call_later
        self._look_later()

    def _look_later(self) -> None:
        if self._waiting and not self._is_watching and self._call_later is not None:
            self._is_watching = True
            self._call_later(WATCH_S, self._look)

    def _look(self) -> None:
        self._is_watching = False
        self.sweep()
        self._look_later()

    def __len__(self) -> int:
        return len(self._waiting)

    def came(self, fd: int) -> None:
        self.known(fd)
        with contextlib.suppress(OSError):  # gone already
            self._waiting[fd] = _Connection(self._clock(), _duplicate(fd, self.port))
        if len(self._waiting) > MOST:
            self._cut_off(next(iter(self._waiting)))
        self._look_later()

    def expel(self, fd: int) -> None:
        """Cut off who was known, but not before what it has been told had WATCH_S to leave."""
        self.known(fd)
        with contextlib.suppress(OSError):  # gone already
            self._waiting[fd] = _Connection(self._clock() - PATIENCE_S + WATCH_S, _duplicate(fd, self.port))
        self._look_later()

    def known(self, fd: int) -> None:
        """It has proven who it is, or is gone."""
        if (connection := self._waiting.pop(fd, None)) is not None:
            connection.end.close()

    def sweep(self) -> None:
        """Cut off who is late, or has said too much."""
        late_s = self._clock() - PATIENCE_S
        for fd, connection in list(self._waiting.items()):
            if connection.since_s <= late_s or _received(connection.end) > MOST_BYTES:
                self._cut_off(fd)

    def cut(self, fd: int) -> None:
        """End a connection that does not deserve better."""
        if fd in self._waiting:
            self._cut_off(fd)

    def close(self) -> None:
        for fd in list(self._waiting):
            self.known(fd)

    def _cut_off(self, fd: int) -> None:
        connection = self._waiting.pop(fd)
        with connection.end, contextlib.suppress(OSError):  # the other end was faster
            connection.end.shutdown(socket.SHUT_RDWR)
            self.cut_off += 1


def _received(end: socket.socket) -> int:
    """So many bytes."""
    with contextlib.suppress(OSError, struct.error):
        facts = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return int(_BYTES_RECEIVED.unpack_from(facts, _BYTES_RECEIVED_AT)[0])
    return 0


def _duplicate(fd: int, port: int) -> socket.socket:
    """Raises OSError if it is no connection to that port: the number is something else's by now."""
    copy = os.dup(fd)
    try:
        end = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    if end.family not in (socket.AF_INET, socket.AF_INET6) or end.getsockname()[1] != port:
        end.close()
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    return end
