"""The scheduler's connections that have shown no valid token yet. gRPC tells of none, so they are found among the
descriptors of the process, and end by the limits that hold for every listener (unauthenticated_connections.py).

``handshake_begins`` may be called by any thread, the others are for the scheduler's.
"""

from __future__ import annotations

import os
import stat
import threading
import time
import urllib.parse
from collections.abc import Callable

from byteps_py.unauthenticated_connections import MOST, UnauthenticatedConnections, duplicate

_DESCRIPTORS = "/proc/self/fd"
#: Between two looks, and while many connect.
_LOOK_S, _HURRIED_S = 0.05, 0.005
_MANY = MOST // 4
#: Of those that have gone without a token, so many are remembered until ``take_refused``.
_MOST_REFUSED = 100


class SchedulerConnections:
    """``port``: where the scheduler listens. What ``admit`` has not named in time is cut off."""

    def __init__(self, port: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._looked_s = clock()
        self._waiting = UnauthenticatedConnections(clock)
        self._waiting.port = port
        self._port = port
        self._known: dict[int, tuple[int, str]] = {}  # by descriptor: its socket's inode, its peer; "": no connection
        self._admitted: set[str] = set()
        self._explained: set[str] = set()
        self._refused: list[str] = []

    def handshake_begins(self) -> None:
        """Of TLS: it may fail so soon that only now there is anything to see of the connection."""
        with self._lock:
            if len(self._waiting) <= _MANY or self._clock() - self._looked_s >= _HURRIED_S:
                self._look()

    def admit(self, peer: str) -> None:
        """``peer``, as gRPC names it, has shown a valid token."""
        with self._lock:
            self._admitted.add(address_of(peer))

    def explained(self, peer: str) -> None:
        """``peer`` was told why it is refused, and the log says so: ``take_refused`` does not."""
        with self._lock:
            self._explained.add(address_of(peer))

    def look(self) -> float:
        """Find new connections, forget those that have ended, and cut off what is over a limit. Returns in how many
        seconds to look again."""
        with self._lock:
            self._look()
            return _HURRIED_S if len(self._waiting) > _MANY else _LOOK_S

    def take_refused(self) -> list[str]:
        """Peers whose connection ended, or was cut off, without a valid token since the last call."""
        with self._lock:
            refused, self._refused = self._refused, []
        return refused

    def _look(self) -> None:
        found: dict[int, tuple[int, str]] = {}
        for name in os.listdir(_DESCRIPTORS):
            fd = int(name)
            try:
                status = os.fstat(fd)
            except OSError:  # closed meanwhile
                continue
            if stat.S_ISSOCK(status.st_mode):
                known = self._known.get(fd)
                is_known = known is not None and known[0] == status.st_ino
                found[fd] = known if known is not None and is_known else self._new(fd, status.st_ino)
        gone = [peer for fd, (inode, peer) in self._known.items() if peer and found.get(fd, (0,))[0] != inode]
        silent = [peer for peer in gone if peer not in self._admitted | self._explained]
        self._refused += silent[: _MOST_REFUSED - len(self._refused)]
        for fd in self._known.keys() - found.keys():
            self._waiting.known(fd)
        self._known = found
        for fd, (_, peer) in found.items():
            if peer in self._admitted:
                self._waiting.known(fd)
        here = {peer for _, peer in found.values()}
        self._admitted &= here
        self._explained &= here
        self._waiting.sweep()
        self._looked_s = self._clock()

    def _new(self, fd: int, inode: int) -> tuple[int, str]:
        self._waiting.known(fd)
        try:
            with duplicate(fd, self._port) as end:
                host, port, *_ = end.getpeername()
        except OSError:
            return inode, ""  # it listens, or is none of the scheduler's
        self._waiting.came(fd)
        host = host.removeprefix("::ffff:")
        return inode, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of(peer: str) -> str:
    """
    >>> address_of("ipv4:10.0.0.1:4242"), address_of("ipv6:%5Bfd00::1%5D:4242")
    ('10.0.0.1:4242', '[fd00::1]:4242')
    """
    return urllib.parse.unquote(peer).partition(":")[2]
