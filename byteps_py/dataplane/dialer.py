"""The calling end of a data-plane connection: it connects, shakes hands, and does both again when that breaks.

Owned by the loop's thread. Each connection has a ZeroMQ socket of its own, so that no message of one connection ever
travels over the next. The owner sends again what has no answer, once ``on_open`` is called.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from byteps_py.config.addresses import bracketed, is_ipv6, place_of
from byteps_py.config.settings import Settings
from byteps_py.config.variables import MOST_RAILS
from byteps_py.dataplane.authenticator import show_password
from byteps_py.dataplane.handshake import WRONG, CallerHandshake, bound_to
from byteps_py.dataplane.link_usage import TcpCounters, descriptor_of
from byteps_py.dataplane.long_links import tune_descriptor
from byteps_py.dataplane.placed_messages import PlacedEnd, PlacedMessages
from byteps_py.dataplane.rdma_lane import RdmaLane
from byteps_py.dataplane.seal import DamagedError, Data, Seal
from byteps_py.errors import CommunicationError, ProtocolError
from byteps_py.system.log import logger
from byteps_py.system.loop import EventLoop
from byteps_py.system.machine import resolved
from byteps_py.wire.data_link import HEADER_BYTES, MAX_READ_BYTES, Header, Kind

#: Smaller payloads are copied. When ZeroMQ has sent memory that it did not copy, a thread of pyzmq wakes up and takes
#: the GIL, which costs more (64 KB messages on a busy machine: a tenth of a round's time).
COPY_BYTES = 256 << 10
_NOW, _NOW_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # combining enums takes a microsecond
_DRAIN = 64  # messages taken per wake-up before others get their turn
_SLACK_BYTES = 64 << 10
_RETRY_S = (0.01, 0.05, 0.2, 0.5)  # after each failed attempt in a row; the last one repeats
#: In a row. A listener with many unauthenticated callers may refuse a member once.
_MOST_REFUSALS = 3
#: Connections in a row on which no payload could be read by RDMA, in either direction.
_MOST_UNREAD = 5
_CONNECT_MS = 4_000  # TCP repeats a lost SYN after 1 and 3 s; on a full link an answer may take over a second
_HANDSHAKE_MS = 4_000
_KEEP_WARM_MS, _NO_TIMEOUT_MS = 150, 2**31 - 1
_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def silence_options(settings: Settings) -> dict[int, int]:
    """Options of a socket that let the system end a connection whose other end confirms nothing for
    ``settings.patience_s``, because the network loses everything, in one direction or in both.

    ZeroMQ's heartbeats can't do it: they wait behind messages, and only whole messages count as a sign of life. On a
    slow link that many machines share, a partition is on its way for longer than any timeout that one would want.

    Most of what needs no patience is noticed elsewhere: a process that ends closes its connections, and the scheduler
    hears nothing of one that is frozen.
    """
    return {
        zmq.TCP_MAXRT: int(1000 * settings.patience_s),
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: max(1, int(settings.patience_s / 2)),
        zmq.TCP_KEEPALIVE_INTVL: max(1, int(settings.patience_s / 4)),
    }


class Owner:
    """The callbacks of a Dialer. The loop's thread calls them; an exception in one ends the loop."""

    def on_addresses(self, addresses: Sequence[str]) -> None:
        """The other end listens at these as well. Called before ``on_open``, if there are any."""

    def on_open(self) -> None:
        """The connection is open, for the first time or again. Both ends have authenticated each other."""

    def on_message(self, header: Header, payload: zmq.Frame) -> None: ...

    def on_broken(self) -> None:
        """The connection has ended; a new one is being made."""

    def on_damaged(self, number: int | None) -> None:
        """Message ``number`` could not be read at the other end; None: one from there could not be read here."""

    def on_refused(self, error: ProtocolError) -> None:
        """Authentication has failed several times in a row, at either end. If this returns, the Dialer goes on
        trying."""

    def on_unreadable(self, error: CommunicationError) -> None:
        """Connections come about, and RDMA does not work on them, several times in a row."""
        raise error


@dataclass(frozen=True, slots=True)
class DialTarget:
    """The other end: its address, and ``who`` it is, for messages. ``group``: the group of ranks to which both belong
    (see listener.py; 0: there is none yet). ``is_slow``: of the link (tuning.py). ``rail``: which of the connections of
    a machine to it; ``source``: the own address that it comes from, empty: the system's choice."""

    address: str
    who: str
    group: int = 0
    is_slow: bool = False
    rail: int = 0
    source: str = ""


class Dialer:
    """Connects to ``target`` as machine ``sender``, at once, and again when the connection breaks."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        loop: EventLoop,
        target: DialTarget,
        sender: int,
        settings: Settings,
        owner: Owner,
    ) -> None:
        self._context = context
        self._loop = loop
        self._address, self._rail, self._source = target.address, target.rail, target.source
        self._sender = sender
        self._settings = settings
        self._owner = owner
        self._who = target.who
        self._group = target.group
        # After a pause of 0.2 s most congestion controls begin slowly again: every step of a training would. A slow
        # link is full with what they begin with, and what keeps all its connections warm would be a part of it.
        keeps_warm = {zmq.HEARTBEAT_IVL: _KEEP_WARM_MS, zmq.HEARTBEAT_TIMEOUT: _NO_TIMEOUT_MS}
        self._warmth = {} if target.is_slow else keeps_warm
        self._caller: CallerHandshake
        self._opening: Seal | None = None
        self._sealing: Seal | None = None
        self._is_welcome = False
        self.descriptor = -1  # of the connection, which ZeroMQ owns; -1: there is none
        self._failures = 0  # attempts in a row
        self._refusals = 0  # in a row
        self._is_closed = False
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes]
        self._lane: RdmaLane | None = None
        self._placed: PlacedMessages | None = None  # of this connection
        self._early: list[tuple[Header, zmq.Frame]] = []  # messages from before it was open
        self._unread = 0  # connections in a row on which RDMA did not work
        self._connect()

    def use_rdma(self, lane: RdmaLane) -> None:
        """From the next connection on, payloads travel by RDMA. Called before the loop goes on, so that it is the
        first one."""
        self._lane = lane

    @property
    def is_open(self) -> bool:
        """True while messages can be sent."""
        return self._is_welcome

    @property
    def read_counters(self) -> TcpCounters | None:
        """What the other end has read here by RDMA, over this connection; None: nothing travels so."""
        return self._placed.counters if self._placed is not None else None

    @property
    def failures(self) -> int:
        """The number of attempts in a row that have failed, or have made a connection that broke before it was open."""
        return self._failures

    def send(self, header: Header, payload: Data) -> int:
        """Send over an open connection. Payloads of COPY_BYTES and more are not copied. Returns the message's number.
        Never waits: a message on a connection that has just ended is lost, and ``on_broken`` follows. Raises
        ProtocolError if the connection is not open."""
        if not self._is_welcome or self._sealing is None or self._socket is None:
            raise ProtocolError(f"a message for {self._who} before its connection was open")
        packed = header.pack()
        placed = self._placed.place(self._sealing, packed, payload) if self._placed is not None else None
        number = self._sealing.number - 1 if placed is not None else self._sealing.number
        sealed, shown = placed or self._sealing.seal(packed, payload)
        try:
            self._socket.send(sealed, _NOW_MORE)
            self._socket.send(shown, _NOW, copy=len(shown) < COPY_BYTES)
        except zmq.Again:
            # The connection has ended, before the first part or between the two (then ZeroMQ has dropped the first
            # one). The monitor is about to report it, and then everything without an answer is sent again.
            return number
        return number

    # ---- the connection's life -----------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._is_closed:
            return
        bound = bound_to(self._address, self._rail)
        self._caller = CallerHandshake(self._settings, self._sender, bound, self._group)
        self._sealing = self._opening = None
        socket = self._socket = self._context.socket(zmq.DEALER)
        options = {
            zmq.LINGER: 0,
            zmq.IPV6: _needs_ipv6(self._address),
            zmq.MAXMSGSIZE: max(self._settings.max_partition_bytes, MAX_READ_BYTES) + _SLACK_BYTES,
            zmq.SNDHWM: 0,  # the credit is the limit
            zmq.RCVHWM: 0,
            zmq.RECONNECT_IVL: -1,
            zmq.CONNECT_TIMEOUT: _CONNECT_MS,
            zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
            **silence_options(self._settings),
            **self._warmth,
        }
        for option, value in options.items():
            socket.setsockopt(option, value)
        show_password(socket, self._settings, self._address)
        self._monitor = socket.get_monitor_socket(_EVENTS)
        try:
            there = self._address.removeprefix("tcp://")
            socket.connect(f"tcp://{bracketed(self._source)}:0;{there}" if self._source else self._address)
        except zmq.ZMQError as error:
            self._hang_up()
            raise ProtocolError(f"{self._who} can't be reached at {self._address[:80]!r}: {error}") from error
        self._say(Kind.HELLO, self._caller.hello)
        self._loop.add_reader(self._monitor, self._watch)
        self._loop.add_reader(socket, self._drain)

    def _watch(self) -> None:
        """The connection broke, or was never made."""
        socket = self._socket
        while self._socket is socket and self._socket is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            while self._socket is socket and self._take():
                pass  # messages that arrived before the end are still valid
            if self._socket is not socket:
                return
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._refused(f"turned this process away: {WRONG}")
            else:
                self._again()

    def _again(self) -> None:
        """End this connection, and make a new one soon."""
        was_open = self.is_open
        self._hang_up()
        self._loop.call_later(_RETRY_S[min(self._failures, len(_RETRY_S) - 1)], self._connect)
        self._failures += 1
        if was_open:
            self._owner.on_broken()
        if self._unread >= _MOST_UNREAD:
            self._unread = 0
            self._owner.on_unreadable(CommunicationError(
                f"RDMA to {self._who} does not work: {_MOST_UNREAD} connections in a row broke before a payload was "
                "read. See the log of both ends; check that their network cards reach each other (ibv_devinfo, "
                "UCX_NET_DEVICES), or unset DMLC_ENABLE_RDMA"
            ))  # fmt: skip

    def reconnect(self) -> None:
        """End this connection, which does not work, and make a new one."""
        if self._socket is not None:
            self._again()

    def _hang_up(self) -> None:
        if self._placed is not None:
            self._placed.close()
            if self._placed.was_tried:
                self._unread = 0 if self._placed.has_worked else self._unread + 1
        self._placed = None
        self._early.clear()
        self._sealing = self._opening = None
        self._is_welcome, self.descriptor = False, -1
        socket, self._socket = self._socket, None
        if socket is not None:
            self._loop.remove(self._monitor)
            self._loop.remove(socket)
            socket.disable_monitor()
            self._monitor.close(0)
            socket.close()

    def close(self) -> None:
        """End the connection for good. No callback is called afterwards."""
        self._is_closed = True
        self._hang_up()

    # ---- messages ------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        for _ in range(_DRAIN):
            if not self._take():
                return

    def _take(self) -> bool:
        if self._socket is None:
            return False
        try:
            frames = [self._socket.recv(_NOW, copy=False)]
            while frames[-1].more:
                frames.append(self._socket.recv(copy=False))
        except zmq.Again:
            return False
        if not self._is_welcome or self._opening is None:
            self._shake_hands(frames)
            return True
        if len(frames) != 2:  # not a sealed message: the connection does not work
            self._again()
            return True
        try:
            packed, payload = self._opening.open(frames[0].bytes, frames[1])
        except DamagedError:
            self._owner.on_damaged(None)
            return True
        header = Header.unpack(packed)
        if self._placed is None:
            self._deliver(header, payload)
            return True
        self._placed.arrived(header, payload)
        return True

    def _deliver(self, header: Header, payload: zmq.Frame) -> None:
        if header.kind is Kind.DAMAGED:
            self._owner.on_damaged(header.round)
        else:
            self._owner.on_message(header, payload)

    def _shake_hands(self, frames: list[zmq.Frame]) -> None:
        if self._placed is not None and self._opening is not None:
            self._hear_of_memory(self._placed, self._opening, frames)
            return
        try:
            if is_asked := self._opening is None:
                proof = self._prove(_said(frames, Kind.CHALLENGE))
            else:
                proof = _said(frames, Kind.WELCOME, self._opening)
                _check_addresses(proof)
                self.descriptor = descriptor_of(frames[0])
        except ProtocolError as error:
            self._refused(str(error))
            return
        if is_asked:
            self._say(Kind.PROOF, proof)
            return
        tune_descriptor(self.descriptor, self._settings)
        if proof:
            self._owner.on_addresses(proof.decode().split("\n"))
        if self._lane is not None and self._opening is not None:
            end = _DialersEnd(self)
            most_bytes = max(self._settings.max_partition_bytes, MAX_READ_BYTES)
            self._placed = PlacedMessages(self._lane, self._opening, end, most_bytes)
            self._placed.introduce()
        else:
            self._opened()

    def _opened(self) -> None:
        self._failures = self._refusals = 0
        self._is_welcome = True
        self._owner.on_open()

    def _hear_of_memory(self, placed: PlacedMessages, opening: Seal, frames: list[zmq.Frame]) -> None:
        """The listener's answer to what it may read, which is the last part of the handshake with RDMA."""
        try:
            if len(frames) != 2:
                raise ProtocolError(f"sent {len(frames)} frames instead of a {Kind.MEMORY.name}")
            packed, payload = opening.open(frames[0].bytes, frames[1])
            header = Header.unpack(packed)
            if header.kind is Kind.REFUSED:
                reason = payload.bytes.decode(errors="replace").partition("\n")[2]
                raise ProtocolError(f"does not take part in RDMA: {reason}")
            if header.kind is not Kind.MEMORY:
                self._early.append((header, payload))  # it speaks first
                return
            placed.met(payload.bytes)
        except ProtocolError as error:
            self._refused(str(error))
            return
        if not len(payload):
            logger.warning("%s is without RDMA: tensors travel over TCP. Set DMLC_ENABLE_RDMA=1 there", self._who)
            placed.close()
            self._placed = None
        early, self._early = self._early, []
        self._opened()
        for message in early:
            self._deliver(*message)

    def say(self, kind: Kind, payload: bytes) -> None:
        """Send a message of PlacedMessages. Never waits."""
        if self._socket is not None and self._sealing is not None:
            sealed, shown = self._sealing.seal(Header(kind, self._sender).pack(), payload)
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart([sealed, shown], _NOW)

    def _say(self, kind: Kind, text: bytes) -> None:
        """Send a part of the handshake. Never waits. If the connection has ended, the monitor is about to report it."""
        if self._socket is not None:
            with contextlib.suppress(zmq.Again):
                header = Header(kind, self._sender, self._group, index=self._rail)
                self._socket.send_multipart([header.pack(), text], _NOW)

    def _prove(self, challenge: bytes) -> bytes:
        """The proof to send. Raises ProtocolError if the listener does not know the secret."""
        try:
            proof, self._sealing, self._opening = self._caller.answer(challenge)
        except ProtocolError as error:
            raise ProtocolError(f"could not prove that it belongs to this cluster: {error}") from None
        return proof

    def _refused(self, why: str) -> None:
        self._refusals += 1
        if self._socket is not None:
            self._again()
        if self._refusals >= _MOST_REFUSALS:
            self._owner.on_refused(ProtocolError(f"{self._who} {why}"))


class _DialersEnd(PlacedEnd):
    """Of one connection of a Dialer."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer, self.loop = dialer, dialer._loop

    def say(self, kind: Kind, payload: bytes) -> None:
        self._dialer.say(kind, payload)

    def deliver(self, header: Header, payload: zmq.Frame) -> None:
        self._dialer._deliver(header, payload)

    def damaged(self, damage: DamagedError) -> None:
        self._dialer._owner.on_damaged(None)

    def malformed(self, error: ProtocolError) -> None:
        self.broken(str(error))

    def broken(self, why: str) -> None:
        logger.warning("%s: %s", self._dialer._who, why)
        self._dialer.reconnect()


def _check_addresses(text: bytes) -> None:
    """Raises ProtocolError for what is no list of other addresses in a WELCOME."""
    try:
        addresses = text.decode().split("\n") if text else []
        for address in addresses:
            place_of(address.removeprefix("tcp://"))
    except ValueError:
        raise ProtocolError("sent a WELCOME with something else than addresses") from None
    if len(addresses) >= MOST_RAILS:
        raise ProtocolError(f"sent a WELCOME with {len(addresses)} further addresses; {MOST_RAILS - 1} are allowed")


@functools.lru_cache(1024)  # the answer for a name may take the time of a question to a name server
def _needs_ipv6(endpoint: str) -> bool:
    """True if the listener at ``tcp://host:port`` listens by IPv6. ZeroMQ has to be told: with its option, it asks for
    addresses of IPv6 only, and makes sockets of IPv6 also for those of IPv4."""
    try:
        return is_ipv6(resolved(place_of(endpoint.removeprefix("tcp://"))[0]))
    except ValueError:  # ZeroMQ says what is wrong with it
        return False


def _said(frames: list[zmq.Frame], due: Kind, opening: Seal | None = None) -> bytes:
    """The payload of the listener's part of the handshake, which is sealed if ``opening`` is given. Raises
    ProtocolError if the message is not the one that is ``due``."""
    if len(frames) != 2:
        raise ProtocolError(f"sent {len(frames)} frames instead of a {due.name}")
    packed, payload = frames[0].bytes, frames[1]
    is_bare = len(packed) == HEADER_BYTES  # as a refusal always is
    try:
        if opening is not None and not is_bare:
            packed, payload = opening.open(packed, payload)
        header = Header.unpack(packed)
    except ProtocolError as error:
        raise ProtocolError(f"sent a message that is not a {due.name}: {error}") from None
    if header.kind is Kind.REFUSED:
        raise ProtocolError(f"turned this process away: {payload.bytes.decode(errors='replace').partition(chr(10))[2]}")
    if header.kind is not due:
        raise ProtocolError(f"sent {header.kind.name} instead of a {due.name}")
    if opening is not None and is_bare:
        raise ProtocolError(f"sent a {due.name} that is not sealed")
    return payload.bytes
