"""What a process takes from its surroundings, replaced by the world's, for as long as a run lasts."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from byteps_py import strips
from byteps_py.kernels import readiness
from byteps_py.placement import table
from byteps_py.placement.table import PlacementTable
from byteps_py.server import local as server_local
from byteps_py.server import reducer
from byteps_py.server import service as server_service
from byteps_py.session import remote, slots
from byteps_py.worker import (
    courier,
    desk,
    elastic_desk,
    executor,
    group,
    joining,
    links,
    memory,
    network,
    peers,
    placing,
    ranks,
    requests,
    service,
)
from byteps_py.worker.direct import Direct

from .control import ControlLink, Place
from .ledger import Ledger, LedgerNetwork
from .local import Listener, Local
from .memory import Engine, Kernels, Memory
from .network import Network, ServerNetwork, TcpLink
from .peers import PeerDialer, PeerListener
from .program import PARTITION_BYTES
from .services import Probe, Queue
from .visits import RestlessTable, has_visits, slowness
from .world import Process, World


class Surroundings:
    """``booting``: the process whose constructor runs."""

    def __init__(self, world: World, memory_: Memory, local: Local, net: Network, place: Place) -> None:
        self.booting: Process
        self._world = world
        self._memory = memory_
        self._local = local
        self._net = net
        self._place = place
        self.ledger = Ledger(memory_, lambda: self._active().group)

    def connect(self, *args: Any) -> ControlLink:
        return self._place.link(*args)

    def _substitutes(self) -> dict[Any, dict[str, Any]]:
        world, memory_, local, net = self._world, self._memory, self._local, self._net
        kernels = Kernels(memory_)
        clock = SimpleNamespace(monotonic=world.monotonic)
        context = SimpleNamespace(term=lambda: None)

        def new_loop() -> Any:
            return local.new_loop(self.booting)

        def new_engine(threads: int, name: str) -> Engine:
            return Engine(world, memory_, self.booting)

        def new_listener(name: str) -> Listener:
            return Listener(world, local, self.booting, name)

        def new_server_network(host: str, settings: Any, traffic: Any, *callbacks: Any) -> ServerNetwork:
            return ServerNetwork(net, self.booting, *callbacks)

        def new_peer_listener(host: str, settings: Any, traffic: Any, *given: Any) -> PeerListener:
            return PeerListener(net, self.booting, *given)

        # A link, or a rank's connection, is made by its service in one of its events.
        os_ = SimpleNamespace(
            pidfd_open=lambda pid: local.open_pidfd(pid, self._active()),
            close=lambda fd: None,
            getpid=lambda: self.booting.pid,
        )
        # Half of all kernels are small enough for the loop's thread, half are not.
        small = PARTITION_BYTES * world.random.choice((0, 1, 2, 100))
        strip = world.random.choice((8, 32, 64))
        return {
            service: {
                "EventLoop": new_loop, "Listener": new_listener, "Engine": new_engine, "connect": self.connect,
                "time": clock,
                "Probe": lambda loop, *given: Probe(world, loop, given[-1]),
            },
            group: {
                "time": clock, "PushQueue": lambda: Queue(world),
                "Network": type("SimulatedNetwork", (LedgerNetwork,), {"ledger": self.ledger}),
                "LOCAL_PIECE_BYTES": PARTITION_BYTES // 2, "Direct": functools.partial(Direct, small_bytes=small // 4),
            },
            executor: {
                "time": clock, "kernels": kernels, "INLINE_BYTES": small, "LAST_INLINE_BYTES": small,
            },
            courier: {
                "time": clock, "kernels": kernels, "_INLINE_BYTES": small,
                "ctypes": SimpleNamespace(
                    memmove=memory_.move, addressof=ctypes.addressof, c_char=ctypes.c_char
                ),
            },
            peers: {
                "DataListener": new_peer_listener, "COPY_BYTES": world.random.choice((1, 20, 1000)),
                "zmq": SimpleNamespace(Context=lambda: context, Frame=lambda data, copy: bytes(data)),
                "_SENT_CHECK_S": 0.01,
            },
            requests: {"time": clock},
            joining: {"time": clock},
            desk: {"time": clock},
            elastic_desk: {"os": os_, "select": SimpleNamespace(select=local.select)},
            memory: {"Arena": memory_.new_arena},
            placing: {
                "LOCAL_PIECE_BYTES": PARTITION_BYTES,
                "PlacementTable": RestlessTable if has_visits(world.seed) else PlacementTable,
            },
            # Small as all is here, with the real one no server is so much above its share that a partition leaves it.
            table: {"MIN_CUT_BYTES": table.MIN_CUT_BYTES if world.seed % 5 == 3 else PARTITION_BYTES // 8},
            network: {
                "TcpLink": type("SimulatedTcpLink", (TcpLink,), {"network": net}),
                "zmq": SimpleNamespace(Context=lambda: context),
            },
            links: {
                "connect_channel": lambda name, timeout_s: local.connect(name, self._active()),
                "Dialer": type("SimulatedDialer", (PeerDialer,), {"network": net}),
            },
            ranks: {"os": os_},
            server_service: {"EventLoop": new_loop, "Network": new_server_network, "time": clock, "os": os_},
            server_local: {"Listener": new_listener, "Segment": memory_.map_segment, "os": os_},
            readiness: {"prepare": kernels.prepare},
            reducer: {
                "Engine": lambda threads, name: Engine(world, memory_, self.booting, True, slowness(world.seed)),
                "kernels": Kernels(memory_, is_lenient=True), "INLINE_BYTES": small,
                "ctypes": SimpleNamespace(memmove=memory_.move),
            },
            slots: {"Segment": memory_.map_segment},
            remote: {"open_stack_dump": lambda: None, "STRIP_BYTES": strip},  # no process has a stack of its own
            strips: {"STRIP_BYTES": strip},
        }  # fmt: skip

    def _active(self) -> Process:
        active = self._world.active
        if active is None:
            raise AssertionError("no process is at work")
        return active

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        replaced = []
        disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            for module, names in self._substitutes().items():
                for name, substitute in names.items():
                    replaced.append((module, name, getattr(module, name)))
                    setattr(module, name, substitute)
            yield
        finally:
            for module, name, original in reversed(replaced):
                setattr(module, name, original)
            logging.disable(disabled)
