"""Reads the frames of one connection between two ranks. The body of a large frame goes from the socket straight to its
destination, if that is known, and is checked there. One thread at a time.
"""

from __future__ import annotations

import socket
from typing import NamedTuple, Protocol

from byteps_py.dataplane.stream_seal import FRAME_BYTES, HEADER_BYTES, FrameHeader, StreamFrameKind, StreamSeal
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
        self._buffer = memoryview(bytearray(HEADER_BYTES + FRAME_BYTES + _MOST_TAG_BYTES + _AHEAD_BYTES))
        self._first = self._last = 0  # in the buffer: the bytes that have arrived and were not processed
        self._placing: _Placing | None = None
        self._due = HEADER_BYTES  # bytes of the frame at ``_first``, as far as is known
        #: The last read took all that there was.
        self.is_drained = False

    def read(self, sock: socket.socket) -> int:
        """Receive with one system call. Returns the number of bytes received; 0: the connection has ended. Raises
        OSError, BlockingIOError among them, and ProtocolError, DamagedFrameError among them."""
        placing = self._placing
        if placing is not None:
            rest = placing.view[placing.got :]
            end = self._last + self._opening.tag_bytes + HEADER_BYTES
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
        self._due = HEADER_BYTES
        if here < HEADER_BYTES:
            return False
        header = opening.header_of(self._buffer, first)
        self._stream.check(header)
        body = first + HEADER_BYTES
        due = HEADER_BYTES + header.nbytes + opening.tag_bytes
        if here < due:
            is_placed = opening.is_readable and header.nbytes and self._stream.is_next(header)
            place = self._sink.place() if is_placed else None
            if place is None or len(place) < header.nbytes:
                self._due = due
                return False
            part = min(here - HEADER_BYTES, header.nbytes)
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
