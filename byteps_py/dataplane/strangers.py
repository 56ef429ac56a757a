"""Connections to a listener that have not proven who they are: how many, for how long, and how they end.

Owned by the loop thread. ZeroMQ says nothing of a connection but its descriptor, and can't be told to end one. So who
does not prove itself in time is cut off beneath it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

#: An honest one needs milliseconds, or seconds on a machine that is busy with starting up.
PATIENCE_S = 4.0
SWEEP_S = 0.5
#: More than this many at once are cut off, the oldest first.
MOST = 256


@dataclass(frozen=True, slots=True)
class _Connection:
    since_s: float
    peer: object  # its address


class Strangers:
    """``port``: of the listener; nothing else's connections are ever touched."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.port = 0
        self._clock = clock
        self._waiting: dict[int, _Connection] = {}  # by descriptor, the oldest first
        self.cut_off = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def came(self, fd: int) -> None:
        self._waiting.pop(fd, None)
        with contextlib.suppress(OSError):  # gone already
            end = _borrow(fd)
            with end:
                self._waiting[fd] = _Connection(self._clock(), end.getpeername())
        if len(self._waiting) > MOST:
            self._cut_off(next(iter(self._waiting)))

    def known(self, fd: int) -> None:
        """It has proven who it is, or is gone."""
        self._waiting.pop(fd, None)

    def sweep(self) -> None:
        """Call every SWEEP_S."""
        late_s = self._clock() - PATIENCE_S
        for fd, connection in list(self._waiting.items()):
            if connection.since_s > late_s:
                break
            self._cut_off(fd)

    def cut(self, fd: int) -> None:
        """End a connection that does not deserve better."""
        if fd in self._waiting:
            self._cut_off(fd)

    def _cut_off(self, fd: int) -> None:
        connection = self._waiting.pop(fd)
        # The number may be another's by now. A duplicate stays what it is while it is looked at.
        with contextlib.suppress(OSError):
            end = _borrow(fd)
            with end:
                if end.getsockname()[1] == self.port and end.getpeername() == connection.peer:
                    self.cut_off += 1
                    end.shutdown(socket.SHUT_RDWR)


def _borrow(fd: int) -> socket.socket:
    """A duplicate. Raises OSError if there is none, or it is no socket."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
