"""Connections that have not proven that they are a member's: how many there may be, for how long, and how much they may
send. The limits of every listener of the product stand here.

Owned by its listener's thread. ZeroMQ and gRPC can't be told to end a connection. So one that does not prove itself in
time is cut off beneath them, and one that sends more than a proof takes: an incomplete message is memory that they
hold.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

#: A member needs milliseconds, or seconds on a machine that is busy with starting up.
PATIENCE_S = 4.0
#: So often they are looked at, while there are any.
WATCH_S = 0.05
#: Of a proof and all that goes with it: a few hundred bytes, twice.
MOST_BYTES = 1 << 16
_BYTES_RECEIVED = struct.Struct("@Q")
_BYTES_RECEIVED_AT = 128  # in Linux's struct tcp_info
#: Of more than this many at once the oldest is cut off, or, where all are younger than ``GRACE_S``, the one that came
#: last: a member on a busy machine must have the time that its handshake takes.
MOST = 256
GRACE_S = 0.5


@dataclass(frozen=True, slots=True)
class _Connection:
    since_s: float
    inode: int  # which connection it is: its descriptor may be another file's by now


class UnauthenticatedConnections:
    """``port``: of the listener; nothing else's connections are ever touched."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.port = 0
        self._clock = clock
        self._call_later: Callable[[float, Callable[[], None]], None] | None = None
        self._is_watching = False  # a timer runs
        self._waiting: dict[int, _Connection] = {}  # by descriptor, the oldest first
        # Where few descriptors are allowed, most of them must be left for members.
        self._most = min(MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
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
            self._waiting[fd] = _Connection(self._clock(), self._inode(fd))
        if len(self._waiting) > self._most:
            oldest, connection = next(iter(self._waiting.items()))
            self._cut_off(oldest if self._clock() - connection.since_s >= GRACE_S else fd)
        self._look_later()

    def expel(self, fd: int) -> None:
        """Cut off who was known, but not before what it has been told had WATCH_S to leave."""
        self.known(fd)
        with contextlib.suppress(OSError):  # gone already
            self._waiting[fd] = _Connection(self._clock() - PATIENCE_S + WATCH_S, self._inode(fd))
        self._look_later()

    def known(self, fd: int) -> None:
        """It has proven who it is, or is gone."""
        self._waiting.pop(fd, None)

    def sweep(self) -> None:
        """Cut off who is late, or has said too much."""
        late_s = self._clock() - PATIENCE_S
        for fd, connection in list(self._waiting.items()):
            if connection.since_s <= late_s or self._received(fd, connection) > MOST_BYTES:
                self._cut_off(fd)

    def _cut_off(self, fd: int) -> None:
        connection = self._waiting.pop(fd)
        with contextlib.suppress(OSError), self._opened(fd, connection) as end:  # the other end was faster
            end.shutdown(socket.SHUT_RDWR)
            self.cut_off += 1

    def _received(self, fd: int, connection: _Connection) -> int:
        """So many bytes."""
        with contextlib.suppress(OSError, struct.error), self._opened(fd, connection) as end:
            facts = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            return int(_BYTES_RECEIVED.unpack_from(facts, _BYTES_RECEIVED_AT)[0])
        return 0

    def _opened(self, fd: int, connection: _Connection) -> socket.socket:
        """Raises OSError if it has ended."""
        end = duplicate(fd, self.port)
        if os.fstat(end.fileno()).st_ino != connection.inode:
            end.close()
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return end

    def _inode(self, fd: int) -> int:
        with duplicate(fd, self.port) as end:
            return os.fstat(end.fileno()).st_ino


def duplicate(fd: int, port: int) -> socket.socket:
    """A descriptor of our own, as ``fd`` is a library's. Raises OSError if it is no connection to that port."""
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
