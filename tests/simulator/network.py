"""The data plane between simulated machines. Stands for the worker's TcpLink and the server's Network.

A payload is read from the sender's memory when it arrives, not when it is sent: ZeroMQ, too, sends from where
it lies. With ``duplicates``, pushes and answers arrive a second time now and then, at any later moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from byteps_py.dataplane.peer import Peer, reply
from byteps_py.server.arrival import Arrival, FrameMemory
from byteps_py.shm import Block
from byteps_py.tensors import Op
from byteps_py.wire import Header, Kind
from byteps_py.worker.links import ServerLink

from .local import Loop
from .memory import Frame, Memory
from .world import InvariantError, Process, Wire, World

DUPLICATES = 0.15  # of all messages


class Network:
    """All of it. ``servers``: by address."""

    def __init__(self, world: World, memory: Memory, duplicates: bool) -> None:
        self.world = world
        self.memory = memory
        self.servers: dict[str, ServerNetwork] = {}
        self._duplicates = duplicates

    def carry(self, wire: Wire, process: Process, label: str, act: Callable[[], None]) -> None:
        self.world.carry(wire, process, label, act)
        if self._duplicates and self.world.random.random() < DUPLICATES:
            delay_s = wire.last_arrival_s - self.world.now_s + sum(self.world.delay() for _ in range(4))
            self.world.after(delay_s, process, f"{label} (again)", act)


def describe(header: Header) -> str:
    kind = header.kind.name.lower()
    return f"{kind} of {header.key:x}/{header.generation}/{header.index} round {header.round} of {header.sender}"


class TcpLink(ServerLink):
    """One machine's way to one server."""

    network: Network  # set in a subclass per world

    def __init__(
        self,
        context: object,
        loop: Loop,
        address: str,
        sender: int,
        settings: object,
        contributions: object,
        on_answer: Callable[[Header, Any], None],
        on_lost: object,
    ) -> None:
        self.process = loop.process
        self.on_answer = on_answer
        self.is_closed = False
        self.down = Wire()
        self._server = self.network.servers[address]
        self._up = Wire()
        self._peer = TcpPeer(self._server, self, sender)
        self._epoch = 0
        self._server.connections += 1
        loop.process.on_end.append(self.close)

    def push(self, header: Header, payload: Block | None, offset: int, answer: Block | None) -> None:
        if header.epoch < self._epoch:
            raise InvariantError(f"epoch {header.epoch} is used after epoch {self._epoch}")
        self._epoch = header.epoch
        memory, raw = self.network.memory, header.pack()
        self.bytes_sent += header.length
        address = payload.address + offset if payload is not None else 0
        sent = memory.at(address, header.length).copy() if payload is not None else None
        parts = self.on_answer.__self__._parts  # type: ignore[attr-defined]
        name = (header.key, header.generation, header.index)
        part = parts.get(name)

        def arrive() -> None:
            is_due = part is not None and parts.get(name) is part and part.tensor.round == header.round
            is_due = is_due and self.process.is_alive and not self.is_closed
            if sent is not None and is_due and not np.array_equal(memory.at(address, header.length), sent):
                raise InvariantError(f"a contribution was overwritten before its answer came: {describe(header)}")
            self._server.receive(self._peer, Header.unpack(raw), None if sent is None else Frame(memory, sent.copy()))

        self.network.carry(self._up, self._server.process, describe(header), arrive)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._server.connections -= 1


class TcpPeer(Peer):
    """A machine, as its server sees it."""

    def __init__(self, server: ServerNetwork, link: TcpLink, machine: int) -> None:
        self.machine = machine
        self._server = server
        self._link = link

    def answer(self, header: Header, result: Any) -> None:
        self._send(header, Kind.ANSWER, result.buffer if result is not None else b"")

    def refuse(self, header: Header, reason: str) -> None:
        self._send(header, Kind.REFUSED, reason.encode())

    def _send(self, header: Header, kind: Kind, payload: Any) -> None:
        link, network = self._link, self._server.network
        if link.is_closed or not link.process.is_alive:
            self._server.on_gone(self)
            return
        raw = reply(header, kind)

        def arrive() -> None:
            if not link.is_closed:
                # Read now: it was sent from where it lies.
                link.on_answer(Header.unpack(raw), Frame(network.memory, np.frombuffer(payload, np.uint8).copy()))

        network.carry(link.down, link.process, describe(header), arrive)


class ServerNetwork:
    """The server's end of all its links."""

    def __init__(
        self,
        network: Network,
        process: Process,
        on_arrival: Callable[[Arrival], None],
        on_gone: Callable[[Peer], None],
    ) -> None:
        self.network = network
        self.process = process
        self.address = f"tcp://host:{10_000 + len(network.servers)}"
        self.socket, self.monitor = object(), object()
        self.connections = 0
        self.on_gone = on_gone
        self._on_arrival = on_arrival
        network.servers[self.address] = self

    def on_readable(self) -> None: ...

    def on_monitor(self) -> None: ...

    def sweep(self) -> None: ...

    def open_echo(self) -> None: ...

    def receive(self, peer: TcpPeer, header: Header, frame: Frame | None) -> None:
        has_none = header.kind is Kind.PASS or (header.kind is Kind.PULL and header.op is Op.BROADCAST)
        if (frame is None) != has_none:
            raise InvariantError(f"a message has a payload that it should not, or lacks one: {describe(header)}")
        payload = FrameMemory(frame) if frame is not None else None  # type: ignore[arg-type]
        self._on_arrival(Arrival(header, peer, payload.nbytes if payload else 0, payload))

    def close(self) -> None: ...
