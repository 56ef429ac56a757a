"""A TCP connection to a rank of another machine. It carries the messages of peer_protocol.py, each followed by its
payload.

Neither end blocks. The system takes what it has room for; the rest waits here, and is sent by the thread that waits for
messages (``send_waiting``). A large payload goes from the tensor's memory into the tensor's memory: a receiver that
knows where it belongs has the system write it there.

Any thread may send; one thread at a time receives.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import select
import socket
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from byteps_py.dataplane.stream_seal import FRAME_BYTES, LENGTH_BYTES, TAG_BYTES, StreamSeal
from byteps_py.errors import ProtocolError
from byteps_py.session.peers import peer_protocol
from byteps_py.session.peers.message_matcher import LANDING_BYTES, Span
from byteps_py.session.peers.peer_protocol import RECORD_BYTES, PeerMessage, PeerMessageKind

_BUFFER_BYTES = 16 << 10
#: The most bytes that one call moves, so that others get their turn.
_AT_ONCE_BYTES = 4 << 20
_MOST_VIEWS = 64  # of one system call
_FRAMES_BYTES = LENGTH_BYTES + FRAME_BYTES + TAG_BYTES + (64 << 10)
_FLUSH_LIMIT_S = 30.0
_DELIVERY_LIMIT_S = 2.0
_DELIVERY_POLL_S = 0.001
#: A thread that waits for messages sends what waits. Another one does so only if there is none after this time.
_GRACE_S = 0.002
_IDLE_S = 5.0
_POLL_MS = 250
_JOIN_LIMIT_S = 2.0
_INLINE = int(PeerMessageKind.INLINE)
_IN, _IN_AND_OUT = select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT


class Landing(Protocol):
    """Where a payload belongs that did not fit in the buffer."""

    @property
    def views(self) -> deque[memoryview]:
        """The parts of it that are still to be filled, the next one first."""

    @property
    def payload(self) -> object:
        """The payload, for ``divert``."""

    def divert(self) -> None:
        """The rest belongs elsewhere."""

    def complete(self) -> None:
        """All of it has come."""


class Receiver(Protocol):
    """Processes messages. Called by the thread that receives."""

    def came(self, message: PeerMessage, data: bytes | None) -> None:
        """A message with all of its payload. Raises ProtocolError."""

    def land(self, message: PeerMessage) -> Landing:
        """The payload of ``message`` follows. Raises ProtocolError."""


class PendingSend(NamedTuple):
    """Something that was sent, perhaps not all of it yet. ``mark``: bytes that the system has taken by then."""

    connection: PeerConnection
    mark: int

    @property
    def is_done(self) -> bool:
        """True if the memory that it was sent from is not needed any more."""
        return self.connection.taken >= self.mark


class PeerConnection:
    """``rank``: that of the peer. Owns ``sock``, over which both have authenticated each other."""

    def __init__(
        self,
        rank: int,
        sock: socket.socket,
        seals: tuple[StreamSeal | None, StreamSeal | None],
        receiver: Receiver,
        poller: select.epoll,
        background_sender: BackgroundSender,
    ) -> None:
        self.rank = rank
        self._sock = sock
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sealing, self._opening = seals
        self._frames = memoryview(bytearray(_FRAMES_BYTES if self._opening is not None else 0))
        self._frames_last = 0
        self._receiver = receiver
        self._poller = poller
        self._background_sender = background_sender
        self._lock = threading.Lock()  # for what is sent
        self._waiting: deque[tuple[memoryview, object]] = deque()  # with what keeps its memory
        self._given = 0  # bytes to be sent so far
        #: Bytes that the system has taken so far.
        self.taken = 0
        self._is_cut = False  # nothing can be sent any more; what was sent from there still comes
        #: Why the connection has ended; None while something may come.
        self.failure: str | None = None
        self.failed_at_s = 0.0
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._first = self._last = 0  # of the buffer: what has come and was not processed
        self._landing: Landing | None = None
        poller.register(sock, _IN)

    def fileno(self) -> int:
        """The socket's descriptor; -1 once it is closed."""
        return self._sock.fileno()

    # ---- sending ---------------------------------------------------------------------------------------

    @property
    def has_waiting(self) -> bool:
        """True if some bytes wait until the system has room for them."""
        return bool(self._waiting)

    def send(self, message: bytes, fd: int = -1) -> None:
        """Send, now or later; a message to a peer that has ended is dropped. ``fd``: descriptors can't be sent."""
        with self._lock:
            if self._sealing is None and not self._waiting and self._taken(message):
                return
            self._send([memoryview(message)], None)

    def send_payload(self, record: bytes, spans: Sequence[Span], owner: object) -> PendingSend:
        """Send ``record`` and the bytes at ``spans``, which ``owner`` keeps in memory until all are sent."""
        with self._lock:
            self._send([memoryview(record), *(_view(*span) for span in spans)], owner)
            return PendingSend(self, self._given)

    def _taken(self, message: bytes) -> bool:
        """The system has taken all of a small message, which is the usual case."""
        if self._is_cut:
            return True
        taken = self._try([message])
        self._given += taken
        if taken == len(message) or self._is_cut:
            return True
        if taken:
            self._enqueue([memoryview(message)[taken:]], None)
        return bool(taken)

    def _send(self, views: Sequence[memoryview], owner: object) -> None:
        if self._is_cut:
            return
        sealing = self._sealing
        sealed = views if sealing is None else [memoryview(part) for view in views for part in sealing.seal(view)]
        self._enqueue(sealed, owner)

    def _enqueue(self, views: Sequence[memoryview], owner: object) -> None:
        was_waiting = bool(self._waiting)
        self._given += sum(map(len, views))
        self._waiting.extend((view, owner) for view in views)
        if not was_waiting:
            self._send_first()
            if self._waiting:
                self._poller.modify(self._sock, _IN_AND_OUT)
                self._background_sender.add(self)

    def send_waiting(self) -> None:
        """Send what waits, as far as the system has room for it."""
        with self._lock:
            if self._waiting:
                self._send_first()
                if not self._waiting and self.failure is None:
                    self._poller.modify(self._sock, _IN)

    def _send_first(self) -> None:
        budget, waiting = _AT_ONCE_BYTES, self._waiting
        while waiting and budget > 0:
            views = [view for view, _ in itertools.islice(waiting, _MOST_VIEWS)]
            left = taken = self._try(views)
            budget -= taken
            while waiting and len(waiting[0][0]) <= left:
                left -= len(waiting.popleft()[0])
            if left:
                view, owner = waiting[0]
                waiting[0] = view[left:], owner
            if taken < sum(map(len, views)):
                return

    def _try(self, views: Sequence[bytes | memoryview]) -> int:
        """How many bytes the system has taken."""
        try:
            taken = self._sock.sendmsg(views) if len(views) > 1 else self._sock.send(views[0])
        except BlockingIOError:
            return 0
        except OSError:  # the peer has ended; whoever receives from it finds out
            self._cut()
            return 0
        self.taken += taken
        return taken

    def _cut(self) -> None:
        self._is_cut = True
        self._waiting.clear()
        self.taken = self._given

    # ---- receiving -------------------------------------------------------------------------------------

    def receive(self) -> bool:
        """Process what has arrived. False if the connection has ended. Does not block. Raises ProtocolError."""
        try:
            if self._opening is not None:
                return self._receive_frames(self._opening)
            if self._landing is not None:
                return self._fill(self._landing)
            nbytes = self._sock.recv_into(self._buffer[self._last :])
        except BlockingIOError:
            return True
        except OSError as error:
            return self._ended(str(error))
        if not nbytes:
            return self._ended("the other end has closed it")
        self._last += nbytes
        self._process()
        return True

    def _receive_frames(self, opening: StreamSeal) -> bool:
        frames = self._frames
        nbytes = self._sock.recv_into(frames[self._frames_last :])
        if not nbytes:
            return self._ended("the other end has closed it")
        self._frames_last += nbytes
        first = 0
        while (left := self._frames_last - first) >= LENGTH_BYTES:
            length = opening.length_of(frames[first:])
            if left < length:
                break
            self._feed(memoryview(opening.open(frames[first : first + length])))
            first += length
        if first:  # otherwise a frame that comes in many small pieces would be copied with each of them
            frames[: self._frames_last - first] = bytes(frames[first : self._frames_last])
            self._frames_last -= first
        return True

    def _feed(self, data: memoryview) -> None:
        """Process the next bytes of the stream."""
        while len(data):
            landing = self._landing
            if landing is not None:
                data = _fill_from(data, landing.views)
                if not landing.views:
                    self._landing = None
                    landing.complete()
                continue
            part = min(len(data), _BUFFER_BYTES - self._last)
            self._buffer[self._last : self._last + part] = data[:part]
            self._last += part
            data = data[part:]
            self._process()

    def _ended(self, why: str) -> bool:
        with self._lock:
            self._cut()
            self.failure, self.failed_at_s = why, time.monotonic()
            with contextlib.suppress(OSError, ValueError):  # it is closed
                self._poller.unregister(self._sock)
        return False

    def _fill(self, landing: Landing) -> bool:
        budget, views = _AT_ONCE_BYTES, landing.views
        while views and budget > 0:
            nbytes = self._sock.recv_into(views[0])
            if not nbytes:
                return self._ended("the other end has closed it")
            budget -= nbytes
            if nbytes < len(views[0]):
                views[0] = views[0][nbytes:]
            else:
                views.popleft()
        if not views:
            self._landing = None
            landing.complete()
        return True

    def _process(self) -> None:
        buffer = self._buffer
        while self._last - self._first >= RECORD_BYTES:
            payload_at = self._first + RECORD_BYTES
            message = peer_protocol.unpack_from(buffer, self._first)
            if message.source != self.rank:
                raise ProtocolError(f"rank {self.rank} sent a message in the name of rank {message.source}")
            nbytes = message.total if message.kind == _INLINE else 0
            here = self._last - payload_at
            if nbytes > LANDING_BYTES:
                landing = self._receiver.land(message)
                _fill_from(buffer[payload_at : min(self._last, payload_at + nbytes)], landing.views)
                if landing.views:
                    self._landing = landing
                    self._first = self._last = 0
                    return
                self._first = payload_at + nbytes
                landing.complete()
            elif nbytes <= here:
                data = bytes(buffer[payload_at : payload_at + nbytes]) if message.kind == _INLINE else None
                self._first = payload_at + nbytes
                self._receiver.came(message, data)
            else:
                break
        rest = self._last - self._first
        if self._first:
            if rest:
                buffer[:rest] = bytes(buffer[self._first : self._last])
            self._first, self._last = 0, rest

    def divert(self, payload: object) -> None:
        """If ``payload`` is on its way, receive the rest of it elsewhere. Called by the thread that receives, or in its
        stead."""
        if self._landing is not None and self._landing.payload is payload:
            self._landing.divert()

    # ---- the end ---------------------------------------------------------------------------------------

    def close(self, is_forked: bool = False) -> None:
        """Send what waits and let the peer's machine have it, within a time limit; then close the socket.
        ``is_forked``: in a forked child, only close it."""
        if not is_forked and not self._is_cut and self.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._deliver()
        self._sock.close()

    def _deliver(self) -> None:
        """A socket that is closed while something for it arrives drops what it has not delivered."""
        deadline = time.monotonic() + _FLUSH_LIMIT_S
        writable = select.poll()
        writable.register(self._sock, select.POLLOUT)
        while self._waiting and time.monotonic() < deadline:
            writable.poll(_POLL_MS)
            self.send_waiting()
        self._sock.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _DELIVERY_LIMIT_S
        while self._undelivered and time.monotonic() < deadline:
            time.sleep(_DELIVERY_POLL_S)

    @property
    def _undelivered(self) -> int:
        """Bytes that the peer's system has not acknowledged."""
        answer = fcntl.ioctl(self._sock, termios.TIOCOUTQ, bytes(4))
        return int(struct.unpack("i", answer)[0])


class BackgroundSender:
    """A thread that sends what waits while no thread waits for messages; it ends when nothing is left for a while.
    ``is_read``: whether a thread waits, which then sends. ``wake`` makes that thread look again."""

    def __init__(self, is_read: Callable[[], bool], wake: Callable[[], None]) -> None:
        self._is_read = is_read
        self._wake = wake
        self._changed = threading.Condition()
        self._connections: set[PeerConnection] = set()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, connection: PeerConnection) -> None:
        """Bytes of ``connection`` wait."""
        with self._changed:
            self._connections.add(connection)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="byteps-sender", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, is_forked: bool = False) -> None:
        """End the thread."""
        self._is_closed = True
        if not is_forked:
            with self._changed:
                self._changed.notify()
                thread = self._thread
            if thread is not None:
                thread.join(_JOIN_LIMIT_S)

    def _serve(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._connections or self._is_closed, _IDLE_S) or self._is_closed:
                    self._thread = None
                    return
                connections = list(self._connections)
            time.sleep(_GRACE_S)
            if self._is_read():
                continue
            writable = select.poll()
            for connection in connections:
                if connection.fileno() >= 0 and connection.has_waiting:
                    writable.register(connection, select.POLLOUT)
            writable.poll(_POLL_MS)
            for connection in connections:
                connection.send_waiting()
                with self._changed:
                    if not connection.has_waiting:
                        self._connections.discard(connection)
            self._wake()


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _fill_from(data: memoryview, views: deque[memoryview]) -> memoryview:
    """Copy ``data`` to ``views``, as far as there is room. Returns the rest."""
    while len(data) and views:
        part = min(len(data), len(views[0]))
        views[0][:part] = data[:part]
        data = data[part:]
        if part < len(views[0]):
            views[0] = views[0][part:]
        else:
            views.popleft()
    return data


def views_of(spans: Sequence[Span]) -> deque[memoryview]:
    """Writable views of ``spans``, without the empty ones."""
    return deque(_view(address, nbytes) for address, nbytes in spans if nbytes)
