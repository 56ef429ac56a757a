"""The data plane between simulated machines. Stands for the worker's TcpLink and the server's Network.

A payload is read from the sender's memory when it arrives, not when it is sent: ZeroMQ, too, sends from where
it lies. With ``duplicates``, pushes and answers arrive a second time now and then, at any later moment.

A connection that breaks loses, in each direction, what has not arrived at some moment thereafter; both ends notice it
at moments of their own. The machine connects anew then, as the real link does; its new connection's messages may
overtake those that the old one still delivers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from byteps_py.config.settings import SLOW_FACTOR, Settings
from byteps_py.dataplane.listener import Peer, reply
from byteps_py.proto import control_pb2 as pb
from byteps_py.server.contribution_listeners import ABOUT_COPIES, SHADOW_KINDS
from byteps_py.server.reducer import Arrival, FrameMemory
from byteps_py.system.shm import Block
from byteps_py.tensors import Op
from byteps_py.wire.data_link import Header, Kind
from byteps_py.worker.core.tensor import AccumulatedPart, Stage
from byteps_py.worker.io.server_links import LinkEvents, LinkOrigin, LinkTarget, ServerLink

from .local import Loop
from .memory import Frame, Memory
from .world import InvariantError, Process, Way, Wire, World

if TYPE_CHECKING:
    from .peers import PeerDialer, PeerListener

DUPLICATES = 0.15  # of all messages


class Network:
    """All of it. ``servers``, ``listeners``: by address. ``links``: that are open."""

    def __init__(self, world: World, memory: Memory, duplicates: bool) -> None:
        self.world = world
        self.memory = memory
        self.servers: dict[str, ServerNetwork] = {}
        self.listeners: dict[str, PeerListener] = {}
        self.links: dict[TcpLink | PeerDialer, None] = {}
        self._duplicates = duplicates

    def carry(self, wire: Wire, process: Process, label: str, act: Callable[[], None]) -> None:
        self.world.carry(wire, process, label, act)
        if self._duplicates and self.world.random.random() < DUPLICATES:
            delay_s = wire.last_arrival_s - self.world.now_s + sum(self.world.delay() for _ in range(4))
            self.world.after(delay_s, process, f"{label} (again)", act)


def describe(header: Header) -> str:
    kind = "supply" if header.is_supply else header.kind.name.lower() + (" resent" if header.is_resent else "")
    return f"{kind} of {header.key:x}/{header.generation}/{header.index} round {header.round} of {header.sender}"


class Connection:
    """One of a link. What would arrive at either end after ``up_ends_s`` or ``down_ends_s`` is lost."""

    def __init__(self, world: World, caller: Process, listener: Process) -> None:
        self.up = world.new_wire((caller.host, listener.host))
        self.down = world.new_wire((listener.host, caller.host))
        self.up_ends_s = self.down_ends_s = math.inf
        self.is_counted = False  # among those of its listener
        self._world = world

    def cut(
        self, listener: Process, on_gone: Callable[[], None], caller: Process, on_broken: Callable[[], None]
    ) -> None:
        """It is lost, or its listener is gone, as either end finds out some time later."""
        world = self._world
        # What the listener has been sent may wait there until after it has read from the next connection.
        self.up_ends_s = world.now_s + world.delay() * world.random.choice((1, 1, 10))
        self.down_ends_s = world.now_s + world.delay()
        world.after(world.delay(), listener, "a peer is gone", on_gone)
        # What has arrived by then is read; what comes later never is, for then this socket is closed.
        world.after(world.delay(), caller, "a connection breaks", on_broken)

    def end(self, listener: Process, on_gone: Callable[[], None]) -> None:
        """In order, by its caller."""
        world = self._world
        world.carry(self.up, listener, "a peer is gone", on_gone)
        if world.is_interrupted(self.up.way):
            world.after(world.notice_s(), listener, "a peer is gone", on_gone)


class _Sent:
    """Bytes on their way, which are read when they arrive."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self._kept: Any = None

    def keep(self) -> None:
        """They do not change any more."""
        self._kept = self.data

    @property
    def data(self) -> Any:
        return self._read() if self._kept is None else self._kept


class TcpLink(ServerLink):
    """One machine's way to one server."""

    def __init__(self, origin: LinkOrigin, target: LinkTarget, events: LinkEvents) -> None:
        runtime: Any = origin.runtime
        loop = runtime.loop
        self.network: Network = runtime.network
        self.process = loop.process
        self.server = self.network.servers[target.address]
        self.on_answer = events.on_answer
        self.is_closed = False
        self.connection: Connection
        self._world = self.network.world
        self._loop = loop
        self._address = target.address
        self._machine = origin.sender
        self._group = target.group
        self._patience_s = origin.settings.heartbeat_timeout_s
        self._on_reconnected = events.on_reconnected
        self._on_lost = events.on_lost
        self._is_up = False
        self._peer: TcpPeer
        self._on_its_way: list[_Sent] = []
        self._epoch = 0
        self.network.links[self] = None
        loop.process.on_end.append(self.close)
        self.server.process.on_end.append(self.break_)
        self._open()
        first, first_s = (
            self.connection,
            SLOW_FACTOR * self._patience_s if target.is_late else origin.settings.start_timeout_s,
        )
        self._loop.call_later(first_s, lambda: self._give_up(first))

    @property
    def is_open(self) -> bool:
        return self._is_up

    @property
    def way(self) -> Way:
        return (self.process.host, self.server.process.host)

    def _open(self) -> None:
        connection = self.connection = Connection(self._world, self.process, self.server.process)
        peer = self._peer = TcpPeer(self.server, self, connection, self._machine, self._group)
        if self.server.process.is_gone:
            return
        if not self._world.is_interrupted(self.way):
            self.server.connections += 1
            connection.is_counted = True
        self._carry_up("hello", lambda: self.server.hello(peer))

    def is_current(self, connection: Connection) -> bool:
        return connection is self.connection and not self.is_closed

    def up(self) -> None:
        """The server has taken the connection."""
        self._is_up = True

    def _carry_up(self, label: str, act: Callable[[], None]) -> None:
        connection = self.connection

        def arrive() -> None:
            if self._world.now_s <= connection.up_ends_s:
                act()

        self.network.carry(connection.up, self.server.process, label, arrive)

    def push(self, header: Header, payload: Block | None, offset: int, answer: Block | None) -> None:
        if header.epoch < self._epoch:
            raise InvariantError(f"epoch {header.epoch} is used after epoch {self._epoch}")
        self._epoch = header.epoch
        memory, raw, peer = self.network.memory, header.pack(), self._peer
        address = payload.address + offset if payload is not None else 0
        if header.kind in SHADOW_KINDS:
            self.bytes_sent += header.length
            self._tell(header, lambda: memory.find(address, header.length).copy())
            return
        nbytes = header.payload_nbytes
        sent = memory.at(address, nbytes).copy() if payload is not None else None
        self.bytes_sent += nbytes
        parts = self.process.parts  # type: ignore[attr-defined]
        name = (header.key, header.generation, header.index)
        part = parts.get(name)

        def arrive() -> None:
            frame = None
            if sent is not None:
                is_due = part is not None and parts.get(name) is part and part.tensor.round == header.round
                is_due = is_due and self.process.is_alive and not self.is_closed
                if isinstance(part, AccumulatedPart):  # then its answer lies there
                    is_due = is_due and part.stage in (Stage.QUEUED, Stage.IN_FLIGHT)
                now = memory.find(address, nbytes)
                if is_due and not np.array_equal(now, sent):
                    raise InvariantError(f"a contribution was overwritten before its answer came: {describe(header)}")
                frame = Frame(memory, now.copy())
            self.server.receive(peer, Header.unpack(raw), frame)

        self._carry_up(describe(header), arrive)

    def tell(self, header: Header, body: bytes) -> None:
        self.ask(header, body)

    def ask(self, header: Header, body: Any) -> None:
        """Send what lies in no block: bytes, or a message that was received."""
        data = np.frombuffer(getattr(body, "buffer", body), np.uint8)
        self._tell(header, lambda: data.copy())

    def _tell(self, header: Header, read: Callable[[], Any]) -> None:
        """What the server is told, and says that it has. Until then it stays; a second one has the same bytes."""
        raw, peer, memory = header.pack(), self._peer, self.network.memory
        sent = _Sent(read)
        self._on_its_way.append(sent)

        def arrive() -> None:
            sent.keep()  # a second one has the same bytes
            if sent in self._on_its_way:
                self._on_its_way.remove(sent)
            self.server.receive(peer, Header.unpack(raw), Frame(memory, sent.data.copy()))

        self._carry_up(describe(header), arrive)

    @property
    def has_states(self) -> bool:
        """States, or steps of them, are on their way to servers."""
        return bool(self._on_its_way) and not self.is_closed

    def _leave_behind(self) -> None:
        """The connection ends. The network decides about the messages that are on their way."""
        for sent in self._on_its_way:
            sent.keep()
        self._on_its_way.clear()

    def break_(self) -> None:
        """The connection is cut, or the server is gone."""
        connection, server = self.connection, self.server
        if not self.is_closed and connection.up_ends_s == math.inf:
            gone, broken = functools.partial(server.forget, connection), functools.partial(self._broke, connection)
            connection.cut(server.process, gone, self.process, broken)

    def _broke(self, connection: Connection) -> None:
        if not self.is_current(connection):
            return
        self._is_up = False
        self._leave_behind()
        self._open()
        fresh = self.connection
        self._loop.call_later(self._patience_s, lambda: self._give_up(fresh))
        self._on_reconnected()

    def _give_up(self, connection: Connection) -> None:
        if self.is_current(connection) and not self._is_up:
            self._on_lost(f"the summation service at {self._address} can't be reached")
            self._loop.call_later(self._patience_s, lambda: self._give_up(connection))

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._leave_behind()
            del self.network.links[self]
            self.connection.end(self.server.process, functools.partial(self.server.forget, self.connection))


class TcpPeer(Peer):
    """A machine, as its server sees it, on one connection."""

    def __init__(self, server: ServerNetwork, link: TcpLink, connection: Connection, machine: int, group: int) -> None:
        self.machine = machine
        self.group = group
        self.connection = connection
        self.link = link
        self._server = server

    def answer(self, header: Header, result: Any, digest: bytes = b"") -> None:
        self._send(reply(header, Kind.ANSWER), result.buffer if result is not None else b"")

    def tell(self, header: Header, payload: bytes = b"") -> None:
        self._send(header.pack(), payload)

    def refuse(self, header: Header, reason: str) -> None:
        self._send(reply(header, Kind.REFUSED), reason.encode())

    def _send(self, raw: bytes, payload: Any) -> None:
        link, network, connection = self.link, self._server.network, self.connection
        if connection in self._server.gone:
            self._server.lose(self)
            return

        def arrive() -> None:
            if link.is_current(connection) and network.world.now_s <= connection.down_ends_s:
                # Read now: it was sent from where it lies.
                link.on_answer(Header.unpack(raw), Frame(network.memory, np.frombuffer(payload, np.uint8).copy()))

        network.carry(connection.down, link.process, describe(Header.unpack(raw)), arrive)


class ServerNetwork:
    """The server's end of all its links. ``gone``: connections that are known to have ended."""

    def __init__(
        self,
        network: Network,
        process: Process,
        on_arrival: Callable[[Arrival], None],
        on_gone: Callable[[Peer], None],
        on_withdraw: Callable[[Header], None],
        on_shadow: Callable[[Header, Peer, FrameMemory], None],
    ) -> None:
        self.network = network
        self.process = process
        self.address = f"tcp://host:{10_000 + len(network.servers)}"
        self.socket, self.monitor = object(), object()
        self.connections = 0
        self.gone: set[Connection] = set()
        self._on_gone = on_gone
        self._on_arrival = on_arrival
        self._on_withdraw = on_withdraw
        self._on_shadow = on_shadow
        self._peers: dict[Connection, TcpPeer] = {}
        self._by_machine: dict[int, TcpPeer] = {}
        network.servers[self.address] = self

    def attach(self, loop: Loop) -> None: ...

    def link_usage(self) -> list[pb.LinkUsage]:
        return []

    def digest(self, payload: Any) -> bytes:
        return b""

    def open_echo(self) -> None: ...

    def hello(self, peer: TcpPeer) -> None:
        link = peer.link
        # It stands for a handshake, which needs both ends: one that has hung up does not come to its end.
        if link.is_current(peer.connection) and peer.connection not in self._peers:
            self._peers[peer.connection] = peer
            if not peer.connection.is_counted:
                self.connections += 1
                peer.connection.is_counted = True
            latest = self._by_machine.get(peer.machine)
            if latest is None or latest.group <= peer.group:  # as DataListener does
                self._by_machine[peer.machine] = peer
                if latest is not None:
                    self._on_gone(latest)
            link.network.world.carry(peer.connection.down, link.process, "connected", link.up)

    def peer_of(self, machine: int) -> Peer | None:
        peer = self._by_machine.get(machine)
        return peer if peer is not None and peer.connection in self._peers else None

    def forget(self, connection: Connection) -> None:
        """It has ended. Messages that came before may still have to be read."""
        if connection not in self.gone:
            self.gone.add(connection)
            self.connections -= connection.is_counted

    def lose(self, peer: TcpPeer) -> None:
        """It can't be answered."""
        if self._peers.pop(peer.connection, None) is not None:
            self._on_gone(peer)

    def receive(self, peer: TcpPeer, header: Header, frame: Frame | None) -> None:
        if peer.connection not in self._peers:
            return  # an unknown sender: its connection was found gone
        if self._by_machine.get(peer.machine) is not peer:
            return  # as DataListener does
        if header.kind is Kind.WITHDRAW:
            self._on_withdraw(header)
            return
        if header.kind in SHADOW_KINDS and frame is not None:
            self._on_shadow(header, peer, FrameMemory(frame))  # type: ignore[arg-type]
            return
        if header.kind in ABOUT_COPIES and frame is not None:
            self._on_arrival(Arrival(header, peer, 0, text=frame.bytes))
            return
        has_none = header.kind is Kind.PASS or (header.kind is Kind.PULL and header.op is Op.BROADCAST)
        if (frame is None) != has_none:
            raise InvariantError(f"a message has a payload that it should not, or lacks one: {describe(header)}")
        payload = FrameMemory(frame) if frame is not None else None  # type: ignore[arg-type]
        self._on_arrival(Arrival(header, peer, payload.nbytes if payload else 0, payload))

    def close(self) -> None: ...


class Probe:
    """Stands for worker/io/probe.py: after a while it says any rate, or that nobody answered."""

    def __init__(
        self, runtime: Any, settings: Settings, sender: int, address: str, on_result: Callable[[float], None]
    ) -> None:
        world, loop = runtime.process.world, runtime.loop
        self._is_over = False

        def end() -> None:
            if not self._is_over:
                self._is_over = True
                on_result(world.random.choice((0.0, 99.0, 100.0, 400.0)))

        loop.call_later(world.random.choice((0.01, 0.2, 2.0, 9.0)), end)

    def close(self) -> None:
        self._is_over = True
