"""The scheduler's connections that have shown no valid token yet: found among the descriptors of the process, as gRPC
tells of none, and ended by the limits that hold for every listener (unauthenticated.py).

Owned by the scheduler's thread.
"""

from __future__ import annotations

import contextlib
import os
import time
import urllib.parse
from collections.abc import Callable

from byteps_py.unauthenticated import MOST, UnauthenticatedConnections, duplicate

_DESCRIPTORS = "/proc/self/fd"
#: Between two looks, and while many connect.
_LOOK_S, _HURRIED_S = 0.05, 0.005
_MANY = MOST // 4


class SchedulerConnections:
    """``port``: where the scheduler listens. What ``admit`` has not named in time is cut off."""

    def __init__(self, port: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._waiting = UnauthenticatedConnections(clock)
        self._waiting.port = port
        self._port = port
        self._known: dict[int, tuple[str, str]] = {}  # by descriptor: which file it is, its peer; "": no connection
        self._admitted: set[str] = set()

    def __len__(self) -> int:
        """Connections that wait to be admitted."""
        return len(self._waiting)

    @property
    def cut_off(self) -> int:
        return self._waiting.cut_off

    def admit(self, peer: str) -> None:
        """``peer``, as gRPC names it, has shown a valid token."""
        self._admitted.add(_plain(peer))

    def look(self) -> float:
        """Find new connections, forget those that have ended, and cut off what is over a limit. Returns in how many
        seconds to look again."""
        found: dict[int, tuple[str, str]] = {}
        for name in os.listdir(_DESCRIPTORS):
            fd = int(name)
            with contextlib.suppress(OSError):  # closed meanwhile
                file = os.readlink(f"{_DESCRIPTORS}/{name}")
                if file.startswith("socket:"):
                    known = self._known.get(fd)
                    found[fd] = known if known is not None and known[0] == file else self._new(fd, file)
        for fd in self._known.keys() - found.keys():
            self._waiting.known(fd)
        self._known = found
        peers = {peer for _, peer in found.values()}
        for fd, (_, peer) in found.items():
            if peer in self._admitted:
                self._waiting.known(fd)
        self._admitted &= peers
        self._waiting.sweep()
        return _HURRIED_S if len(self._waiting) > _MANY else _LOOK_S

    def _new(self, fd: int, file: str) -> tuple[str, str]:
        self._waiting.known(fd)
        try:
            with duplicate(fd, self._port) as end:
                host, port = end.getpeername()[:2]
        except OSError:
            return file, ""  # it listens, or is none of the scheduler's
        self._waiting.came(fd)
        return file, f"{str(host).removeprefix('::ffff:')}:{port}"


def _plain(peer: str) -> str:
    """
    >>> _plain("ipv4:127.0.0.1:5000"), _plain("ipv6:%5B::1%5D:5000")
    ('127.0.0.1:5000', '::1:5000')
    """
    host, _, port = urllib.parse.unquote(peer.partition(":")[2]).rpartition(":")
    return f"{host.strip('[]').removeprefix('::ffff:')}:{port}"
