"""The way to another service: over TCP, or through shared memory if it is the summation service of this machine.

Owned by the loop's thread. A link sends headers with payloads and hands answers to one callback; it knows
nothing of tensors or rounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from byteps_py import auth
from byteps_py.channel import Channel
from byteps_py.channel import connect as connect_channel
from byteps_py.errors import PeerLostError, ProtocolError
from byteps_py.loop import EventLoop
from byteps_py.settings import Settings
from byteps_py.shm import Arena, Block
from byteps_py.wire import HEADER_BYTES, Header, Kind

#: header, payload (None if the answer lies in shared memory)
OnAnswer = Callable[[Header, zmq.Frame | None], None]
#: A server can't be used any more: why, and for how many seconds the scheduler may know a better reason.
OnLost = Callable[[str, float], None]

_DRAIN = 64  # messages taken per wake-up before others get their turn
_SLACK_BYTES = 64 << 10
_CONNECT_S = 1.0
_WORD_OF_SCHEDULER_S = 1.0


class ServerLink(ABC):
    """One summation service."""

    bytes_sent = 0
    bytes_received = 0

    @abstractmethod
    def push(self, header: Header, payload: Block | None, offset: int, answer: Block | None) -> None:
        """Send ``header.length`` bytes at ``offset`` of ``payload``, which stay untouched until the answer."""

    @abstractmethod
    def close(self) -> None: ...


class TcpLink(ServerLink):
    """A ZeroMQ DEALER. Payloads are sent from, and answers read in, the memory where they lie.

    ZeroMQ connects again by itself when a connection breaks, but what was on its way is lost, or is not: nobody
    knows. If nothing was, this link only says HELLO again. Else the round can't be saved, because the server keeps
    no result that it has sent; that is an error as soon as the server is known to live, or to be silent for long.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        loop: EventLoop,
        address: str,
        sender: int,
        settings: Settings,
        contributions: Callable[[Block, int, int], memoryview],
        on_answer: OnAnswer,
        on_lost: OnLost,
        what: str = "summation service",
    ) -> None:
        self._loop = loop
        self._who = f"the {what} at {address}"
        self._silence_s = settings.heartbeat_timeout_s
        self._view = contributions
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._unanswered = 0
        self._loss = ""  # why the job can't go on; empty while it can
        socket = self._socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, settings.max_partition_bytes + _SLACK_BYTES)
        socket.setsockopt(zmq.SNDHWM, 0)  # the credit is the limit
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(20_000, int(1000 * self._silence_s)))
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        socket.connect(address)
        token = auth.token(settings.secret, "data", settings.job, str(sender))
        self._hello = [Header(Kind.HELLO, sender).pack(), token.encode()]
        socket.send_multipart(self._hello)
        loop.add_reader(self._monitor, self._watch)
        loop.add_reader(socket, self._drain)

    def push(self, header: Header, payload: Block | None, offset: int, answer: Block | None) -> None:
        self._unanswered += 1
        self._socket.send(header.pack(), zmq.SNDMORE)
        if payload is None:
            self._socket.send(b"")
        else:
            self._socket.send(self._view(payload, offset, header.length), copy=False)
            self.bytes_sent += header.length

    def ask(self, header: Header, body: bytes) -> None:
        """Send a request that has no memory of its own."""
        self._unanswered += 1
        self._socket.send(header.pack(), zmq.SNDMORE)
        self._socket.send(body)

    def _drain(self) -> None:
        for _ in range(_DRAIN):
            if not self._take_answer():
                return

    def _take_answer(self) -> bool:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        if len(frames) != 2:
            raise ProtocolError(f"{self._who} sent {len(frames)} frames, an answer has 2")
        header = Header.unpack(frames[0].bytes)
        if header.kind is Kind.REFUSED:
            self._watch()
            if self._loss:  # sent on a new connection before the break was noticed: that is the reason to give
                return True
        self.bytes_received += len(frames[1])
        self._unanswered -= 1
        self._on_answer(header, frames[1])
        return True

    def _watch(self) -> None:
        """The connection was made, or broke."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self._broke()
            elif self._loss:
                self._on_lost(f"{self._loss}; it lives and is connected again", 0.0)

    def _broke(self) -> None:
        while self._take_answer():
            pass  # what came before is no less true
        if not self._unanswered:
            self._socket.send_multipart(self._hello)  # the first message of the next connection
        elif not self._loss:
            self._loss = (
                f"the connection to {self._who} broke while {self._unanswered} of this machine's messages waited "
                "for their answers, which may be lost"
            )
            self._on_lost(self._loss, self._silence_s + _WORD_OF_SCHEDULER_S)

    def close(self) -> None:
        self._loop.remove(self._monitor)
        self._loop.remove(self._socket)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()


class LocalLink(ServerLink):
    """A channel to the summation service of this machine, which maps ``arena``: it reads contributions and
    writes answers there."""

    def __init__(
        self,
        loop: EventLoop,
        name: str,
        sender: int,
        settings: Settings,
        arena: Arena,
        on_answer: OnAnswer,
        on_lost: OnLost,
    ) -> None:
        self._loop = loop
        self._arena = arena
        self._announced = 0
        self._on_answer = on_answer
        self._on_lost = on_lost
        # It listened before it became a member: who is not there now is gone.
        self._channel: Channel = connect_channel(name, _CONNECT_S)
        token = auth.token(settings.secret, "data", settings.job, str(sender))
        self._channel.send(Header(Kind.HELLO, sender).pack() + token.encode())
        self._fd = self._channel.fileno()
        loop.add_reader(self._fd, self._drain)

    def push(self, header: Header, payload: Block | None, offset: int, answer: Block | None) -> None:
        if payload is not None:
            header.segment, header.segment_offset = payload.segment, payload.offset + offset
            self.bytes_sent += header.length
        if answer is not None:
            header.answer_segment, header.answer_offset = answer.segment, answer.offset
        try:
            while self._announced < len(self._arena.segments):
                segment = self._arena.segments[self._announced]
                hello = Header(Kind.SEGMENT, header.sender, segment=self._announced, length=segment.nbytes)
                self._channel.send(hello.pack(), (segment.fd,))
                self._announced += 1
            self._channel.send(header.pack())
        except PeerLostError as lost:
            self._lost(lost)

    def _drain(self) -> None:
        try:
            for _ in range(_DRAIN):
                message = self._channel.receive(0)
                if message is None:
                    return
                header = Header.unpack(message[0][:HEADER_BYTES])
                text = message[0][HEADER_BYTES:]
                self.bytes_received += header.length
                self._on_answer(header, zmq.Frame(text) if text else None)
        except PeerLostError as lost:
            self._loop.remove(self._fd)
            self._lost(lost)

    def _lost(self, lost: PeerLostError) -> None:
        self._on_lost(f"the summation service of this machine is gone: {lost}", _WORD_OF_SCHEDULER_S)

    def close(self) -> None:
        self._loop.remove(self._fd)
        self._channel.close()
