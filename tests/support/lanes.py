"""All ways between a communication service and a summation service behind one face: both ends in the test's thread.

``LANES`` names them. Whatever a lane is made of, a server sees Arrivals and Peers, and a machine a ServerLink."""

from __future__ import annotations

import ctypes
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import zmq
from simulator.local import Local
from simulator.memory import Frame, Memory
from simulator.network import Network as SimulatedNetwork, ServerNetwork, TcpLink as SimulatedLink
from simulator.world import Process, World
from zmq.utils import garbage

from byteps_py.config.settings import Settings
from byteps_py.dataplane.listener import Peer
from byteps_py.dataplane.nixl_agent import NixlAgent
from byteps_py.dataplane.rdma_lane import RdmaAgent, RdmaLane
from byteps_py.dataplane.traffic import Traffic
from byteps_py.runtime import Runtime
from byteps_py.server.contribution_listeners import ContributionListener, LocalListener
from byteps_py.server.reducer import Arrival
from byteps_py.system.loop import EventLoop
from byteps_py.system.shm import Arena, Block
from byteps_py.wire.data_link import Header
from byteps_py.worker.io.railed_link import RailedLink
from byteps_py.worker.io.server_links import LinkEvents, LinkOrigin, LinkTarget, LocalLink, ServerLink
from support.data_plane import WAIT_S
from support.rdma import StandInAgent
from support.summation import SETTINGS

#: Also where nothing happens, what is waited for may be found out by asking.
_LOOK_S = 0.05


class Lane(ABC):
    """``arrivals``, ``order``, ``gone``: what the server has heard. ``came``: what the machine has: headers
    and the bytes that they bring. ``lost``: why the server can't be reached, as the machine hears."""

    #: The longest payload.
    most_bytes = SETTINGS.max_partition_bytes
    link: ServerLink

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.order: list[tuple[str, int]] = []  # kind and index of what the server has heard
        self.gone: list[Peer] = []
        self.came: list[tuple[Header, bytes]] = []
        self.lost: list[str] = []
        self.arena: Any = None
        self._answers: dict[tuple[int, int], Block] = {}  # by index and round

    # ---- the machine -------------------------------------------------------------------------------------

    def push(self, header: Header, data: bytes = b"") -> None:
        """``data`` lies in shared memory, and its answer is to come there, if the lane brings it there."""
        payload = self.arena.allocate(len(data)) if data else None
        if payload is not None:
            ctypes.memmove(payload.address, data, len(data))
        answer = self.arena.allocate(header.length) if header.length else None
        if answer is not None:
            self._answers[header.index, header.round] = answer
        self.link.push(header, payload, 0, answer if self.link.is_local else None)

    def _answered(self, header: Header, frame: Any) -> None:
        data = frame.bytes if frame is not None else b""
        if self.link.is_local and frame is None and (block := self._answers.get((header.index, header.round))):
            data = ctypes.string_at(block.address, header.length)
        self.came.append((header, data))

    # ---- the server --------------------------------------------------------------------------------------

    def _arrived(self, arrival: Arrival) -> None:
        self.arrivals.append(arrival)
        self.order.append((arrival.header.kind.name, arrival.header.index))

    def _withdrawn(self, header: Header) -> None:
        self.order.append(("WITHDRAW", header.index))

    def answer(self, arrival: Arrival, data: bytes) -> None:
        """As a server does that has the sum."""
        if arrival.answer is not None:
            ctypes.memmove(arrival.answer.address, data, len(data))
            arrival.origin.answer(arrival.header, None)
        else:
            arrival.origin.answer(arrival.header, self._frame(data) if data else None)

    def _frame(self, data: bytes) -> Any:
        return zmq.Frame(data)

    @staticmethod
    def payload_of(arrival: Arrival) -> bytes:
        return ctypes.string_at(arrival.payload.address, arrival.payload.nbytes) if arrival.payload else b""

    # ---- both --------------------------------------------------------------------------------------------

    @abstractmethod
    def until(self, is_so: Callable[[], bool]) -> None:
        """Let both go on until it is so."""

    @abstractmethod
    def end_server(self) -> None:
        """Its process ends."""

    @abstractmethod
    def close(self) -> None: ...

    @property
    @abstractmethod
    def connections(self) -> int:
        """That the server has."""


class RealLane(Lane):
    """With a loop of the system's."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = EventLoop()
        self.runtime = Runtime(loop=self.loop)
        self.arena = Arena(16 << 20)

    def until(self, is_so: Callable[[], bool]) -> None:
        end_s = self.loop.time() + WAIT_S
        while not is_so():
            assert self.loop.time() < end_s
            self.loop.run_once(self.loop.time() + _LOOK_S)


class SharedMemoryLane(RealLane):
    """Both are on one machine."""

    def __init__(self) -> None:
        super().__init__()
        name = f"byteps-test-{uuid.uuid4().hex}"
        self._server = LocalListener(
            name, SETTINGS, self.runtime, Traffic(), self._arrived, self.gone.append, self._withdrawn
        )
        self._is_ended = False
        self.link = LocalLink(self.runtime, name, 0, SETTINGS, self.arena, self._answered, self.lost.append)

    @property
    def connections(self) -> int:
        return self._server.connections

    def end_server(self) -> None:
        self._is_ended = True
        self._server.close()

    def close(self) -> None:
        self.link.close()
        if not self._is_ended:
            self._server.close()
        self.loop.close()
        self.arrivals.clear()
        self.arena.close()


class TcpLane(RealLane):
    """Over loopback. ``agent``: makes those of both ends, and payloads travel by RDMA, where
    they ``have`` it: (the machine, the server)."""

    def __init__(
        self,
        settings: Settings,
        host: str = "127.0.0.1",
        cards: int = 1,
        agent: Callable[[], RdmaAgent] | None = None,
        has_rdma: tuple[bool, bool] = (True, True),
    ) -> None:
        super().__init__()
        self.reconnections = 0
        self.rdma = [RdmaLane(agent(), self.loop, settings.patience_s) for _ in range(2)] if agent is not None else []
        for each in self.rdma[:1]:
            each.watch(self.arena)
        self._server = ContributionListener(
            host, settings, Traffic(), self._arrived, self.gone.append, self._withdrawn, lambda *message: None
        )
        for each in self.rdma[1:]:
            if has_rdma[1]:
                self._server.use_rdma(each)
        self._server.attach(self.loop)
        self._is_ended = False
        self._context = zmq.Context()
        self.link = RailedLink(
            LinkOrigin(
                self._context, self.runtime, 0, settings,
                lambda block, offset, length: memoryview(
                    (ctypes.c_char * length).from_address(block.address + offset)
                ).cast("B"),
                self.rdma[0] if self.rdma and has_rdma[0] else None,
            ),
            LinkTarget(self._server.address),
            LinkEvents(self._answered, self._reconnected, self.lost.append),
        )  # fmt: skip
        try:
            self.until(lambda: len(self.link.rails) == cards and all(rail.is_open for rail in self.link.rails))
        except BaseException:
            self.close()
            raise

    def _reconnected(self) -> None:
        self.reconnections += 1

    @property
    def connections(self) -> int:
        return self._server.connections

    def end_server(self) -> None:
        self._is_ended = True
        self._server.detach(self.loop)
        self._server.close()
        for each in self.rdma[1:]:
            each.close()

    def close(self) -> None:
        self.link.close()
        if not self._is_ended:
            self.end_server()
        self.arrivals.clear()
        if self.rdma:
            self.until(lambda: not garbage.gc.refs)  # messages in the pools' memory
        for each in self.rdma[:1]:
            each.close()
        self.loop.close()
        self._context.term()
        self.arena.close()


class _MachineProcess(Process):
    def __init__(self, world: World) -> None:
        super().__init__(world, "a communication service")
        self.parts: dict[object, object] = {}


class MemoryLane(Lane):
    """The simulator's, in virtual time."""

    most_bytes = 16 << 10

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._world, self._memory = World(seed), Memory()
        local, network = Local(self._world), SimulatedNetwork(self._world, self._memory, duplicates=False)
        self._machine, self._process = _MachineProcess(self._world), Process(self._world, "a summation service")
        self.arena = self._memory.new_arena()
        self._server = ServerNetwork(
            network, self._process, self._arrived, self.gone.append, self._withdrawn, lambda *message: None
        )
        runtime = SimpleNamespace(loop=local.new_loop(self._machine), network=network)
        nothing: Any = None
        self.link = SimulatedLink(
            LinkOrigin(nothing, cast(Any, runtime), 0, SETTINGS, nothing),
            LinkTarget(self._server.address),
            LinkEvents(self._answered, lambda: None, self.lost.append),
        )
        self.until(lambda: self.link.is_open)

    def _frame(self, data: bytes) -> Any:
        return Frame(self._memory, np.frombuffer(data, np.uint8).copy())

    @property
    def connections(self) -> int:
        return self._server.connections

    def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert self._world.step(), "nothing happens any more"

    def end_server(self) -> None:
        self._process.is_alive, self._process.is_gone = False, True
        for each in self._process.on_end:
            each()

    def close(self) -> None:
        cast(SimulatedLink, self.link).close()


TWO_CARDS = replace(SETTINGS, interfaces="127.0.0.1,127.0.0.2")
LANES: dict[str, Callable[[], Lane]] = {
    "memory": MemoryLane,
    "shared memory": SharedMemoryLane,
    "TCP": lambda: TcpLane(replace(SETTINGS, secret="")),
    "TCP, signed": lambda: TcpLane(SETTINGS),
    "TCP, encrypted": lambda: TcpLane(replace(SETTINGS, encrypt=True)),
    "TCP, IPv6": lambda: TcpLane(replace(SETTINGS, node_host="::1"), "::1"),
    "TCP, two network cards": lambda: TcpLane(TWO_CARDS, cards=2),
    "RDMA, a stand-in": lambda: TcpLane(replace(SETTINGS, secret=""), agent=StandInAgent),
    "RDMA, a stand-in, signed": lambda: TcpLane(SETTINGS, agent=StandInAgent),
    "RDMA, a stand-in, two network cards": lambda: TcpLane(TWO_CARDS, cards=2, agent=StandInAgent),
    "RDMA, NIXL over TCP": lambda: TcpLane(SETTINGS, agent=lambda: NixlAgent("tcp")),
    "RDMA, NIXL over shared memory": lambda: TcpLane(SETTINGS, agent=lambda: NixlAgent("tcp,sm")),
}
