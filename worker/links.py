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
from byteps_py.errors import BytePSError, PeerLostError, ProtocolError, RendezvousError
from byteps_py.log import logger
from byteps_py.loop import EventLoop
from byteps_py.settings import Settings
from byteps_py.shm import Arena, Block
from byteps_py.wire import HEADER_BYTES, Header, Kind

#: header, payload (None if the answer lies in shared memory)
OnAnswer = Callable[[Header, zmq.Frame | None], None]
#: A service can't be reached: in words.
OnLost = Callable[[str], None]

_DRAIN = 64  # messages taken per wake-up before others get their turn
_SLACK_BYTES = 64 << 10
_CONNECT_S = 1.0


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

    When a connection breaks, what was on its way is lost, or is not: nobody knows. So a new socket takes the place of
    the broken one, with nothing in its queues, and ``on_again`` sends once more what has no answer. If there is no
    connection for ``PS_HEARTBEAT_TIMEOUT``, ``on_lost`` is told, and this link goes on trying.
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
        on_again: Callable[[], None],
        on_lost: OnLost,
        what: str = "summation service",
    ) -> None:
        self._context = context
        self._loop = loop
        self._address = address
        self._who = f"the {what} at {address}"
        self._settings = settings
        self._view = contributions
        self._on_answer = on_answer
        self._on_again = on_again
        self._on_lost = on_lost
        token = auth.token(settings.secret, "data", settings.job, str(sender))
        self._hello = [Header(Kind.HELLO, sender).pack(), token.encode()]
        self._opened = 0  # connections so far
        self._is_up = False
        self._is_closed = False
        self._open()

    def _open(self) -> None:
        silence_ms = int(1000 * self._settings.heartbeat_timeout_s)
        socket = self._socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, self._settings.max_partition_bytes + _SLACK_BYTES)
        socket.setsockopt(zmq.SNDHWM, 0)  # the credit is the limit
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
        # Only what neither end notices otherwise is found so: the network between them lost everything.
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(200, silence_ms // 2))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * silence_ms)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._opened += 1
        socket.connect(self._address)
        socket.send_multipart(self._hello)
        self._loop.add_reader(self._monitor, self._watch)
        self._loop.add_reader(socket, self._drain)

    def push(self, header: Header, payload: Block | None, offset: int, answer: Block | None) -> None:
        self._socket.send(header.pack(), zmq.SNDMORE)
        if payload is None:
            self._socket.send(b"")
        else:
            self._socket.send(self._view(payload, offset, header.length), copy=False)
            self.bytes_sent += header.length

    def ask(self, header: Header, body: bytes) -> None:
        """Send a request that has no memory of its own."""
        self._socket.send(header.pack(), zmq.SNDMORE)
        self._socket.send(body)

    def _drain(self) -> None:
        for _ in range(_DRAIN):
            if self._is_closed or not self._take_answer():
                return

    def _take_answer(self) -> bool:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        if len(frames) != 2:
            raise ProtocolError(f"{self._who} sent {len(frames)} frames, an answer has 2")
        self.bytes_received += len(frames[1])
        self._on_answer(Header.unpack(frames[0].bytes), frames[1])
        return True

    def _watch(self) -> None:
        """The connection was made, or broke."""
        while not self._is_closed and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_up = True
            else:
                self._broke()
                return

    def _broke(self) -> None:
        self._drain()  # what came before is no less true
        if self._is_closed:
            return
        logger.info("the connection to %s broke; connecting again", self._who)
        self._is_up = False
        self._close_socket()
        self._open()
        number = self._opened
        self._loop.call_later(self._settings.heartbeat_timeout_s, lambda: self._give_up(number))
        self._on_again()

    def _give_up(self, number: int) -> None:
        if not (self._is_closed or self._is_up) and number == self._opened:
            self._on_lost(f"{self._who} can't be reached since {self._settings.heartbeat_timeout_s:g} s")

    def _close_socket(self) -> None:
        self._loop.remove(self._monitor)
        self._loop.remove(self._socket)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._close_socket()


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
        self._channel: Channel | None = None
        try:  # it listened before it became a member: who is not there now is gone
            self._channel = connect_channel(name, _CONNECT_S)
            token = auth.token(settings.secret, "data", settings.job, str(sender))
            self._channel.send(Header(Kind.HELLO, sender).pack() + token.encode())
        except (PeerLostError, RendezvousError) as lost:
            self._lost(lost)
            return
        loop.add_reader(self._channel.fileno(), self._drain)

    def push(self, header: Header, payload: Block | None, offset: int, answer: Block | None) -> None:
        """After the service is gone: nothing. What it has not answered moves to another with the next epoch."""
        if payload is not None:
            header.segment, header.segment_offset = payload.segment, payload.offset + offset
            self.bytes_sent += header.length
        if answer is not None:
            header.answer_segment, header.answer_offset = answer.segment, answer.offset
        if self._channel is None:
            return
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
                message = self._channel.receive(0) if self._channel is not None else None
                if message is None:
                    return
                header = Header.unpack(message[0][:HEADER_BYTES])
                text = message[0][HEADER_BYTES:]
                self.bytes_received += header.length
                self._on_answer(header, zmq.Frame(text) if text else None)
        except PeerLostError as lost:
            self._lost(lost)

    def _lost(self, lost: BytePSError) -> None:
        self.close()
        self._on_lost(f"the summation service of this machine is gone: {lost}")

    def close(self) -> None:
        if self._channel is not None:
            self._loop.remove(self._channel.fileno())
            self._channel.close()
            self._channel = None
