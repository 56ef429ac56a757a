"""One TCP connection of the link between two ranks: its socket, its seals, and what waits to be sent over it.

A link has several where one does not fill it (dataplane/long_links.py). Owned by PeerConnection, which calls ``seal``,
``send`` and ``finish`` with its lock held, and ``read`` on the thread that receives.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import select
import socket
import struct
import termios
from collections import deque

from byteps_py.dataplane.link_usage import TcpCounters, tcp_counters
from byteps_py.dataplane.seal import Data
from byteps_py.dataplane.stream_seal import FrameHeader, StreamFrameKind
from byteps_py.session.peers.frame_reader import FrameReader, FrameSink
from byteps_py.session.peers.peer_connector import NewConnection
from byteps_py.session.peers.resumable_stream import ResumableStream

_MOST_VIEWS = 64  # of one system call
#: Smaller frames are sent in one piece.
_JOINED_BYTES = 64 << 10
#: Fewer (a handshake, reports) show no rate.
_LEAST_BYTES = 64 << 10
_TCP_CLOSE = 7  # of linux/tcp_states.h
_IN, _IN_AND_OUT = select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT


class LinkSocket:
    """``stream``, ``sink``: of the link of which ``new`` is a connection."""

    def __init__(self, new: NewConnection, stream: ResumableStream, sink: FrameSink) -> None:
        self.sock = new.sock
        #: It goes through a third machine.
        self.is_relayed = new.is_relayed
        #: No further frames are sent over it.
        self.is_resting = False
        self._counted = TcpCounters(0, 0.0, 0.0)
        #: Bytes per second while anything was on its way, lately. A new way through a third machine is tried first.
        self.rate = math.inf if new.is_relayed else 0.0
        self._sealing = new.seals[0]
        self.reader = FrameReader(new.seals[1], stream, sink)
        self._out: deque[tuple[Data, int]] = deque()  # sealed, with how many frames have left once it has
        #: Nothing can be sent any more; bytes that the other end has sent still arrive.
        self.is_cut = False
        #: The other end has said that nothing follows on it.
        self.has_ended = False
        self._is_watched_for_room = False

    @property
    def has_waiting(self) -> bool:
        """True if sealed bytes wait until the system has room for them."""
        return bool(self._out)

    @property
    def first_waiting(self) -> int | None:
        """The number of the first frame that the system has not taken whole; None if there is none."""
        return next((frames - 1 for _, frames in self._out if frames), None)

    def seal(self, header: FrameHeader, body: Data) -> None:
        """A frame to be sent over this connection, after those before."""
        parts = self._sealing.seal(header, body)
        frames = header.number + 1 if header.kind == StreamFrameKind.DATA else 0
        if header.nbytes < _JOINED_BYTES:
            self._out.append((b"".join(parts), frames))
        else:
            self._out.extend(((parts[0], 0), (parts[1], 0), (parts[2], frames)))

    def send(self) -> tuple[int, bool]:
        """Send some of what waits, without waiting. Returns the number of bytes that the system has taken, and whether
        it took all that it was offered."""
        out = self._out
        views = [view for view, _ in itertools.islice(out, _MOST_VIEWS)]
        left = taken = self._try(views)
        while out and len(out[0][0]) <= left:
            left -= len(out.popleft()[0])
        if left:
            view, frames = out[0]
            out[0] = memoryview(view)[left:], frames
        return taken, taken == sum(map(len, views))

    def _try(self, views: list[Data]) -> int:
        try:
            return self.sock.sendmsg(views) if len(views) > 1 else self.sock.send(views[0])
        except BlockingIOError:
            return 0
        except OSError:  # the receiving thread finds out
            self.is_cut = True
            self._out.clear()
            return 0

    def watch_for_room(self, poller: select.epoll, is_needed: bool) -> None:
        """Let ``poller`` report when the system has room, or not any more."""
        if is_needed != self._is_watched_for_room:
            self._is_watched_for_room = is_needed
            poller.modify(self.sock, _IN_AND_OUT if is_needed else _IN)

    @property
    def undelivered_bytes(self) -> int:
        """Bytes that the peer's system has not acknowledged, and may yet: none once it has reset the connection. A
        process that has ended does so, over a long link often before it has acknowledged the last bytes."""
        with contextlib.suppress(OSError):  # it is of another kind, or closed
            if self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
                return 0
        answer = fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4))
        return int(struct.unpack("i", answer)[0])

    def usage(self) -> TcpCounters | None:
        """The bytes sent over it since the last call; None if the system does not say."""
        now = tcp_counters(self.sock.fileno())
        if now is None:
            return None
        before, self._counted = self._counted, now
        acked, busy_s = now.acked - before.acked, now.busy_s - before.busy_s
        if acked >= _LEAST_BYTES and busy_s > 0:
            self.rate = acked / busy_s
        return TcpCounters(acked, busy_s, now.unread_s - before.unread_s)

    def hang_up(self, poller: select.epoll) -> None:
        """Close the socket."""
        self.is_cut = True
        self._out.clear()
        with contextlib.suppress(OSError, ValueError):  # it is closed
            poller.unregister(self.sock)
        self.sock.close()
