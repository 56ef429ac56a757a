"""The way to one summation service, or communication service: over TCP, or in the memory of one machine. Owned by the
loop's thread."""

from __future__ import annotations

import collections
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from byteps_py.config import tuning
from byteps_py.config.settings import Settings
from byteps_py.dataplane.dialer import DialTarget, Owner
from byteps_py.dataplane.link_usage import TcpCounters
from byteps_py.dataplane.rdma_lane import RdmaLane
from byteps_py.errors import (
    BytePSError,
    IntegrityError,
    PeerLostError,
    ProtocolError,
    RendezvousError,
)
from byteps_py.failure_detector import FailureDetector
from byteps_py.runtime import Runtime
from byteps_py.security import auth
from byteps_py.system.channel import Channel
from byteps_py.system.log import logger
from byteps_py.system.loop import EventLoop
from byteps_py.system.shm import Arena, Block
from byteps_py.wire.data_link import (
    HEADER_BYTES,
    Header,
    Kind,
    RoundName,
    name_of,
)

#: header, payload (None if the answer lies in shared memory)
OnAnswer = Callable[[Header, zmq.Frame | None], None]
#: A service can't be reached: in words.
OnLost = Callable[[str], None]

_DRAIN = 64  # messages taken per wake-up before others get their turn
#: Requests that are kept for the case that they must be sent again; some never get an answer, and need none.
_MOST_KEPT = 8192
#: When so many answers have come whole since one did not, the way is good again: what is still without one may be what
#: never gets any, a round in which all pass.
_GOOD_AGAIN = 256
_CONNECT_S = 1.0
#: Messages about copies of states. The service keeps and repeats them (worker/core/shadowing.py).
SHADOW_KINDS = frozenset(kind for kind in Kind if kind.name.startswith("SHADOW_"))
#: From servers: no answers to requests.
_UNANSWERED = frozenset((Kind.CLOCK, Kind.ORDER))
_TOLD = SHADOW_KINDS | {Kind.WANT, Kind.AWAITED, Kind.CLOCK}


def silence_s(settings: Settings, loop: EventLoop, has_slow_link: bool = False) -> float:
    """For how long a service that can't be reached may only be slow. Where this process has had to wait for a
    processor, so have others: they may share it."""
    late_s = loop.lateness_s
    return FailureDetector(0.0, settings.heartbeat_timeout_s, settings.patience_s, late_s, has_slow_link).timeout_s()


class ServerLink(ABC):
    """One summation service. ``is_local``: of this machine, whose memory it maps."""

    is_local = False
    bytes_sent = 0
    bytes_received = 0

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """True if the server is reachable, as far as this machine knows."""

    @property
    def descriptor(self) -> int:
        """Of its TCP connection; -1: it has none."""
        return -1

    @property
    def read_counters(self) -> TcpCounters | None:
        """What the server has read here by RDMA; None: nothing travels so."""
        return None

    @property
    def rails(self) -> Sequence[ServerLink]:
        """The connections that it consists of, which count their bytes: several, over several network cards."""
        return (self,)

    @abstractmethod
    def push(self, header: Header, payload: Block | None, offset: int, answer: Block | None) -> None:
        """Send ``header.payload_nbytes`` at ``offset`` of ``payload``, which stay untouched until the answer."""

    @abstractmethod
    def tell(self, header: Header, body: bytes) -> None:
        """Send a message that has no answer, and whose bytes lie in no block."""

    @abstractmethod
    def close(self) -> None: ...


_DAMAGED = "{} came damaged twice: a network card, a switch or memory on that way changes what passes through it"


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A message that has no answer yet. ``payload``, ``offset``: where its bytes lie, untouched until then; or
    ``body``, if it has none of its own."""

    header: Header
    payload: Block | None
    offset: int
    body: bytes | memoryview = b""
    number: int = -1  # on the connection; -1: not sent


@dataclass(frozen=True, slots=True)
class LinkTarget:
    """The service at the other end, ``what`` in words. ``group``: the epoch with which the ranks' group began.
    ``is_late``: it has been a member for some time. ``link_mbit``: of the slower link of the two; 0: it is unknown.
    ``rail``, ``source``: see DialTarget."""

    address: str
    what: str = "summation service"
    group: int = 0
    is_late: bool = False
    link_mbit: float = 0.0
    rail: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True)
class LinkOrigin:
    """The end of links that is here. ``sender``: the index of this machine. ``contributions(block, offset, length)``:
    the bytes of a payload. ``rdma``: by which payloads travel; None: over the connection."""

    context: zmq.Context[zmq.Socket[bytes]]
    runtime: Runtime
    sender: int
    settings: Settings
    contributions: Callable[[Block, int, int], memoryview]
    rdma: RdmaLane | None = None


@dataclass(frozen=True, slots=True)
class LinkEvents:
    """The callbacks of a link: with an answer, when what has no answer is to be sent once more, and when the other end
    can't be reached."""

    on_answer: OnAnswer
    on_reconnected: Callable[[], None]
    on_lost: OnLost


class TcpLink(ServerLink, Owner):
    """Payloads are sent from, and answers read in, the memory where they lie.

    When a connection breaks, what was on its way is lost, or is not: neither end can tell. So a new one takes its
    place, with nothing in its queues, and ``on_reconnected`` sends once more what has no answer. As long as there is
    none, ``on_lost`` is told every ``silence_s``, and this link goes on trying. The first one may take longer:
    ``BYTEPS_START_TIMEOUT_S`` while the cluster starts, ``Settings.patience_s`` if it ``is_late``, as all others are at
    work.

    A message that comes damaged is sent again. If an answer does, neither end can tell which request it was for, and
    the connection counts as broken. What comes damaged twice is an error.
    """

    def __init__(self, origin: LinkOrigin, target: LinkTarget, events: LinkEvents) -> None:
        settings = origin.settings
        loop = self._loop = origin.runtime.loop
        self._who = f"the {target.what} at {target.address}"
        has_slow_link = tuning.is_slow(target.link_mbit)
        self._silence_s = functools.partial(silence_s, settings, loop, has_slow_link)
        self._view = origin.contributions
        self._on_answer = events.on_answer
        self._on_reconnected = events.on_reconnected
        self._on_lost = events.on_lost
        self._unsent: list[PendingRequest] = []  # while there is no connection
        self._requests: dict[RoundName, PendingRequest] = {}  # sent, and not answered
        self.waiting_bytes = 0  # of these
        self._damaged: set[RoundName] = set()  # requests that came damaged, here or on an earlier connection
        self._suspects: set[RoundName] = set()  # one of their answers came damaged
        self._came_whole = 0  # answers since then
        self._opened = 0  # connections so far
        self._refusal = ""  # what was said on the attempts since
        self._is_late = target.is_late
        self._is_closed = False
        self.address = target.address
        there = DialTarget(target.address, self._who, target.group, has_slow_link, target.rail, target.source)
        self._dialer = origin.runtime.dialer(origin.context, loop, there, origin.sender, settings, self)
        if origin.rdma is not None:
            self._dialer.use_rdma(origin.rdma)
        first_s = settings.patience_s if target.is_late else max(settings.start_timeout_s, self._silence_s())
        loop.call_later(first_s, lambda: self._give_up(0, first_s))

    @property
    def is_open(self) -> bool:
        return self._dialer.is_open

    @property
    def descriptor(self) -> int:
        return self._dialer.descriptor

    @property
    def read_counters(self) -> TcpCounters | None:
        return self._dialer.read_counters

    def push(self, header: Header, payload: Block | None, offset: int, answer: Block | None) -> None:
        self._begin(PendingRequest(header, payload, offset))

    def tell(self, header: Header, body: bytes) -> None:
        self.ask(header, body)

    def ask(self, header: Header, body: bytes | memoryview | zmq.Frame) -> None:
        """Send a request whose bytes lie in no block."""
        self._begin(PendingRequest(header, None, 0, body.buffer if isinstance(body, zmq.Frame) else body))

    def _begin(self, request: PendingRequest) -> None:
        if self._dialer.is_open:
            self._send(request)
        else:
            self._unsent.append(request)

    def _send(self, request: PendingRequest) -> None:
        header, payload = request.header, request.payload
        if payload is None:
            request.number = self._dialer.send(header, request.body)
        else:
            nbytes = header.payload_nbytes
            request.number = self._dialer.send(header, self._view(payload, request.offset, nbytes))
            self.bytes_sent += nbytes
        if header.kind is Kind.WITHDRAW:
            self._forget(name_of(header))
            self._damaged.discard(name_of(header))
            self._suspects.discard(name_of(header))
        elif not (header.is_supply or header.kind in SHADOW_KINDS or header.kind in _UNANSWERED):
            name = name_of(header)
            self._forget(name)
            self._requests[name] = request
            self.waiting_bytes += header.length
            if len(self._requests) > _MOST_KEPT:
                self._forget(next(iter(self._requests)))

    def _forget(self, name: RoundName) -> None:
        if (request := self._requests.pop(name, None)) is not None:
            self.waiting_bytes -= request.header.length

    def has_asked(self, header: Header) -> bool:
        """A request of this name has been sent, and not been answered."""
        return name_of(header) in self._requests

    # ---- what the dialer says ------------------------------------------------------------------------------

    def on_open(self) -> None:
        self._opened += 1
        self._refusal = ""
        unsent, self._unsent = self._unsent, []
        for request in unsent:
            self._send(request)

    def on_message(self, header: Header, payload: zmq.Frame) -> None:
        if header.kind is not Kind.AWAITED:
            self.bytes_received += len(payload)
        if header.kind not in _TOLD:
            self._answered(name_of(header))
        self._on_answer(header, payload)

    def _answered(self, name: RoundName) -> None:
        self._forget(name)  # none: it says again what an earlier answer has said
        self._damaged.discard(name)
        if self._suspects:
            self._suspects.discard(name)
            self._came_whole += 1
            if self._came_whole >= _GOOD_AGAIN:
                self._suspects.clear()

    def on_damaged(self, number: int | None) -> None:
        if number is None:
            self._answer_damaged()
            return
        request = next((r for r in self._requests.values() if r.number == number), None)
        if request is None:
            return  # no answer is awaited for it
        what, name = f"a {request.header.kind.name} message to {self._who}", name_of(request.header)
        if name in self._damaged:
            raise IntegrityError(_DAMAGED.format(what))
        logger.warning("%s came damaged: it is sent again", what)
        self._damaged.add(name)
        self._send(request)

    def _answer_damaged(self) -> None:
        """It is not known which answer: it may be the second time for what is asked for again on this connection."""
        if not self._suspects.isdisjoint(self._requests):
            raise IntegrityError(_DAMAGED.format(f"an answer from {self._who}"))
        logger.warning("an answer from %s came damaged: it is asked for again", self._who)
        self._suspects.update(name for name, it in self._requests.items() if it.header.kind is not Kind.TAKEN)
        self._came_whole = 0
        self._dialer.reconnect()

    def share_damage(self, other: TcpLink) -> None:
        """What has come damaged on ``other``, another connection to the same service, has so on this one."""
        self._damaged, self._suspects = other._damaged, other._suspects

    def on_broken(self) -> None:
        logger.info("the connection to %s broke; connecting again", self._who)
        self._unsent.clear()
        self._requests.clear()
        self.waiting_bytes = 0
        opened, after_s = self._opened, self._silence_s()
        self._loop.call_later(after_s, lambda: self._give_up(opened, after_s))
        self._on_reconnected()

    def _give_up(self, opened: int, after_s: float) -> None:
        if not (self._is_closed or self._dialer.is_open) and opened == self._opened:
            self._on_lost(f"{self._who} can't be reached since {after_s:.3g} s{self._refusal}")
            more_s = self._silence_s()
            self._loop.call_later(more_s, lambda: self._give_up(opened, after_s + more_s))

    def on_refused(self, error: ProtocolError) -> None:
        """While the cluster forms, its configuration is wrong. Later, another process has the port of the
        service, which can't be reached any more."""
        if not (self._opened or self._is_late):
            raise error
        self._refusal = f": {error}"

    def close(self) -> None:
        self._is_closed = True
        self._dialer.close()


class LocalLink(ServerLink):
    """A channel to the summation service of this machine, which maps ``arena``: it reads contributions and
    writes answers there."""

    is_local = True

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        sender: int,
        settings: Settings,
        arena: Arena,
        on_answer: OnAnswer,
        on_lost: OnLost,
    ) -> None:
        self._loop = runtime.loop
        self._arena = arena
        self._announced = 0
        self._is_full = False  # the service has to read before it can be sent more
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._channel: Channel | None = None
        self._unsent: collections.deque[tuple[bytes, tuple[int, ...]]] = collections.deque()
        try:  # it listened before it became a member: if it does not now, it is gone
            self._channel = runtime.connect_local(name, _CONNECT_S)
            token = auth.token(settings, "local", str(sender))
            self._channel.send(Header(Kind.HELLO, sender).pack() + token.encode())
        except (PeerLostError, RendezvousError) as lost:
            self._lost(lost)
            return
        self._loop.add_reader(self._channel.fileno(), self._drain)

    @property
    def is_open(self) -> bool:
        return self._channel is not None

    def push(self, header: Header, payload: Block | None, offset: int, answer: Block | None) -> None:
        """After the service is gone: nothing. What it has not answered moves to another with the next epoch."""
        if payload is not None:
            header.segment, header.segment_offset = payload.segment, payload.offset + offset
            self.bytes_sent += header.payload_nbytes
        if answer is not None:
            header.answer_segment, header.answer_offset = answer.segment, answer.offset
        if self._channel is None:
            return
        while self._announced < len(self._arena.segments):
            segment = self._arena.segments[self._announced]
            hello = Header(Kind.SEGMENT, header.sender, segment=self._announced, length=segment.nbytes)
            self._unsent.append((hello.pack(), (segment.fd,)))
            self._announced += 1
        self._unsent.append((header.pack(), ()))
        if not self._is_full:
            self._flush()

    def tell(self, header: Header, body: bytes) -> None:
        if self._channel is not None:
            self._unsent.append((header.pack() + body, ()))
            if not self._is_full:
                self._flush()

    def _flush(self) -> None:
        """Send what the service takes. It may be frozen, or starting: this one must not wait for it."""
        try:
            while self._channel is not None and self._unsent and self._channel.try_send(*self._unsent[0]):
                self._unsent.popleft()
        except PeerLostError as lost:
            self._lost(lost)
        if self._channel is not None and self._is_full != bool(self._unsent):
            self._is_full = bool(self._unsent)
            if self._is_full:
                self._loop.add_writer(self._channel.fileno(), self._flush)
            else:
                self._loop.remove_writer(self._channel.fileno())

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
