"""Connections to the scheduler that have yet to show that they are of its cluster, and who went without having done so.

gRPC tells nobody of a TLS handshake that fails, but it asks for the certificates as each begins. Then the connection is
among this process's descriptors, with the address of its other end. ``began`` may be called by any thread, the others
are for the scheduler's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import urllib.parse


class Callers:
    """``port``: where the scheduler listens. Addresses are written as gRPC does, without the family."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._known: set[str] = set()  # connected when the latest handshake began
        self._unproven: set[str] = set()

    def began(self) -> None:
        """A handshake is about to."""
        connected = connected_to(self._port)
        with self._lock:
            self._unproven |= connected - self._known
            self._known = connected

    def proven(self, peer: str) -> None:
        """It has shown what it had to; ``peer`` is gRPC's name for it."""
        with self._lock:
            self._unproven.discard(address_of(peer))

    def gone(self) -> list[str]:
        """Who has ended its connection, or was refused, without having shown it, since the last call."""
        if not self._unproven:
            return []
        with self._lock:
            gone = self._unproven - connected_to(self._port)
            self._unproven -= gone
        return sorted(gone)


def address_of(peer: str) -> str:
    """
    >>> address_of("ipv4:10.0.0.1:4242"), address_of("ipv6:%5Bfd00::1%5D:4242")
    ('10.0.0.1:4242', '[fd00::1]:4242')
    """
    return urllib.parse.unquote(peer).partition(":")[2]


def connected_to(port: int) -> set[str]:
    """The other ends of this process's connections to its own ``port``."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or no socket
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] == port:
                    host, other_port, *_ = copy.getpeername()
                    host = host.removeprefix("::ffff:")
                    found.add(f"[{host}]:{other_port}" if ":" in host else f"{host}:{other_port}")
    return found
