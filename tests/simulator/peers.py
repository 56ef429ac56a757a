"""The ways from one communication service to another: the real PeerMachines and TcpLink, over simulated connections.

``PeerDialer`` stands for dataplane.dialer.Dialer, ``PeerListener`` for dataplane.listener.DataListener. A piece that
is lent is read from its owner's memory when it arrives, not when it is sent: ZeroMQ, too, sends from where it lies.
Messages may arrive twice, and connections break, as between services and servers: see network.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from byteps_py.dataplane.dialer import DialTarget, Owner
from byteps_py.dataplane.listener import Peer, RemotePeer
from byteps_py.wire.data_link import Header, Kind

from .local import Loop
from .memory import Frame, address_of
from .network import Connection, Network, describe
from .world import InvariantError, Process, Way

_RETRY_S = 0.2


class PeerDialer:
    """One service's way to another. ``server``: the other."""

    def __init__(
        self,
        network: Network,
        context: object,
        loop: Loop,
        target: DialTarget,
        sender: int,
        settings: object,
        owner: Owner,
    ) -> None:
        self.network = network
        self.process = loop.process
        self.server: PeerListener = self.network.listeners[target.address]
        self.is_open = False
        self.connection: Connection | None = None
        self._world = self.network.world
        self._loop = loop
        self._machine = sender
        self._group = target.group
        self._owner = owner
        self._numbers = 0
        self._is_closed = False
        self.network.links[self] = None
        self.process.on_end.append(self.close)
        self.server.process.on_end.append(self.break_)
        self._connect()

    @property
    def way(self) -> Way:
        return (self.process.host, self.server.process.host)

    # ---- the connection's life ---------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._is_closed:
            return
        if self.server.process.is_gone or self.server.is_closed:
            self._loop.call_later(_RETRY_S, self._connect)
            return
        connection = self.connection = Connection(self._world, self.process, self.server.process)
        self._carry_up("hello", lambda: self.server.hello(self, connection))

    def challenged(self, connection: Connection) -> None:
        if self.is_current(connection) and self._world.now_s <= connection.down_ends_s and not self.is_open:
            self._carry_up("proof", lambda: self.server.welcome(self, connection, self._machine, self._group))
            self.is_open = True
            self._owner.on_open()

    def is_current(self, connection: Connection) -> bool:
        return connection is self.connection and not self._is_closed

    def break_(self) -> None:
        """The connection is cut, or the other end is gone."""
        connection, server = self.connection, self.server
        if not self._is_closed and connection is not None and connection.up_ends_s == math.inf and not server.is_closed:
            gone, broken = functools.partial(server.forget, connection), functools.partial(self._broke, connection)
            connection.cut(server.process, gone, self.process, broken)

    def ended(self, connection: Connection) -> None:
        """In order, by the other end."""
        connection.up_ends_s = connection.down_ends_s = self._world.now_s
        self._broke(connection)

    def _broke(self, connection: Connection) -> None:
        if not self.is_current(connection):
            return
        was_open, self.is_open, self.connection = self.is_open, False, None
        self._loop.call_later(self._world.delay(), self._connect)
        if was_open:
            self._owner.on_broken()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed, self.is_open = True, False
        del self.network.links[self]
        if (connection := self.connection) is not None:
            connection.end(self.server.process, functools.partial(self.server.forget, connection))

    # ---- messages ----------------------------------------------------------------------------------------

    def send(self, header: Header, payload: bytes) -> int:
        connection = self.connection
        if not self.is_open or connection is None:
            raise InvariantError(f"a message before its connection is open: {describe(header)}")
        raw, body = header.pack(), bytes(payload)
        self._carry_up(describe(header), lambda: self.server.receive(connection, Header.unpack(raw), body))
        self._numbers += 1
        return self._numbers

    def _carry_up(self, label: str, act: Callable[[], None]) -> None:
        connection, world = self.connection, self._world
        if connection is not None:
            self.network.carry(
                connection.up,
                self.server.process,
                label,
                lambda: act() if world.now_s <= connection.up_ends_s else None,
            )

    def take(self, connection: Connection, header: Header, data: Callable[[], Any]) -> None:
        """An answer arrives, or would."""
        if not self.is_current(connection) or self._world.now_s > connection.down_ends_s:
            return
        self._owner.on_message(header, Frame(self.network.memory, data().copy()))  # type: ignore[arg-type]

    def waits_for(self, header: Header) -> bool:
        """Its owner has asked for what such an answer says, and has not got it."""
        return not self._is_closed and self.process.is_alive and header.index in self._fetched

    @property
    def _fetched(self) -> Any:
        return self.process.fetched  # type: ignore[attr-defined]


class PeerListener:
    """One service's end of all others' ways to it. ``gone``: connections that are known to have ended."""

    def __init__(
        self,
        network: Network,
        process: Process,
        kinds: frozenset[Kind],
        on_message: Callable[[Header, Peer, Any], None],
        on_gone: Callable[[Peer], None],
    ) -> None:
        self.network = network
        self.process = process
        self.address = f"tcp://peer:{20_000 + len(network.listeners)}"
        self.socket, self.monitor = object(), object()
        self.is_closed = False
        self.gone: set[Connection] = set()
        self._kinds = kinds
        self._on_message = on_message
        self._on_gone = on_gone
        self._peers: dict[Connection, RemotePeer] = {}
        self._by_machine: dict[int, RemotePeer] = {}
        self._dialers: dict[RemotePeer, tuple[PeerDialer, Connection]] = {}
        network.listeners[self.address] = self

    def attach(self, loop: Loop) -> None: ...
    def detach(self, loop: Loop) -> None: ...

    def close(self) -> None:
        """What was sent arrives yet: its process ends when it has left."""
        self.is_closed = True
        for dialer, connection in self._dialers.values():
            self._carry_down(dialer, connection, "a connection ends", functools.partial(dialer.ended, connection))

    def peer_of(self, machine: int) -> RemotePeer | None:
        peer = self._by_machine.get(machine)
        return peer if peer is not None and self._dialers[peer][1] in self._peers else None

    # ---- connections -------------------------------------------------------------------------------------

    def hello(self, dialer: PeerDialer, connection: Connection) -> None:
        self._carry_down(dialer, connection, "challenge", lambda: dialer.challenged(connection))

    def welcome(self, dialer: PeerDialer, connection: Connection, machine: int, group: int) -> None:
        # As for a server: a handshake needs both ends.
        if dialer.is_current(connection) and connection not in self._peers and connection not in self.gone:
            seals, age = cast(Any, (None, None)), (group, len(self._dialers))
            peer = RemotePeer(cast(Any, self), str(len(self._dialers)).encode(), machine, seals, age)
            self._peers[connection] = peer
            self._dialers[peer] = dialer, connection
            latest = self._by_machine.get(machine)
            if latest is None or latest.age < age:  # as DataListener does
                self._by_machine[machine] = peer
                if latest is not None:
                    self._on_gone(latest)

    def forget(self, connection: Connection) -> None:
        """It has ended. Messages that came before may still have to be read."""
        self.gone.add(connection)

    def receive(self, connection: Connection, header: Header, body: bytes) -> None:
        peer = self._peers.get(connection)
        if peer is None or self._by_machine.get(peer.machine) is not peer:
            return  # as DataListener does
        if header.kind not in self._kinds or header.sender != peer.machine:
            raise InvariantError(f"machine {peer.machine} sends what it must not: {describe(header)}")
        self._on_message(header, peer, SimpleNamespace(bytes=body))

    # ---- what a RemotePeer sends -------------------------------------------------------------------------

    def send(self, peer: RemotePeer, raw: bytes, payload: Any) -> bool:
        return self.send_result(peer, raw, payload.bytes)

    def send_result(self, peer: RemotePeer, raw: bytes, result: bytes, digest: bytes = b"") -> bool:
        if not self._is_there(peer):
            return False
        data = np.frombuffer(bytearray(result), np.uint8)
        dialer, connection = self._dialers[peer]
        label = describe(Header.unpack(raw))
        self._carry_down(dialer, connection, label, lambda: dialer.take(connection, Header.unpack(raw), lambda: data))
        return True

    def _is_there(self, peer: RemotePeer) -> bool:
        connection = self._dialers[peer][1]
        if connection not in self.gone:
            return True
        if self._peers.pop(connection, None) is not None:
            self._on_gone(peer)
        return False

    def _carry_down(self, dialer: PeerDialer, connection: Connection, label: str, act: Callable[[], None]) -> None:
        self.network.carry(connection.down, dialer.process, label, act)

    def send_tracked(self, peer: RemotePeer, raw: bytes, view: memoryview) -> Any:
        """From where it lies: it must stay there, and as it is, until it has left."""
        if not self._is_there(peer):
            return None
        dialer, connection = self._dialers[peer]
        header, memory, world = Header.unpack(raw), self.network.memory, self.network.world
        lies = np.frombuffer(view, np.uint8)
        address, sent = address_of(lies), lies.copy()
        tracker = SimpleNamespace(done=False)

        def read() -> Any:
            if not dialer.waits_for(header) or self.process.is_gone:
                return memory.find(address, len(sent)).copy()
            if not np.array_equal(memory.at(address, len(sent)), sent):
                raise InvariantError(f"a piece was overwritten while it was being sent: {describe(header)}")
            return sent

        def leave() -> None:
            tracker.done = True

        self._carry_down(
            dialer, connection, describe(header), lambda: dialer.take(connection, Header.unpack(raw), read)
        )
        # Its memory is free when it is out of this process: as late as that it arrives, or is lost.
        world.after(connection.down.last_arrival_s - world.now_s, self.process, None, leave)
        return tracker
