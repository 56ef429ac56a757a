"""The way to another service: over TCP, or through shared memory if it is the summation service of this machine.

Owned by the loop's thread. A link sends headers with payloads and hands answers to one callback; it knows
nothing of tensors or rounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from byteps_py import auth
from byteps_py.channel import Channel
from byteps_py.channel import connect as connect_channel
from byteps_py.dataplane.dialer import Dialer, Owner
from byteps_py.errors import IntegrityError, PeerLostError, ProtocolError
from byteps_py.log import logger
from byteps_py.loop import EventLoop
from byteps_py.settings import Settings
from byteps_py.shm import Arena, Block
from byteps_py.wire import HEADER_BYTES, Header, Kind

#: header, payload (None if the answer lies in shared memory)
OnAnswer = Callable[[Header, zmq.Frame | None], None]
#: A server can't be used any more: why, and for how many seconds the scheduler may know a better reason.
OnLost = Callable[[str, float], None]

_DRAIN = 64  # messages taken per wake-up before others get their turn
_CONNECT_S = 1.0
_WORD_OF_SCHEDULER_S = 1.0

_Name = tuple[int, int, int, int]  # what an answer has in common with its request alone


def _name(header: Header) -> _Name:
    return header.key, header.generation, header.index, header.round


class ServerLink(ABC):
    """One summation service."""

    bytes_sent = 0
    bytes_received = 0

    @abstractmethod
    def push(self, header: Header, payload: Block | None, offset: int, answer: Block | None) -> None:
        """Send ``header.length`` bytes at ``offset`` of ``payload``, which stay untouched until the answer."""

    @abstractmethod
    def close(self) -> None: ...


_DAMAGED = "{} came damaged twice: a network card, a switch or memory on that way changes what passes through it"


@dataclass(slots=True, eq=False)
class _Request:
    """A message that has no answer yet. ``payload``, ``offset``: where its bytes lie, untouched until then; or
    ``body``, if it has none of its own."""

    header: Header
    payload: Block | None
    offset: int
    body: bytes = b""
    number: int = -1  # on the connection that took it last; -1: none has
    was_damaged: bool = False  # once, on its way there or back


class TcpLink(ServerLink, Owner):
    """Payloads are sent from, and answers read in, the memory where they lie.

    Every message is kept until its answer is there. If it comes damaged it is sent again; if the answer does, the
    connection is made anew, as when it breaks. What is damaged twice is an error that names the way.

    When a connection breaks, what was on its way is lost, or is not: nobody knows. If nothing was, the next one takes
    over. Else the round can't be saved, because the server keeps no result that it has sent; that is an error as soon
    as the server is known to live, or to be silent for long.
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
        self._who = f"the {what} at {address}"
        self._silence_s = settings.heartbeat_timeout_s
        self._view = contributions
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._requests: dict[_Name, _Request] = {}  # not answered yet
        self._suspects: set[_Name] = set()  # one of their answers came damaged
        self._loss = ""  # why the job can't go on; empty while it can
        self._dialer = Dialer(context, loop, address, sender, settings, self, self._who)

    def push(self, header: Header, payload: Block | None, offset: int, answer: Block | None) -> None:
        self._begin(_Request(header, payload, offset))

    def ask(self, header: Header, body: bytes) -> None:
        """Send a request that has no memory of its own."""
        self._begin(_Request(header, None, 0, body))

    def _begin(self, request: _Request) -> None:
        self._requests[_name(request.header)] = request
        if self._dialer.is_open:
            self._send(request)

    def _send(self, request: _Request) -> None:
        header, payload = request.header, request.payload
        if payload is None:
            request.number = self._dialer.send(header, request.body)
        else:
            request.number = self._dialer.send(header, self._view(payload, request.offset, header.length))
            self.bytes_sent += header.length

    # ---- what the dialer says ------------------------------------------------------------------------------

    def on_open(self) -> None:
        if self._loss:
            self._on_lost(f"{self._loss}; it lives and is connected again", 0.0)
            return
        for request in self._requests.values():
            self._send(request)

    def on_message(self, header: Header, payload: zmq.Frame) -> None:
        self.bytes_received += len(payload)
        name = _name(header)
        self._suspects.discard(name)
        self._requests.pop(name, None)  # none: it says again what an earlier answer has said
        self._on_answer(header, payload)

    def on_damaged(self, number: int | None) -> None:
        if number is None:
            self._answer_damaged()
            return
        request = next((r for r in self._requests.values() if r.number == number), None)
        if request is None:
            return
        what = f"a {request.header.kind.name} message to {self._who}"
        if request.was_damaged:
            raise IntegrityError(_DAMAGED.format(what))
        logger.warning("%s came damaged: it is sent again", what)
        request.was_damaged = True
        self._send(request)

    def _answer_damaged(self) -> None:
        """Whose it was can't be told."""
        if self._suspects:
            raise IntegrityError(_DAMAGED.format(f"an answer from {self._who}"))
        logger.warning("an answer from %s came damaged: it is asked for again", self._who)
        self._suspects = set(self._requests)
        self._dialer.reconnect()

    def on_broken(self) -> None:
        waiting = sum(request.number >= 0 for request in self._requests.values())
        if waiting and not self._loss:
            self._loss = (
                f"the connection to {self._who} broke while {waiting} of this machine's messages waited for their "
                "answers, which may be lost"
            )
            self._on_lost(self._loss, self._silence_s + _WORD_OF_SCHEDULER_S)

    def on_refused(self, error: ProtocolError) -> None:
        raise error

    def close(self) -> None:
        self._dialer.close()


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
        token = auth.token(settings.secret, "local", settings.job, str(sender))
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
