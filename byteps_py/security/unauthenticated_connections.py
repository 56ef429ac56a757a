"""Limits on connections that have not authenticated: how many there may be, for how long, and how much they may send.

All listeners of this package use these limits. ZeroMQ and gRPC have no call that ends a connection. So this module
shuts down the socket beneath them when a connection does not authenticate in time, or sends more than authentication
needs, because they hold an incomplete message in memory. The listener's thread owns an object; it is not thread-safe.

``RefusalLog`` logs processes that are refused: one line for a host, a reason and a minute, with a count. A process with
a wrong secret tries again and again, and a stranger may connect a thousand times a second. Each may fill a disk with
lines that say nothing new.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from byteps_py.system.log import logger

#: Time to authenticate. A member needs milliseconds, or seconds on a machine whose processes are all starting.
PATIENCE_S = 4.0
#: Time between two checks, while there are such connections.
WATCH_S = 0.05
#: Bytes that such a connection may send. Authentication takes a few hundred bytes, twice.
MOST_BYTES = 1 << 16
_BYTES_RECEIVED = struct.Struct("@Q")
_BYTES_RECEIVED_AT = 128  # in Linux's struct tcp_info
#: If there are more than this many, the oldest is cut off; or the newest, if all are younger than ``GRACE_S``, so that
#: a member on a busy machine has time for its handshake.
MOST = 256
GRACE_S = 0.5


@dataclass(frozen=True, slots=True)
class _Connection:
    since_s: float
    inode: int  # identifies the connection: its descriptor may belong to another file by now


class UnauthenticatedConnections:
    """The connections of one listener that have not authenticated.

    ``port`` is the listener's port; connections to other ports are never touched. ``cut_off`` counts the connections
    that were cut off.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.port = 0
        self._clock = clock
        self._call_later: Callable[[float, Callable[[], None]], None] | None = None
        self._is_watching = False  # a timer runs
        self._waiting: dict[int, _Connection] = {}  # by descriptor, the oldest first
        self._admitted: dict[int, int] = {}  # inodes by descriptor
        # Where the limit of descriptors is low, most of them must be left for members.
        self._most = min(MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        self.cut_off = 0

    def watch(self, call_later: Callable[[float, Callable[[], None]], None]) -> None:
        """Check the connections every ``WATCH_S`` from now on. ``call_later(delay_s, callback)`` sets a timer."""
        self._call_later = call_later
        self._schedule_sweep()

    def _schedule_sweep(self) -> None:
        if self._waiting and not self._is_watching and self._call_later is not None:
            self._is_watching = True
            self._call_later(WATCH_S, self._sweep_again)

    def _sweep_again(self) -> None:
        self._is_watching = False
        self.sweep()
        self._schedule_sweep()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, fd: int) -> bool:
        """Record a new connection. False: it has ended already.

        A connection that was admitted stays so: libzmq lets a connection work before it reports that it was accepted.
        """
        self._waiting.pop(fd, None)
        try:
            inode = self._inode(fd)
        except OSError:
            return False
        if self._admitted.get(fd) == inode:
            return True
        self._waiting[fd] = _Connection(self._clock(), inode)
        if len(self._waiting) > self._most:
            oldest, connection = next(iter(self._waiting.items()))
            self._cut_off(oldest if self._clock() - connection.since_s >= GRACE_S else fd)
        self._schedule_sweep()
        return True

    def admit(self, fd: int) -> None:
        """A connection has authenticated, whether or not ``add`` has been told of it."""
        self.discard(fd)
        with contextlib.suppress(OSError):  # gone already
            self._admitted[fd] = self._inode(fd)

    def expel(self, fd: int) -> None:
        """Cut off a connection, also one that was authenticated. What was sent to it has ``WATCH_S`` to leave."""
        self.discard(fd)
        with contextlib.suppress(OSError):  # gone already
            self._waiting[fd] = _Connection(self._clock() - PATIENCE_S + WATCH_S, self._inode(fd))
        self._schedule_sweep()

    def discard(self, fd: int) -> None:
        """Forget a connection that has ended, or needs no limit any more."""
        self._waiting.pop(fd, None)
        self._admitted.pop(fd, None)

    def sweep(self) -> None:
        """Cut off connections that took too long or sent too much."""
        late_s = self._clock() - PATIENCE_S
        for fd, connection in list(self._waiting.items()):
            if connection.since_s <= late_s or self._received(fd, connection) > MOST_BYTES:
                self._cut_off(fd)

    def _cut_off(self, fd: int) -> None:
        connection = self._waiting.pop(fd)
        with contextlib.suppress(OSError), self._opened(fd, connection) as end:
            self.cut_off += 1  # before the other end can see it
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:  # the other end was faster
                self.cut_off -= 1

    def _received(self, fd: int, connection: _Connection) -> int:
        """The number of bytes that the peer has sent."""
        with contextlib.suppress(OSError, struct.error), self._opened(fd, connection) as end:
            facts = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            return int(_BYTES_RECEIVED.unpack_from(facts, _BYTES_RECEIVED_AT)[0])
        return 0

    def _opened(self, fd: int, connection: _Connection) -> socket.socket:
        """A duplicate of the connection's socket. Raises OSError if the connection has ended."""
        end = duplicate(fd, self.port)
        if os.fstat(end.fileno()).st_ino != connection.inode:
            end.close()
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return end

    def _inode(self, fd: int) -> int:
        with duplicate(fd, self.port) as end:
            return os.fstat(end.fileno()).st_ino


T = TypeVar("T")


class LocalStrangers(Generic[T]):
    """The connections of one local listener that have yet to identify themselves, within the same limits. Not
    thread-safe. ``call_later(delay_s, callback)`` sets a timer; ``cut_off`` ends a connection."""

    def __init__(self, call_later: Callable[[float, Callable[[], None]], object], cut_off: Callable[[T], None]) -> None:
        self._call_later = call_later
        self._cut_off = cut_off
        self._waiting: dict[T, None] = {}  # the oldest first

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._waiting))

    def add(self, connection: T) -> None:
        """Record a new connection. If there are too many, the oldest is cut off."""
        if len(self._waiting) >= MOST:
            self._expire(next(iter(self._waiting)))
        self._waiting[connection] = None
        self._call_later(PATIENCE_S, functools.partial(self._expire, connection))

    def discard(self, connection: T) -> None:
        """Forget a connection that has identified itself, or has ended."""
        self._waiting.pop(connection, None)

    def _expire(self, connection: T) -> None:
        if connection in self._waiting:
            del self._waiting[connection]
            self._cut_off(connection)


def duplicate(fd: int, port: int) -> socket.socket:
    """A socket with a duplicate of ``fd``, which a library owns. Raises OSError unless it is connected to ``port``."""
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


PERIOD_S = 60.0
#: Hosts and reasons that are told apart at a time; a stranger may have many addresses.
_MOST = 32
_OTHERS = "other hosts"


@dataclass(slots=True)
class _Period:
    since_s: float
    reason: str
    unlogged: int = 0


class RefusalLog:
    """The connections that one service has refused. ``call_later(delay_s, callback)``: sets a timer, while there are
    minutes to count; None: ``note`` counts those that are over."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        self._clock = clock
        self._call_later = call_later
        self._is_timed = False
        self._periods: dict[tuple[str, str], _Period] = {}  # by host, and reason without its numbers

    def note(self, whom: str, host: str, reason: str) -> None:
        """A connection of ``whom``, on ``host``, was refused. Reasons that differ only in their numbers, such as
        process ids, are alike."""
        self.tick()
        key = (host, re.sub(r"\d+", "", reason))
        if key not in self._periods and len(self._periods) >= _MOST:
            key = (_OTHERS, "")
        if (period := self._periods.get(key)) is not None:
            period.unlogged += 1
            return
        self._periods[key] = _Period(self._clock(), reason)
        logger.warning("turned away %s: %s", whom, reason)
        self._tick_later()

    def tick(self) -> None:
        """Log the counts of minutes that are over."""
        now_s = self._clock()
        for key, period in list(self._periods.items()):
            if now_s - period.since_s >= PERIOD_S:
                del self._periods[key]
                if period.unlogged:
                    text = "turned away %s %d more times in the last %.0f s: %s"
                    logger.warning(text, key[0], period.unlogged, now_s - period.since_s, period.reason)
                    self._periods[key] = _Period(now_s, period.reason)

    def _tick_later(self) -> None:
        if self._call_later is not None and self._periods and not self._is_timed:
            self._is_timed = True
            first_s = min(period.since_s for period in self._periods.values())
            self._call_later(max(0.0, first_s + PERIOD_S - self._clock()), self._timed)

    def _timed(self) -> None:
        self._is_timed = False
        self.tick()
        self._tick_later()
