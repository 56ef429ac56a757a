"""One TCP connection of the link between two ranks: its socket, its seals, what waits to be sent over it, and the
frames that come.

A link has several where one does not fill it (dataplane/long_links.py). Owned by PeerConnection, which calls ``seal``,
``send`` and ``finish`` with its lock held, and ``read`` on the thread that receives. The body of a large frame goes
from the socket straight to its destination, if that is known, and is checked there.
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
from typing import NamedTuple, Protocol

from byteps_py.dataplane.link_usage import TcpCounters, tcp_counters
from byteps_py.dataplane.seal import FRAME_BYTES, FRAME_HEADER_BYTES, Data, FrameHeader, StreamFrameKind, StreamSeal
from byteps_py.session.peers.peer_connector import NewConnection
from byteps_py.session.peers.resumable_stream import ResumableStream

#: The most bytes that are read before the headers in them are known: bodies that come with them have to be copied.
_AHEAD_BYTES = 16 << 10
_MOST_TAG_BYTES = 16


class FrameSink(Protocol):
    """Processes the frames of one connection."""

    def on_frame(self, header: FrameHeader, early: bytes) -> None:
        """The frame of ``header`` has arrived undamaged. One of the calls below follows, unless frames before it, on
        other connections of the link, have yet to arrive: then ``early`` is its body. Raises ProtocolError."""

    def feed(self, body: memoryview) -> None:
        """The next bytes of the stream."""

    def feed_kept(self) -> None:
        """``feed`` the frames that came before it was their turn, as far as it is now."""

    def place(self) -> memoryview | None:
        """The memory to which the next bytes of the stream go; None: they go to ``feed``."""

    def placed(self, nbytes: int) -> None:
        """``nbytes`` more bytes of the stream are in ``place``, as they were sent."""

    def on_control_frame(self, kind: StreamFrameKind, number: int, reader: FrameReader) -> None:
        """A frame without a body has arrived by ``reader``. ``number``: of the sender's next frame."""


class _Placing(NamedTuple):
    """A frame whose body goes to ``view``, where its first bytes are."""

    header: FrameHeader
    packed: bytes
    view: memoryview
    got: int


class FrameReader:
    """``stream``: of which the frames are. ``opening``: of this connection."""

    def __init__(self, opening: StreamSeal, stream: ResumableStream, sink: FrameSink) -> None:
        self._opening, self._stream, self._sink = opening, stream, sink
        self._buffer = memoryview(bytearray(FRAME_HEADER_BYTES + FRAME_BYTES + _MOST_TAG_BYTES + _AHEAD_BYTES))
        self._first = self._last = 0  # in the buffer: the bytes that have arrived and were not processed
        self._placing: _Placing | None = None
        self._due = FRAME_HEADER_BYTES  # bytes of the frame at ``_first``, as far as is known
        #: The last read took all that there was.
        self.is_drained = False

    def read(self, sock: socket.socket) -> int:
        """Receive with one system call. Returns the number of bytes received; 0: the connection has ended. Raises
        OSError, BlockingIOError among them, and ProtocolError, DamagedFrameError among them."""
        placing = self._placing
        if placing is not None:
            rest = placing.view[placing.got :]
            end = self._last + self._opening.tag_bytes + FRAME_HEADER_BYTES
            nbytes = sock.recvmsg_into((rest, self._buffer[self._last : end]))[0]
            self.is_drained = nbytes < len(rest)
            part = min(nbytes, len(rest))
            self._placing = placing._replace(got=placing.got + part)
            self._last += nbytes - part
        else:
            room = self._buffer[self._last : max(self._last + _AHEAD_BYTES, self._first + self._due)]
            nbytes = sock.recv_into(room)
            self._last += nbytes
            self.is_drained = nbytes < len(room)
        if nbytes:
            self._process()
        return nbytes

    def _process(self) -> None:
        while self._placing is None or self._placing.got == len(self._placing.view):
            if not (self._finish_placed() if self._placing is not None else self._next()):
                break
        if self._first:
            rest = self._last - self._first
            if rest:
                self._buffer[:rest] = bytes(self._buffer[self._first : self._last])
            self._first, self._last = 0, rest

    def _next(self) -> bool:
        """Process the next frame. False if not all of it is here."""
        opening, first, here = self._opening, self._first, self._last - self._first
        self._due = FRAME_HEADER_BYTES
        if here < FRAME_HEADER_BYTES:
            return False
        header = opening.header_of(self._buffer, first)
        self._stream.check(header)
        body = first + FRAME_HEADER_BYTES
        due = FRAME_HEADER_BYTES + header.nbytes + opening.tag_bytes
        if here < due:
            is_placed = opening.is_readable and header.nbytes and self._stream.is_next(header)
            place = self._sink.place() if is_placed else None
            if place is None or len(place) < header.nbytes:
                self._due = due
                return False
            part = min(here - FRAME_HEADER_BYTES, header.nbytes)
            place[:part] = self._buffer[body : body + part]
            packed = bytes(self._buffer[first:body])
            self._placing = _Placing(header, packed, place[: header.nbytes], part)
            self._first = body + part
            return True
        end, packed = body + header.nbytes, bytes(self._buffer[first:body])
        opened = opening.open(packed, self._buffer[body:end], bytes(self._buffer[end : first + due]))
        self._first = first + due
        is_next = self._stream.is_next(header)
        self._sink.on_frame(header, b"" if is_next else bytes(opened))
        if header.kind != StreamFrameKind.DATA:
            self._sink.on_control_frame(StreamFrameKind(header.kind), header.number, self)
        elif is_next:
            self._sink.feed(memoryview(opened))
            self._sink.feed_kept()
        return True

    def _finish_placed(self) -> bool:
        placing, end = self._placing, self._first + self._opening.tag_bytes
        if placing is None or self._last < end:
            return False
        self._opening.open(placing.packed, placing.view, bytes(self._buffer[self._first : end]))
        self._first, self._placing = end, None
        self._sink.on_frame(placing.header, b"")
        self._sink.placed(placing.header.nbytes)
        self._sink.feed_kept()
        return True

    def move(self, place: memoryview) -> None:
        """Place the rest of the current payload, and move the first bytes, to ``place``."""
        placing = self._placing
        if placing is not None:
            place[: placing.got] = placing.view[: placing.got]
            self._placing = placing._replace(view=place[: placing.header.nbytes])


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
