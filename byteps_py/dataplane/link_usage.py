"""How fast the links to other machines carry data, from what the kernel counts for each connection.

The kernel counts, of each TCP connection, the bytes that have been acknowledged and the time in which data was on its
way (TCP_INFO of Linux 4.10 and later). Bytes over that time is the rate that the connection has got, however long its
program was idle in between: a process that computes slowly makes no link look slow. Elsewhere, and of connections
inside one machine, nothing is known. Any thread; a descriptor that is closed meanwhile is no error.
"""

from __future__ import annotations

import heapq
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import zmq

from byteps_py.dataplane.long_links import borrowed

if TYPE_CHECKING:
    from byteps_py.proto import control_pb2 as pb

#: Offsets in the kernel's structure: bytes acknowledged; times busy, and limited by the receiver's window, in µs.
_ACKED, _BUSY, _INFO_BYTES = 120, 168, 184
_US = 1e-6
#: Of so many peers a report tells: more are no better evidence.
_MOST_PEERS = 32
_EVERY_S = 0.4  # reports, at most


class TcpCounters(NamedTuple):
    """Of one connection since it began: bytes that the other end has acknowledged; the seconds in which any were on
    their way; the seconds of these in which the other end's program did not read."""

    acked: int
    busy_s: float
    unread_s: float


_NOTHING = TcpCounters(0, 0.0, 0.0)


def descriptor_of(frame: zmq.Frame) -> int:
    """The descriptor of the connection on which ``frame`` arrived; -1 if that was no socket."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def tcp_counters(descriptor: int) -> TcpCounters | None:
    """The counters of a socket that another library owns. None if it is not a TCP connection to another machine."""
    if descriptor < 0 or sys.platform != "linux":
        return None
    with borrowed(descriptor) as connection:
        try:
            if connection is None:
                return None
            here, there = connection.getsockname(), connection.getpeername()
            if not isinstance(there, tuple) or here[0] == there[0]:
                return None
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:
            return None
    if len(info) < _INFO_BYTES:
        return None
    busy_us, unread_us = struct.unpack_from("<QQ", info, _BUSY)
    return TcpCounters(struct.unpack_from("<Q", info, _ACKED)[0], busy_us * _US, unread_us * _US)


def counters_of_reads(counters: Mapping[int, TcpCounters]) -> Callable[[int], TcpCounters | None]:
    """A function that returns ``counters`` of a descriptor, those of the bytes that others have read by RDMA, if its
    connection leads to another machine. The messages on the connection itself are too small to show a rate."""
    return lambda descriptor: counters.get(descriptor) if tcp_counters(descriptor) is not None else None


class UsageMeter:
    """Counts the bytes sent to each peer between two reports."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reported_s = clock()
        self._before: dict[int, dict[int, TcpCounters]] = {}  # by peer and descriptor

    def report(
        self, connections: Iterable[tuple[int, int]], counters: Callable[[int], TcpCounters | None] | None = None
    ) -> list[pb.LinkUsage]:
        """``connections``: (peer, descriptor of a connection to it). Several to one peer, over several network cards,
        are busy at the same time. Peers to which nothing was sent are left out, and if there are very many those that
        were sent least. Empty if the last report was just now. ``counters``: of a descriptor; by default those of the
        system."""
        from byteps_py.proto import control_pb2 as pb  # ranks count as well, and need no messages of the scheduler

        now_s = self._clock()
        if now_s - self._reported_s < _EVERY_S:
            return []
        self._reported_s = now_s
        before, self._before, found = self._before, {}, dict[int, pb.LinkUsage]()
        for peer, descriptor in connections:
            now = (counters or tcp_counters)(descriptor)
            if now is None:
                continue
            # Bytes that a peer got before the first look at it are not recent; those of a new connection are.
            then = before[peer].get(descriptor, _NOTHING) if peer in before else now
            if now.acked < then.acked:
                then = _NOTHING
            self._before.setdefault(peer, {})[descriptor] = now
            if now.acked > then.acked:
                usage = found.setdefault(peer, pb.LinkUsage(peer=peer))
                usage.bytes += now.acked - then.acked
                usage.busy_s = max(usage.busy_s, now.busy_s - then.busy_s)
                usage.unread_s = max(usage.unread_s, now.unread_s - then.unread_s)
        return heapq.nlargest(_MOST_PEERS, found.values(), key=lambda usage: usage.bytes)
