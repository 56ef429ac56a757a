"""The link to a rank of another machine. It carries the messages of peer_protocol.py, each followed by its payload, in
frames over a TCP connection; and over the next one, if that breaks or a frame arrives damaged (resumable_stream.py).
Where one connection does not fill the link, there are several at a time (dataplane/long_links.py), or one more through
a third machine (dataplane/relay.py): each takes the next frame when it has room, the faster one of two ways first. If
one breaks, all are made again.

Neither end blocks. The system takes the bytes that it has room for; the rest waits here, and is sent by the thread that
waits for messages (``send_waiting``). A large payload goes from the tensor's memory into the tensor's memory: a
receiver that knows where it belongs has the system write it there.

Any thread may send; one thread at a time receives.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from byteps_py.config.addresses import joined
from byteps_py.dataplane.link_usage import TcpCounters
from byteps_py.dataplane.long_links import share_evenly
from byteps_py.dataplane.seal import FRAME_BYTES, DamagedFrameError, FrameHeader, StreamFrameKind
from byteps_py.dataplane.stream_listener import end_when_silent
from byteps_py.errors import CommunicationError, IntegrityError, PeerLostError, ProtocolError
from byteps_py.session.peers import peer_protocol
from byteps_py.session.peers.background_sender import BackgroundSender
from byteps_py.session.peers.link_socket import FrameReader, LinkSocket
from byteps_py.session.peers.message_matcher import LANDING_BYTES, Span
from byteps_py.session.peers.peer_connector import NewConnection
from byteps_py.session.peers.peer_protocol import RECORD_BYTES, PeerMessage, PeerMessageKind
from byteps_py.session.peers.resumable_stream import LinkDue, LinkWatch, ResumableStream
from byteps_py.system.log import logger

_BUFFER_BYTES = 16 << 10
#: The most bytes that one call moves, so that others get their turn.
_AT_ONCE_BYTES = 4 << 20
#: So much is sealed at once: it is still in the caches when the system copies it.
_SEALED_AT_ONCE_BYTES = 1 << 20
#: The sender of fewer bytes copies them, if it needs their memory before they are reported.
_COPIED_BYTES = 256 << 10
_DELIVERY_POLL_S = 0.001
_POLL_MS = 250
_INLINE = int(PeerMessageKind.INLINE)
_CLOSED = "the other end has closed it"


class Landing(Protocol):
    """The destination of a payload that did not fit in the buffer."""

    @property
    def views(self) -> deque[memoryview]:
        """The parts of it that are still to be filled, the next one first."""

    @property
    def payload(self) -> object:
        """The payload, for ``divert``."""

    def divert(self) -> None:
        """The rest belongs elsewhere."""

    def complete(self) -> None:
        """The whole payload is here."""


class Receiver(Protocol):
    """Processes messages. Called by the thread that receives."""

    def on_message(self, message: PeerMessage, data: bytes | None) -> None:
        """A message with all of its payload. Raises ProtocolError."""

    def land(self, message: PeerMessage) -> Landing:
        """The payload of ``message`` follows. Raises ProtocolError."""


class PendingSend(NamedTuple):
    """A payload that is being sent. ``mark``: the number of the link's frames up to its end."""

    connection: PeerConnection
    mark: int

    @property
    def is_done(self) -> bool:
        """True if its memory is not needed any more: all of it has arrived, or the few bytes that may not have arrived
        have been copied."""
        return self.is_little and self.connection.release(self.mark)

    @property
    def is_little(self) -> bool:
        """True unless so many bytes may not have arrived that waiting for a report costs less than copying them."""
        return self.connection.is_little(self.mark)

    @property
    def has_arrived(self) -> bool:
        """True if the other end has reported all of it."""
        return self.connection.has_arrived(self.mark)

    @property
    def has_left(self) -> bool:
        """True if the system has taken all of it."""
        return self.connection.has_left(self.mark)

    @property
    def reported(self) -> int:
        """Frames of the link that the other end has reported."""
        return self.connection.reported


class PeerConnection:
    """The link of rank ``me`` to rank ``rank``; ``resume`` gives it its first connection. A connection over which
    nothing comes for ``silence_s`` seconds is broken. ``on_broken``: the link needs another connection."""

    def __init__(
        self,
        me: int,
        rank: int,
        receiver: Receiver,
        poller: select.epoll,
        background_sender: BackgroundSender,
        silence_s: float,
        on_broken: Callable[[PeerConnection], None],
    ) -> None:
        self._me = me
        self.rank = rank
        self._receiver = receiver
        self._poller = poller
        self._background_sender = background_sender
        self._on_broken = on_broken
        self._watch = LinkWatch(silence_s, time.monotonic())
        self._lock = threading.Lock()  # for what is sent
        self._stream = ResumableStream()
        self._sockets: list[LinkSocket] = []  # the first one was made first; empty: there is no connection
        self._is_relayed = False  # the connection through a third machine is to be used
        self._set = 0  # the number of this set of connections, as the rank that calls counts
        self._name = f"the connection from rank {me} to rank {rank}"
        self._connections = 0  # sets of them, so far
        self._may_send = False  # the next frame is known
        self._control_frames: list[StreamFrameKind] = []  # frames without bodies that are to be sent
        self._must_report = False  # a report is due
        self._left = 0  # frames that the system has taken
        self._is_closing = False
        self._end: int | None = None  # the number of frames after which the other end has closed the stream
        #: The reason why nothing can arrive any more; None while something may.
        self.failure: CommunicationError | None = None
        self.failed_at_s = 0.0
        self._why = ""  # the connection has ended
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._first = self._last = 0  # in the buffer: the bytes that have arrived and were not processed
        self._landing: Landing | None = None
        self._has_landed = False  # since ``receive`` was called

    @property
    def waiting_descriptors(self) -> list[int]:
        """Those of the sockets that need room for bytes that wait."""
        has_more = self._has_more
        waiting = [e for e in list(self._sockets) if e.has_waiting or (has_more and not e.is_resting)]
        return [fd for each in waiting if (fd := each.sock.fileno()) >= 0]

    # ---- connections -----------------------------------------------------------------------------------

    def resume(self, new: NewConnection) -> LinkSocket | None:
        """Go on over ``new``, with which both have authenticated each other. Called as ``receive`` is. None: it is
        closed, as the link has failed, or there are newer ones."""
        is_first = new.set_number > self._set
        if self.failure is not None or not (is_first or (new.set_number == self._set and self._sockets)):
            new.sock.close()
            return None
        if is_first:
            self._hang_up()
        new.sock.setblocking(False)
        end_when_silent(new.sock, self._watch.silence_s)
        here, there = _ends(new.sock)
        with self._lock:
            made = LinkSocket(new, self._stream, self)
            made.is_resting = made.is_relayed and not self._is_relayed
            self._sockets.append(made)
            for each in self._sockets if len(self._sockets) > 1 else ():
                share_evenly(each.sock)
            if is_first:
                self._set = new.set_number
                self._name = f"the connection from rank {self._me} ({here}) to rank {self.rank} ({there})"
                self._may_send = not self._connections  # otherwise the other end says first with which frame to go on
                self._connections += 1
                self._must_report = self._connections > 1
                self._stream.forget_early()
                self._watch.resumed(time.monotonic())
            self._poller.register(made.sock, select.EPOLLIN)
            self._send_or_wait()
        if is_first and self._connections > 1:
            logger.warning("%s was made again after it had broken (%s): all goes on", self._name, self._why)
        return made

    def use_relay(self, is_relayed: bool) -> bool:
        """Send over the connection through a third machine as well, or no longer. Returns True if there has to be one,
        and is none."""
        with self._lock:
            self._is_relayed = is_relayed
            relayed = [each for each in self._sockets if each.is_relayed]
            for each in relayed:
                each.is_resting = not is_relayed
            return is_relayed and not relayed

    def renew(self, why: str) -> None:
        """Make all connections again. Called as ``receive`` is."""
        if self._sockets:
            self._hang_up()
            self._why = why
            self._watch.broke(time.monotonic())
            self._on_broken(self)

    def usage(self) -> tuple[TcpCounters, TcpCounters]:
        """The bytes sent directly, and those sent through a third machine, since the last call. Of several
        connections the time is that of the longest."""
        found = {True: TcpCounters(0, 0.0, 0.0), False: TcpCounters(0, 0.0, 0.0)}
        with self._lock:
            for each in self._sockets:
                if not each.is_cut and (used := each.usage()) is not None:
                    known = found[each.is_relayed]
                    found[each.is_relayed] = TcpCounters(
                        known.acked + used.acked, max(known.busy_s, used.busy_s), max(known.unread_s, used.unread_s)
                    )
        return found[False], found[True]

    def _hang_up(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, []
            self._may_send = False
            for each in sockets:
                each.hang_up(self._poller)

    def _broke(self, why: str) -> None:
        """The connection does not work any more: another one is needed."""
        self._hang_up()
        self._why = why
        self._watch.broke(time.monotonic())
        logger.warning("%s has broken (%s): it is being made again", self._name, why)
        self._on_broken(self)

    def _fail(self, error: CommunicationError) -> None:
        """Nothing can arrive any more."""
        self._hang_up()
        with self._lock:
            self.failure, self.failed_at_s = error, time.monotonic()

    def fail(self, error: CommunicationError) -> None:
        """Nothing can arrive any more. Called as ``receive`` is."""
        if self.failure is None:
            self._fail(error)

    @property
    def needs_connection(self) -> bool:
        """True while it waits for ``resume``."""
        return not self._sockets and self.failure is None

    def check(self, now_s: float) -> None:
        """Find out whether the connection still works. Called from time to time, as ``receive`` is, after it."""
        due = self._watch.due(now_s) if self.failure is None else LinkDue.NOTHING
        if due is LinkDue.PING:
            with self._lock:
                self._control_frames.append(StreamFrameKind.PING)
                self._send_or_wait()
        elif due is LinkDue.BREAK:
            self._broke(f"nothing has come over it for {self._watch.silence_s:g} s, not even an answer to a heartbeat")
        elif due is LinkDue.GIVE_UP:
            self._fail(
                PeerLostError(
                    f"{self._name} has broken ({self._why}) and could not be made again within "
                    f"{self._watch.give_up_s:g} s: the network between the two machines does not carry it"
                )
            )

    # ---- sending ---------------------------------------------------------------------------------------

    @property
    def has_waiting(self) -> bool:
        """True if some bytes wait until the system has room for them."""
        return self._has_more or any(each.has_waiting for each in self._sockets)

    @property
    def _has_more(self) -> bool:
        """True if something is to be sealed and sent."""
        if self._is_cut:
            return False
        return self._must_report or bool(self._control_frames) or self._has_frames

    @property
    def _is_cut(self) -> bool:
        """True if there is no connection, or one has ended, as the thread that receives is about to find out."""
        return not self._sockets or any(each.is_cut for each in self._sockets)

    @property
    def _has_frames(self) -> bool:
        """True if the next frame may be sent now."""
        if not self._may_send or not self._stream.has_unsent:
            return False
        return len(self._sockets) == 1 or self._is_closing or not self._stream.is_far_ahead

    def send(self, message: bytes, fd: int = -1) -> None:
        """Send, now or later; a message to a peer that has ended is dropped. ``fd``: descriptors can't be sent."""
        with self._lock:
            self._queue([memoryview(message)], None)
            self._send_or_wait()

    def send_payload(self, record: bytes, spans: Sequence[Span], owner: object) -> PendingSend:
        """Send ``record`` and the bytes at ``spans``, which ``owner`` keeps in memory until all are sent."""
        with self._lock:
            self._queue([memoryview(record)], None)
            self._queue([_view(*span) for span in spans], owner if owner is not None else spans)
            self._send_or_wait()  # together: one system call here, and one wake-up there
            return PendingSend(self, self._stream.given)

    def _queue(self, views: Sequence[memoryview], owner: object) -> None:
        """``owner`` keeps the memory of ``views``; None: nobody changes it."""
        if self.failure is None:
            for view in views:
                for first in range(0, len(view), FRAME_BYTES):
                    self._stream.add(view[first : first + FRAME_BYTES], owner)

    @property
    def reported(self) -> int:
        """Frames that the other end has reported."""
        return self._stream.confirmed

    def has_arrived(self, mark: int) -> bool:
        """True if the other end has reported all frames before ``mark``."""
        return self._stream.confirmed >= mark or self.failure is not None

    def has_left(self, mark: int) -> bool:
        """True if the system has taken all frames before ``mark``."""
        return self._left >= mark or self.has_arrived(mark)

    def is_little(self, mark: int) -> bool:
        """True unless ``release`` would copy so much that waiting for a report costs less; the other end sends one once
        it has read so much."""
        with self._lock:
            return self.has_arrived(mark) or self._stream.bytes_to_copy(mark) <= _COPIED_BYTES

    def release(self, mark: int) -> bool:
        """Copy the frames before ``mark`` that may have to be sent again, so that their memory may change. False,
        without a copy, if they have not left."""
        if self.has_arrived(mark):
            return True
        with self._lock:
            if self._left < mark:
                return False
            self._stream.release(mark)
            return True

    def _send_or_wait(self) -> None:
        """Send over connections that have room, as far as they have, and see to the rest."""
        free = [each for each in self._sockets if not (each.has_waiting or each.is_resting)]
        if free and self._send_over(free):
            self._background_sender.add(self)

    def send_waiting(self, link_socket: LinkSocket | None = None) -> None:
        """Send waiting bytes over one of the connections, or over all, as far as the system has room."""
        with self._lock:
            self._send_over([each for each in self._sockets if link_socket in (each, None)])

    def _send_over(self, sockets: Sequence[LinkSocket]) -> bool:
        """Send over ``sockets``, as far as the system has room. True if something is left to be sent."""
        budget = _AT_ONCE_BYTES
        if self._is_relayed:  # a message of one frame goes the faster way
            sockets = sorted(sockets, key=lambda each: each.rate, reverse=True)
        for each in sockets:
            while budget > 0 and (each.has_waiting or (self._has_more and not each.is_resting)):
                if not each.has_waiting:
                    self._seal_next(each)
                taken, is_all = each.send()
                budget -= taken
                if not is_all:
                    break
        self._note_left()
        has_more = self._has_more
        is_left = has_more or any(each.has_waiting for each in self._sockets)
        for each in self._sockets:
            if not each.is_cut:
                each.watch_for_room(self._poller, each.has_waiting or (has_more and not each.is_resting))
        return is_left

    def _note_left(self) -> None:
        """Count the frames that have left: all before the first one that waits, on whichever connection."""
        waiting = [first for each in self._sockets if (first := each.first_waiting) is not None]
        if self._may_send and not self._is_cut:
            self._left = max(self._left, min(waiting, default=self._stream.sent))

    def _seal_next(self, link_socket: LinkSocket) -> None:
        """Seal as much of the unsent bytes as is sent at once, for one of the connections."""
        sealed, most = 0, _SEALED_AT_ONCE_BYTES if len(self._sockets) == 1 else FRAME_BYTES
        while self._has_frames and sealed < most:
            header, body = self._stream.take()
            link_socket.seal(header, body)
            sealed += len(body)
        if not sealed:
            for kind in self._control_frames or [StreamFrameKind.REPORT]:
                link_socket.seal(self._stream.control(kind), b"")
            self._control_frames.clear()
        self._must_report = False  # every frame is a report as well

    # ---- receiving -------------------------------------------------------------------------------------

    def receive(self, link_socket: LinkSocket) -> None:
        """Process the bytes that have arrived over one of the connections. Does not block. Raises ProtocolError."""
        budget, self._has_landed = _AT_ONCE_BYTES, False
        try:
            while budget > 0 and link_socket in self._sockets:
                nbytes = link_socket.reader.read(link_socket.sock)
                if not nbytes:
                    self._closed(link_socket, _CLOSED)
                    break
                if self._end is not None and self._stream.expected >= self._end:
                    self._fail(PeerLostError(f"{self._name} has ended ({_CLOSED})"))
                    return
                # After a payload, its receiver goes on first: it may say where the next one belongs.
                budget = 0 if link_socket.reader.is_drained or self._has_landed else budget - nbytes
            self._watch.on_receive(time.monotonic())
        except BlockingIOError:
            pass
        except DamagedFrameError as error:
            self._damaged(error)
            return
        except OSError as error:
            if link_socket in self._sockets:  # otherwise it was hung up while it was being read
                self._closed(link_socket, str(error))
            return
        if self._stream.is_report_due:
            self._report()

    def _closed(self, link_socket: LinkSocket, why: str) -> None:
        """Nothing follows on one of the connections."""
        if link_socket.has_ended and len(self._sockets) > 1:  # the end of the stream has yet to arrive on another one
            with self._lock:
                self._sockets.remove(link_socket)
                link_socket.hang_up(self._poller)
        else:
            self._broke(why)

    def _report(self) -> None:
        with self._lock:
            # Otherwise the frame after what waits says so, or a later report.
            if any(not each.has_waiting for each in self._sockets):
                self._must_report = True
                self._send_or_wait()

    def _damaged(self, error: DamagedFrameError) -> None:
        if self._stream.damaged():
            self._fail(
                IntegrityError(
                    f"what rank {self.rank} sent came damaged twice over {self._name}: a network card, a switch or "
                    "memory on that way changes what passes through it"
                )
            )
        else:
            self._broke(str(error))

    def on_frame(self, header: FrameHeader, early: bytes) -> None:
        """A frame has arrived undamaged. ``early``: its body, if it has to wait for those before it."""
        with self._lock:
            was_far_ahead = self._stream.is_far_ahead
            self._stream.on_frame(header, early)
            if was_far_ahead and not self._stream.is_far_ahead:
                self._send_or_wait()

    def feed_kept(self) -> None:
        """Process frames that had to wait for the last one."""
        while (body := self._stream.next_early()) is not None:
            self.feed(memoryview(body))

    def on_control_frame(self, kind: StreamFrameKind, number: int, reader: FrameReader) -> None:
        """A frame without a body has arrived."""
        if kind is StreamFrameKind.BYE:  # on each connection; frames of others may be on their way
            self._end = number
            for each in self._sockets:
                each.has_ended = each.has_ended or each.reader is reader
            return
        self._has_landed = True  # a sender that waits for it goes on first, too
        with self._lock:
            if not self._may_send:  # the first report over a new connection says with which frame to go on
                self._stream.rewind()
                self._may_send = True
            self._must_report = self._must_report or kind is StreamFrameKind.PING
            self._send_or_wait()

    def place(self) -> memoryview | None:
        """The memory to which the next bytes of the stream go; None: they go to ``feed``."""
        return self._landing.views[0] if self._landing is not None else None

    def placed(self, nbytes: int) -> None:
        """``nbytes`` more bytes of the stream are in ``place``."""
        landing = self._landing
        if landing is not None:
            _skip(landing.views, nbytes)
            self._complete_landed(landing)

    def _complete_landed(self, landing: Landing) -> None:
        if not landing.views:
            self._landing, self._has_landed = None, True
            landing.complete()
            # Its sender needs the memory that it was sent from. To copy less costs less than to report it.
            if self._stream.unreported_bytes >= _COPIED_BYTES:
                self._report()

    def feed(self, data: memoryview) -> None:
        """Process the next bytes of the stream."""
        while len(data):
            landing = self._landing
            if landing is not None:
                data = _fill_from(data, landing.views)
                self._complete_landed(landing)
                continue
            part = min(len(data), _BUFFER_BYTES - self._last)
            self._buffer[self._last : self._last + part] = data[:part]
            self._last += part
            data = data[part:]
            self._process()

    def _process(self) -> None:
        buffer = self._buffer
        while self._last - self._first >= RECORD_BYTES:
            payload_at = self._first + RECORD_BYTES
            message = peer_protocol.unpack_from(buffer, self._first)
            if message.source != self.rank:
                raise ProtocolError(f"rank {self.rank} sent a message in the name of rank {message.source}")
            nbytes = peer_protocol.body_nbytes(message)
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
                data = bytes(buffer[payload_at : payload_at + nbytes]) if nbytes or message.kind == _INLINE else None
                self._first = payload_at + nbytes
                self._receiver.on_message(message, data)
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
            for each in self._sockets:
                each.reader.move(self._landing.views[0])

    # ---- the end ---------------------------------------------------------------------------------------

    def close(self, is_forked: bool = False) -> None:
        """Send waiting bytes and let them reach the peer's machine, for as long as it takes any; then close the
        sockets. ``is_forked``: in a forked child, only close them."""
        if is_forked:
            for each in self._sockets:
                each.sock.close()
            return
        with contextlib.suppress(OSError):
            self._deliver([each for each in self._sockets if not each.is_cut])
        if self._sockets:
            self._hang_up()

    def _deliver(self, sockets: Sequence[LinkSocket]) -> None:
        """A socket that is closed while bytes for it arrive drops bytes that it has not delivered. On a slow link they
        take long: this ends when none has been taken for ``silence_s``."""
        silence_s, taken_s = self._watch.silence_s, time.monotonic()
        writable = select.poll()
        for each in sockets:
            writable.register(each.sock, select.POLLOUT | select.POLLRDHUP)

        def is_read() -> bool:
            """Wait for room. False once the other end has closed, or takes nothing any more."""
            nonlocal taken_s
            events = writable.poll(_POLL_MS)
            if events:
                taken_s = time.monotonic()
            return time.monotonic() < taken_s + silence_s and not any(event & ~select.POLLOUT for _, event in events)

        with self._lock:
            self._is_closing = True
            self._send_over(sockets)
        while self._has_more and is_read():
            self.send_waiting()
        with self._lock:
            for each in sockets:
                each.seal(self._stream.control(StreamFrameKind.BYE), b"")
            self._send_over(sockets)
        while self.has_waiting and is_read():
            self.send_waiting()
        for each in sockets:
            each.sock.shutdown(socket.SHUT_WR)
        left, taken_s = -1, time.monotonic()
        while (before := left) and time.monotonic() < taken_s + silence_s:
            left = sum(each.undelivered_bytes for each in sockets)
            if left != before:
                taken_s = time.monotonic()
            time.sleep(_DELIVERY_POLL_S if left else 0.0)


def _ends(sock: socket.socket) -> tuple[str, str]:
    """The addresses of this end and the other."""
    try:
        places = sock.getsockname(), sock.getpeername()
    except OSError:  # it has ended already
        return "?", "?"
    here, there = (joined(host, port) for host, port, *_ in places)
    return here, there


def _skip(views: deque[memoryview], nbytes: int) -> None:
    """``nbytes`` bytes of the first one are filled."""
    if nbytes < len(views[0]):
        views[0] = views[0][nbytes:]
    else:
        views.popleft()


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
