"""Connections whose round trip is long: how many a link takes, and what the system is told about each.

One TCP connection does not fill such a link. It has no more bytes on their way than its buffers hold (4 MB to send are
usual: 250 Mbit/s with a round trip of 100 ms), and after each lost packet Linux's usual algorithm needs many round
trips to be as fast as before: with one lost packet in a thousand it carries 4 Mbit/s. Several connections have several
buffers, and only one of them slows down. BBR, where the system has it and permits it, takes a loss for what it is.

Short links stay as they are: one connection fills them, and the usual algorithm shares them better. Any thread.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
from collections.abc import Iterator

from byteps_py.config.settings import Settings

#: Of ``Settings.congestion_control``.
SYSTEM = "system"
#: A connection with a longer round trip is long. Machines of one room are within 1 ms of each other.
LONG_S = 0.005
#: Of a long link, unless BYTEPS_CONNECTIONS_PER_LINK says otherwise. Measured (benchmarks/results/long_links.md): with
#: a round trip of 100 ms and losses, 8 fill 1 Gbit/s from the buffers that Linux gives, and 4 half of it.
LONG_LINK_CONNECTIONS = 8
#: One connection carries this much with a round trip of 100 ms, even if one packet in a thousand is lost: a slower link
#: needs no more. Further ones would push each other out of its queues.
_LEAST_CARRIED_MBIT = 4.0
#: A connection takes no further bytes while so many wait for their first way: another one may be faster.
_UNSENT_BYTES = 512 << 10
#: Offset of the shortest round trip in the kernel's structure, in µs.
_MIN_RTT, _INFO_BYTES = 148, 152
_UNKNOWN_US = 0xFFFFFFFF


def round_trip_s(sock: socket.socket) -> float:
    """The shortest round trip of a connection so far; 0: it is not known, or both ends are on this machine."""
    try:
        if sock.getsockname()[0] == sock.getpeername()[0]:
            return 0.0
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except (OSError, AttributeError):
        return 0.0
    if len(info) < _INFO_BYTES:
        return 0.0
    (shortest_us,) = struct.unpack_from("<I", info, _MIN_RTT)
    return 0.0 if shortest_us == _UNKNOWN_US else shortest_us / 1e6


def round_trip_of(descriptor: int) -> float:
    """``round_trip_s``, of a socket that another library owns; -1: there is none."""
    with borrowed(descriptor) as sock:
        return round_trip_s(sock) if sock is not None else 0.0


def connections_for(settings: Settings, rtt_s: float, mbit: float = 0.0) -> int:
    """How many connections a link takes whose round trip is ``rtt_s`` seconds. ``mbit``: its rate, if it is known.

    >>> [connections_for(Settings(), 0.1, mbit) for mbit in (2, 10, 1000, 0)]
    [1, 3, 8, 8]
    """
    if settings.connections_per_link or rtt_s <= LONG_S:
        return settings.connections_per_link or 1
    return min(LONG_LINK_CONNECTIONS, math.ceil(mbit / _LEAST_CARRIED_MBIT)) if mbit else LONG_LINK_CONNECTIONS


def tune(sock: socket.socket, settings: Settings) -> None:
    """Have a long connection use ``settings.congestion_control``. Short ones stay as they are, and so do all where the
    system does not have or permit it (``hindrance``)."""
    if settings.congestion_control != SYSTEM and round_trip_s(sock) > LONG_S:
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, settings.congestion_control.encode())


def hindrance(settings: Settings) -> str:
    """The feature of the system that this machine lacks for long links, and the remedy; empty if it lacks none."""
    name = settings.congestion_control
    if name == SYSTEM:
        return ""
    with socket.socket() as sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except PermissionError:
            return (
                f"this system does not permit {name}, which does not slow down at each lost packet: add it to "
                "net.ipv4.tcp_allowed_congestion_control with sysctl"
            )
        except (OSError, AttributeError):
            return f"this system has no {name}, which does not slow down at each lost packet: modprobe tcp_{name}"
    return ""


def tune_descriptor(descriptor: int, settings: Settings) -> None:
    """``tune``, of a socket that another library owns; -1: there is none."""
    with borrowed(descriptor) as sock:
        if sock is not None:
            tune(sock, settings)


def share_evenly(sock: socket.socket) -> None:
    """Of one of several connections of a link: let it take no more than it can send soon."""
    with contextlib.suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


@contextlib.contextmanager
def borrowed(descriptor: int) -> Iterator[socket.socket | None]:
    """The socket of a descriptor that another library owns, and may close meanwhile; None if there is none."""
    sock = None
    with contextlib.suppress(OSError):
        sock = socket.socket(fileno=descriptor) if descriptor >= 0 else None
    try:
        yield sock
    finally:
        if sock is not None:
            sock.detach()
