"""Listening on the data plane over TCP: one ZeroMQ ROUTER, and the CSs that have authenticated themselves.

Owns the socket, the connections and the framing. Must not know what messages mean. Loop thread only.
Nothing that a peer sends ends the process: messages that can't be understood are dropped and counted.

A machine is known by its index in a group of ranks; the group is named by the epoch that it began with. In an elastic
job one group follows another, and the machines of each have new indices: a machine that wakes up in a group that is
over must not be taken for another one. A reader (see READER_KINDS) is no machine: there may be several.

A machine may have several network interfaces. The listener then listens at an address of each, and its WELCOME names
the others; a caller makes one connection for each, its *rails* (worker/io/railed_link.py). Rail 0 is at the address
that everybody knows, and gets what is no answer.
"""

from __future__ import annotations

import errno
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from byteps_py.config.addresses import bracketed, is_ipv6, joined
from byteps_py.config.settings import Settings
from byteps_py.config.variables import MOST_RAILS
from byteps_py.dataplane.authenticator import Authenticator, seed_routing_ids
from byteps_py.dataplane.dialer import silence_options
from byteps_py.dataplane.handshake import WRONG, Challenge, ListenerHandshake, bound_to
from byteps_py.dataplane.link_usage import UsageMeter, counters_of_reads
from byteps_py.dataplane.long_links import tune_descriptor
from byteps_py.dataplane.placed_messages import PlacedEnd, PlacedMessages, PlacedTracker
from byteps_py.dataplane.rdma_lane import RdmaLane
from byteps_py.dataplane.seal import DamagedError, Seal
from byteps_py.dataplane.traffic import Limiter, Traffic
from byteps_py.errors import ConfigurationError, ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.security.unauthenticated_connections import PATIENCE_S, UnauthenticatedConnections
from byteps_py.system.log import logger
from byteps_py.system.loop import EventLoop
from byteps_py.system.machine import rails, resolved
from byteps_py.tensor_codec import MAX_BLOCK_BYTES
from byteps_py.wire.data_link import READER, READER_KINDS, Header, Kind

_NOW, _NOW_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # combining enums takes a microsecond
# Messages taken in one go before timers and other sockets get their turn.
_BATCH = 64
# A message may be this much longer than a partition. Longer ones never reach this process's memory.
_SLACK_BYTES = 4096
# A machine sends few probes before the first one returns, and machines take turns.
_HELD_PROBES = 64
# Refusals to unauthenticated peers per second: enough to show a wrong configuration, too few to be abused.
_STRANGER_REFUSALS_PER_S = 100
#: Handshakes at the same time. If there are more, the oldest must begin again.
_MOST_CHALLENGES = 256
#: Of how many disconnected peers late messages are dropped without a log line.
_REMEMBERED = 256
#: How many ports are tried, to find one that is free at all addresses.
_MOST_PORTS = 20
#: Damaged messages in a row after which a connection is cut. On the next one the peer sends everything again.
_MOST_DAMAGED = 16


class Peer(ABC):
    """One connection of a CS. ``machine``: its index, proven by its HELLO. ``rail``: which of that machine's."""

    machine: int
    rail = 0

    @abstractmethod
    def answer(self, header: Header, result: zmq.Frame | None, digest: bytes = b"") -> None:
        """Send a result; None: it lies where the peer wants it, or the peer has it. ``digest``: of the result, if one
        was made (seal.py). Never blocks."""

    @abstractmethod
    def tell(self, header: Header, payload: bytes = b"") -> None:
        """Send a message that is not an answer. Never blocks."""

    @abstractmethod
    def refuse(self, header: Header, reason: str) -> None:
        """Send why a message was not accepted: the name of an error's class, line break, sentence. Never blocks."""


def reply(header: Header, kind: Kind) -> bytes:
    """A request's header as the header of its reply: only the kind differs. Changes ``header``."""
    header.kind = kind
    return header.pack()


class RemotePeer(Peer):
    """A CS that is connected over TCP. ``age``: later groups, and later connections of a group, have higher ones."""

    def __init__(
        self, network: DataListener, identity: bytes, machine: int, seals: tuple[Seal, Seal], age: tuple[int, int]
    ) -> None:
        self._network = network
        self.identity = identity
        self.machine = machine
        self.age = age
        self.opening, self.sealing = seals
        self.descriptor = -1  # of the connection, which ZeroMQ owns
        self.damaged = 0  # messages in a row
        self.placed: PlacedMessages | None = None  # by RDMA

    def lend(self, header: Header, view: memoryview) -> zmq.MessageTracker | PlacedTracker | None:
        """Like ``answer``, from memory that may change once the tracker is done. None: the peer has disconnected."""
        return self._network.send_tracked(self, reply(header, Kind.ANSWER), view)

    def answer(self, header: Header, result: zmq.Frame | None, digest: bytes = b"") -> None:
        self.give(header, result, digest)

    def give(self, header: Header, result: zmq.Frame | None, digest: bytes = b"") -> bool:
        """Like ``answer``. False: the peer has disconnected."""
        return self._network.send_result(self, reply(header, Kind.ANSWER), result, digest)

    def tell(self, header: Header, payload: bytes = b"") -> None:
        self._network.send(self, header.pack(), zmq.Frame(payload))

    def refuse(self, header: Header, reason: str) -> None:
        self._network.send(self, reply(header, Kind.REFUSED), zmq.Frame(reason.encode()))


class DataListener:
    """Listens on ``tcp://host``, any port. ``on_message``: a message of one of ``kinds`` has arrived; ``on_gone``: a
    peer has disconnected. Raises ConfigurationError if it can't listen there."""

    #: Answers that wait for a peer to read them; a peer with more is disconnected. A machine keeps 8192 requests to
    #: resend.
    most_unread = 1 << 16

    def __init__(
        self,
        host: str,
        settings: Settings,
        traffic: Traffic,
        kinds: frozenset[Kind],
        on_message: Callable[[Header, Peer, zmq.Frame], None],
        on_gone: Callable[[Peer], None],
    ) -> None:
        self._settings = settings
        self._traffic = traffic
        self._kinds = kinds - READER_KINDS
        self._readers_kinds = kinds & READER_KINDS
        self._on_message = on_message
        self._on_gone = on_gone
        self._peers: dict[bytes, RemotePeer] = {}
        self._by_rail: dict[tuple[int, int], RemotePeer] = {}  # by machine and rail: its latest connection
        self._usage = UsageMeter()
        self._handshake = ListenerHandshake(settings)
        #: Makes the digest of a payload that many peers get. Any thread.
        self.digest = self._handshake.digest
        self._challenges: dict[bytes, tuple[int, Challenge, int]] = {}  # number, challenge, rail
        self._numbers = itertools.count()
        self._departed: deque[bytes] = deque(maxlen=_REMEMBERED)  # identities
        # Probes wait until this process has loaded its kernels: else they would measure the processor, not the link.
        self._held_probes: list[tuple[RemotePeer, Header, zmq.Frame]] | None = []
        self._refusals = Limiter(_STRANGER_REFUSALS_PER_S)
        self.loop: EventLoop
        self._lane: RdmaLane | None = None
        self._awaits_lane = False
        self._asked_early: list[tuple[RemotePeer, Header, bytes]] = []  # what they told of their memory
        self._without_rdma: set[int] = set()  # machines of which the log has said so
        #: Of rail 0.
        self.address = ""
        self._more_addresses: list[str] = []  # of the others
        self._context = zmq.Context(io_threads=2)
        self._authenticator = Authenticator(self._context, settings, lambda: self.addresses, self._on_unauthenticated)
        seed_routing_ids()
        self.socket = self._context.socket(zmq.ROUTER)
        self._authenticator.guard(self.socket)
        self._configure()
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._connected: set[int] = set()  # descriptors
        self._readers: dict[int, bytes] = {}  # identities by descriptor
        self._strangers = UnauthenticatedConnections()
        self._listen([host, *rails(settings)[1:]])

    def _listen(self, hosts: list[str]) -> None:
        """At one port of all ``hosts``. Raises ConfigurationError."""
        for left in reversed(range(_MOST_PORTS)):
            bound: list[str] = []
            try:
                for host in hosts:
                    at = resolved(host)
                    self.socket.setsockopt(zmq.IPV6, is_ipv6(at))  # with it, sockets of IPv4 are of IPv6 as well
                    if not bound:
                        self._strangers.port = self.socket.bind_to_random_port(f"tcp://{bracketed(at)}")
                    else:
                        self.socket.bind(f"tcp://{joined(at, self._strangers.port)}")
                    bound.append(f"tcp://{joined(at, self._strangers.port)}")
            except zmq.ZMQError as error:
                if left and bound and error.errno == errno.EADDRINUSE:  # another program has the port at one of them
                    for endpoint in bound:
                        self.socket.unbind(endpoint)
                    continue
                self.close()
                raise ConfigurationError(
                    f"this process can't listen at {host}: {zmq.strerror(error.errno or 0)}. DMLC_NODE_HOST, or else "
                    "DMLC_INTERFACE or BYTEPS_INTERFACES, must name an address of this machine"
                ) from error
            break
        self.address, *self._more_addresses = (f"tcp://{joined(host, self._strangers.port)}" for host in hosts)

    def _configure(self) -> None:
        options = {
            zmq.LINGER: 0,
            zmq.ROUTER_MANDATORY: 1,  # a message to a disconnected peer is an error
            zmq.MAXMSGSIZE: max(self._settings.max_partition_bytes, MAX_BLOCK_BYTES) + _SLACK_BYTES,
            zmq.HANDSHAKE_IVL: int(PATIENCE_S * 1000),
            **silence_options(self._settings),
            zmq.RCVHWM: 1024,  # in messages; what a CS has in flight is limited in bytes by its own credit
            # Far more than any peer asks for at once. A peer that goes on asking and reads no answers is disconnected.
            zmq.SNDHWM: self.most_unread,
        }
        for option, value in options.items():
            self.socket.setsockopt(option, value)

    def use_rdma(self, lane: RdmaLane) -> None:
        """Payloads to and from callers that want it travel by RDMA. Called before ``attach``, or after
        ``await_rdma``."""
        self._lane, self._awaits_lane = lane, False
        asked, self._asked_early = self._asked_early, []
        for peer, header, description in asked:
            if peer.identity in self._peers:
                try:
                    self._hear_of_memory(peer, header, description)
                except ProtocolError as error:
                    self._traffic.turned_away(f"machine {peer.machine}", error)

    def await_rdma(self) -> None:
        """``use_rdma`` follows: a caller that wants RDMA waits until then. Connections that had it are made again."""
        for peer in self._by_rail.values():
            if peer.placed is not None and peer.identity in self._peers and peer.descriptor >= 0:
                self._cut(peer, peer.descriptor)
            self._end_rdma(peer)
        self._lane, self._awaits_lane = None, True

    def attach(self, loop: EventLoop) -> None:
        """Let ``loop`` read the sockets. Its thread owns this object."""
        self.loop = loop
        loop.add_reader(self.socket, self.on_readable)
        loop.add_reader(self.monitor, self.on_monitor)
        self._authenticator.attach(loop)
        self._strangers.watch(loop.call_later)

    def detach(self, loop: EventLoop) -> None:
        """Stop reading the sockets in ``loop``."""
        for socket in (self.socket, self.monitor, self._authenticator.socket):
            loop.remove(socket)

    def peer_of(self, machine: int) -> Peer | None:
        """The latest connection of a machine on rail 0; None if it has none."""
        peer = self._by_rail.get((machine, 0))
        return peer if peer is not None and peer.identity in self._peers else None

    def link_usage(self) -> list[pb.LinkUsage]:
        """The bytes sent to each machine since the last call: see UsageMeter. With RDMA: those read by it."""
        connections = [(machine, peer.descriptor) for (machine, _), peer in self._by_rail.items()]
        if self._lane is None:
            return self._usage.report(connections)
        peers = self._by_rail.values()
        found = {each.descriptor: each.placed.counters for each in peers if each.placed is not None}
        return self._usage.report(connections, counters_of_reads(found))

    @property
    def addresses(self) -> list[str]:
        """Of all rails."""
        return [self.address, *self._more_addresses]

    @property
    def connections(self) -> int:
        """Number of authenticated machines that are connected, as far as the monitor has reported."""
        return len(self._connected) - len(self._strangers) - len(self._readers)

    def on_monitor(self) -> None:
        """The monitor socket can be read: peers have connected or disconnected."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            fd = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                if self._strangers.add(fd):
                    self._connected.add(fd)
            else:
                self._connected.discard(fd)
                self._strangers.discard(fd)
                for peer in self._by_rail.values():
                    if peer.descriptor == fd:
                        peer.descriptor = -1  # by the next time, it may be another connection's
                        self._end_rdma(peer)
                if (identity := self._readers.pop(fd, None)) is not None:
                    self._peers.pop(identity, None)
                    self._departed.append(identity)

    def _on_unauthenticated(self, ip: str) -> None:
        self._traffic.refused(f"an unknown process at {ip}", ip, WRONG)

    def on_readable(self) -> None:
        """The socket can be read: take some messages."""
        for _ in range(_BATCH):
            try:
                frames = [self.socket.recv(_NOW, copy=False)]
            except zmq.Again:
                return
            while frames[-1].more:
                frames.append(self.socket.recv(copy=False))
            self._receive(frames[0].bytes, frames[1:])

    def _receive(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        peer = self._peers.get(identity)
        try:
            if peer is None and identity in self._departed:
                return  # its last messages; on its next connection it sends again what has no answer
            if peer is None:
                self._greet(identity, frames)
            else:
                self._open(peer, frames)
        except ProtocolError as error:
            self._traffic.turned_away(f"machine {peer.machine}" if peer else "an unknown process", error)

    def _open(self, peer: RemotePeer, frames: list[zmq.Frame]) -> None:
        """A message of a peer. Raises ProtocolError for one that no correct peer sends."""
        if len(frames) != 2:
            raise ProtocolError(f"the message has {len(frames)} parts, not a header and a payload")
        try:
            packed, payload = peer.opening.open(frames[0].bytes, frames[1])
        except DamagedError as damage:
            self._damaged(peer, damage, int(frames[1].get(zmq.SRCFD)))
            return
        header = Header.unpack(packed)
        if peer.placed is not None:
            peer.placed.arrived(header, payload)
        else:
            self.deliver(peer, header, payload)

    def deliver(self, peer: RemotePeer, header: Header, payload: zmq.Frame) -> None:
        """A message of a peer, with its payload. Raises ProtocolError for one that no correct peer sends."""
        peer.damaged = 0
        is_reader = peer.machine == READER
        if header.kind is Kind.PROBE:
            self._probed(peer, header, payload)
        elif header.kind is Kind.MEMORY and not is_reader:
            self._hear_of_memory(peer, header, payload.bytes)
        elif header.kind not in (self._readers_kinds if is_reader else self._kinds) or header.sender != peer.machine:
            name = header.kind.name
            text = f"machine {peer.machine} must not send {name} as machine {header.sender}"
            peer.refuse(header, f"{ProtocolError.__name__}\n{text}")
            raise ProtocolError(text)
        elif is_reader or peer is self._by_rail.get((peer.machine, peer.rail)):
            self._traffic.bytes_received += len(payload)
            if peer.placed is None and not is_reader:
                self._note_no_rdma(peer, len(payload))
            self._on_message(header, peer, payload)
        # Else its machine has connected again, and sends again there what has no answer: an answer on this connection
        # would be lost. Or its group is over, and the scheduler will tell it.

    def _note_no_rdma(self, peer: RemotePeer, nbytes: int) -> None:
        if self._lane is not None and nbytes >= self._lane.least_bytes and peer.machine not in self._without_rdma:
            self._without_rdma.add(peer.machine)
            logger.warning(
                "machine %d is without RDMA: tensors travel over TCP. Set DMLC_ENABLE_RDMA=1 there", peer.machine
            )

    def _hear_of_memory(self, peer: RemotePeer, header: Header, description: bytes) -> None:
        """A peer tells what may be read there, and gets to know the same of this process. Raises ProtocolError."""
        if self._awaits_lane:
            self._asked_early.append((peer, header, description))
            return
        if self._lane is None:
            self.send(peer, Header(Kind.MEMORY, peer.machine).pack(), zmq.Frame())
            return
        most_bytes = max(self._settings.max_partition_bytes, MAX_BLOCK_BYTES)
        placed = PlacedMessages(self._lane, peer.opening, _ListenersEnd(self, peer), most_bytes)
        try:
            placed.met(description)
        except ProtocolError as error:
            peer.refuse(header, f"{ProtocolError.__name__}\n{error}")
            raise
        peer.placed = placed
        placed.introduce()

    def _damaged(self, peer: RemotePeer, damage: DamagedError, fd: int) -> None:
        """Let the peer send a damaged message again. A peer that sends only damaged ones is not a member, or works
        again after the next handshake: it is disconnected."""
        peer.damaged += 1
        self._traffic.turned_away(f"machine {peer.machine}", damage)
        self.send(peer, Header(Kind.DAMAGED, peer.machine, round=damage.number).pack(), zmq.Frame())
        if peer.damaged >= _MOST_DAMAGED and peer.identity in self._peers:
            self._expel(peer, fd)

    def _expel(self, peer: RemotePeer, fd: int) -> None:
        """End the connection of a peer, which can make a new one."""
        self._cut(peer, fd)
        self._gone(peer)

    def _cut(self, peer: RemotePeer, fd: int) -> None:
        del self._peers[peer.identity]
        self._departed.append(peer.identity)
        self.on_monitor()  # later events of this descriptor are about this connection
        self._strangers.expel(fd)

    def _gone(self, peer: RemotePeer) -> None:
        self._end_rdma(peer)
        self._on_gone(peer)

    def _end_rdma(self, peer: RemotePeer) -> None:
        if peer.placed is not None:
            peer.placed.close()
        self._asked_early = [asked for asked in self._asked_early if asked[0] is not peer]

    def end(self, peer: RemotePeer, why: str) -> None:
        """The connection of a peer does not work."""
        self._traffic.turned_away(f"machine {peer.machine}", why)
        if peer.identity in self._peers and peer.descriptor >= 0:
            self._expel(peer, peer.descriptor)
        else:
            self._end_rdma(peer)

    # ---- handshake ------------------------------------------------------------------------------------------

    def _greet(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        """A message of a connection that is not authenticated yet. Raises ProtocolError if it is refused."""
        if len(frames) != 2:
            raise ProtocolError(f"the message has {len(frames)} parts, not a header and a payload")
        header, said = Header.unpack(frames[0].buffer), frames[1]
        try:
            if header.kind is Kind.HELLO:
                self._challenge(identity, header, said)
            elif header.kind is Kind.PROOF:
                self._welcome(identity, header, said)
            else:
                raise ProtocolError("no HELLO was accepted on this connection")
        except ProtocolError as error:
            if self._refusals.allow():
                self._say(identity, reply(header, Kind.REFUSED), f"{ProtocolError.__name__}\n{error}".encode())
            raise ProtocolError(f"(it calls itself machine {header.sender}) {error}") from None

    def _challenge(self, identity: bytes, header: Header, said: zmq.Frame) -> None:
        if identity[:1] != b"\0":
            raise ProtocolError("it has chosen its own ZeroMQ identity, which another peer may have")
        if header.sender == READER and not self._readers_kinds:
            raise ProtocolError("this is not a server, which has states to read")
        if header.index >= MOST_RAILS:
            raise ProtocolError(f"it calls itself rail {header.index} of a machine; {MOST_RAILS} are allowed")
        bound = bound_to(self.addresses[header.index % len(self.addresses)], header.index)
        text, challenge = self._handshake.challenge(said.bytes, header.sender, bound, header.epoch)
        self._challenges.pop(identity, None)
        if len(self._challenges) >= _MOST_CHALLENGES:
            del self._challenges[next(iter(self._challenges))]
        self._challenges[identity] = (next(self._numbers), challenge, header.index)
        self._say(identity, Header(Kind.CHALLENGE, header.sender).pack(), text)

    def _welcome(self, identity: bytes, header: Header, said: zmq.Frame) -> None:
        number, challenge, rail = self._challenges.pop(identity, (0, None, 0))
        if challenge is None or challenge.machine != header.sender:
            raise ProtocolError("it was not asked for a proof, or its proof arrived too late")
        seals, age = challenge.accept(said.bytes), (challenge.group, number)
        peer = self._peers[identity] = RemotePeer(self, identity, header.sender, seals, age)
        peer.rail = rail
        others = zmq.Frame("\n".join(self._more_addresses).encode())
        self.send(peer, Header(Kind.WELCOME, peer.machine).pack(), others)  # before anything else to it
        if peer.machine != READER:
            self._enter(peer)
        self.on_monitor()  # later events of this descriptor are about this connection
        fd = peer.descriptor = int(said.get(zmq.SRCFD))
        tune_descriptor(fd, self._settings)
        self._strangers.admit(fd)
        if peer.machine == READER:
            self._readers[fd] = identity
        logger.debug("machine %d has connected", header.sender)

    def _enter(self, peer: RemotePeer) -> None:
        """A machine has connected. Requests on its earlier connection can't be answered any more. With rail 0, all its
        other rails are over as well: the machine sends unanswered requests again over any of the new ones."""
        main, key = self._by_rail.get((peer.machine, 0)), (peer.machine, peer.rail)
        # If a connection ends and the next begins at once, messages of the first may be read after those of the second.
        latest = self._by_rail.get(key)
        if latest is not None and latest.age > peer.age:
            return
        if peer.rail and (main is None or main.age[0] != peer.age[0]):
            return  # of a group that is over
        over = [each for each in self._by_rail if each == key or (each[0] == peer.machine and not peer.rail)]
        gone = [self._by_rail.pop(each) for each in over]
        self._by_rail[key] = peer
        for each in gone:
            self._gone(each)

    # ---- probes --------------------------------------------------------------------------------------------

    def _probed(self, peer: RemotePeer, header: Header, payload: zmq.Frame) -> None:
        if self._held_probes is None:
            self.send(peer, header.pack(), payload)
        elif len(self._held_probes) < _HELD_PROBES:
            self._held_probes.append((peer, header, payload))

    def open_echo(self) -> None:
        """From now on probes are echoed at once."""
        held, self._held_probes = self._held_probes or [], None
        for probe in held:
            self._probed(*probe)

    # ---- sending -------------------------------------------------------------------------------------------

    def _say(self, identity: bytes, header: bytes, text: bytes) -> None:
        """Send a message of the handshake, before there are keys."""
        if self._address_to(identity):
            self.socket.send(header, zmq.NOBLOCK | zmq.SNDMORE)
            self.socket.send(text, zmq.NOBLOCK)

    def send(self, peer: RemotePeer, header: bytes, payload: zmq.Frame, digest: bytes = b"") -> bool:
        """Send without waiting. False: the peer has disconnected; it is forgotten, and ``on_gone`` is called."""
        placed = peer.placed.place(peer.sealing, header, payload.buffer, digest) if peer.placed is not None else None
        if not self._address_to(peer.identity):
            return False
        if placed is not None:
            self.socket.send(placed[0], _NOW_MORE)
            self.socket.send(placed[1], _NOW)
            return True
        sealed, shown = peer.sealing.seal(header, payload.buffer, digest)
        self.socket.send(sealed, _NOW_MORE)
        self.socket.send(payload if shown is payload.buffer else shown, _NOW, copy=False)
        return True

    def _address_to(self, identity: bytes) -> bool:
        """Begin a message to a peer. False if it has disconnected."""
        try:
            self.socket.send(identity, _NOW_MORE)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            if peer := self._peers.pop(identity, None):
                logger.info("machine %d has disconnected", peer.machine)
                self._departed.append(identity)
                self._gone(peer)
            return False
        return True

    def send_tracked(
        self, peer: RemotePeer, header: bytes, payload: memoryview
    ) -> zmq.MessageTracker | PlacedTracker | None:
        """Send ``payload`` without copying it; the tracker says when it may change. None: the peer has disconnected."""
        if peer.placed is not None and (placed := peer.placed.place(peer.sealing, header, payload)) is not None:
            tracker = PlacedTracker(peer.placed, peer.sealing.number - 1)
            if not self._address_to(peer.identity):
                return None
            self._traffic.bytes_sent += len(payload)
            self.socket.send(placed[0], _NOW_MORE)
            self.socket.send(placed[1], _NOW)
            return tracker
        if not self._address_to(peer.identity):
            return None
        sealed, shown = peer.sealing.seal(header, payload)
        self.socket.send(sealed, zmq.NOBLOCK | zmq.SNDMORE)
        self._traffic.bytes_sent += len(payload)
        return self.socket.send(shown, zmq.NOBLOCK, copy=False, track=True)

    def send_result(self, peer: RemotePeer, header: bytes, result: zmq.Frame | None, digest: bytes = b"") -> bool:
        """Send an answer, and count it. False: the peer has disconnected."""
        if result is None:
            return self.send(peer, header, zmq.Frame())
        self._traffic.bytes_sent += len(result)
        return self.send(peer, header, result, digest)

    def close(self) -> None:
        """End all connections and release the port."""
        for peer in (*self._peers.values(), *self._by_rail.values()):
            self._end_rdma(peer)
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()
        self._authenticator.close()
        self._context.term()


class _ListenersEnd(PlacedEnd):
    """Of one peer of a DataListener."""

    def __init__(self, listener: DataListener, peer: RemotePeer) -> None:
        self._listener, self._peer = listener, peer
        self.loop = listener.loop

    def say(self, kind: Kind, payload: bytes) -> None:
        self._listener.send(self._peer, Header(kind, self._peer.machine).pack(), zmq.Frame(payload))

    def deliver(self, header: Header, payload: zmq.Frame) -> None:
        try:
            self._listener.deliver(self._peer, header, payload)
        except ProtocolError as error:
            self._listener._traffic.turned_away(f"machine {self._peer.machine}", error)

    def damaged(self, damage: DamagedError) -> None:
        self._listener._damaged(self._peer, damage, self._peer.descriptor)

    def malformed(self, error: ProtocolError) -> None:
        self._listener._traffic.turned_away(f"machine {self._peer.machine}", error)

    def broken(self, why: str) -> None:
        self._listener.end(self._peer, why)
