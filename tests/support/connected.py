"""Ranks of different machines in the test's process, without services: their transports are connected over loopback.
Ranks of one machine share memory."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from byteps_py.config.settings import Settings
from byteps_py.dataplane.nixl_agent import new_rdma_lane
from byteps_py.dataplane.rdma_lane import Poster, RdmaLane
from byteps_py.errors import BytePSError, StallError
from byteps_py.session.peers import PeerTransport
from byteps_py.system import rdma_devices
from support.rdma import StandInAgent

WAIT_S = 30.0
#: In the place of UCX's transports.
STAND_IN = "self"
SECRET = "a secret of at least sixteen characters"
#: By protection of the connections, and by their number.
SETTINGS = {
    "open": Settings(num_workers=4),
    "signed": Settings(num_workers=4, secret=SECRET),
    "encrypted": Settings(num_workers=4, secret=SECRET, encrypt=True),
    "several": Settings(num_workers=4, connections_per_link=4),
    "several, encrypted": Settings(num_workers=4, secret=SECRET, encrypt=True, connections_per_link=3),
}


#: All ways from one rank to another: settings, and the ranks on each machine.
LANES = {
    **{name: (settings, 1) for name, settings in SETTINGS.items()},
    "IPv6": (Settings(num_workers=4, node_host="::1", secret=SECRET), 1),
    "two network cards": (Settings(num_workers=4, interfaces="127.0.0.1,127.0.0.2", secret=SECRET), 1),
    "shared memory": (Settings(num_workers=4), 2),
    "RDMA, a stand-in": (Settings(num_workers=4, enable_rdma="1", rdma_transports=STAND_IN), 1),
    "RDMA, a stand-in, signed": (
        Settings(num_workers=4, enable_rdma="1", rdma_transports=STAND_IN, secret=SECRET, connections_per_link=2), 1,
    ),
    **{
        f"RDMA, NIXL over {name}": (Settings(num_workers=4, enable_rdma="1", rdma_transports=transports), 1)
        for name, transports in (("TCP", "tcp"), ("shared memory", "tcp,sm"))
        if rdma_devices.library()
    },
}  # fmt: skip


def new_lane(settings: Settings, poster: Poster) -> RdmaLane:
    """As a session's, or one whose agent is a stand-in."""
    if settings.rdma_transports == STAND_IN:
        return RdmaLane(StandInAgent(), poster, settings.patience_s)
    return new_rdma_lane(settings, poster)


class ConnectedRank:
    """A session that receives messages of its peers only. ``fatal`` ends it. ``on_machine``: ranks on each machine."""

    is_being_read = False

    def __init__(self, rank: int, settings: Settings, epoch: int = 0, on_machine: int = 1) -> None:
        self.rank = rank
        self.state = threading.Condition(threading.RLock())
        self.told: list[bytes] = []
        self.fatal: BytePSError | None = None
        first = rank - rank % on_machine
        self.near = range(first, first + on_machine)
        lane = functools.partial(new_lane, settings) if settings.rdma else None
        self.transport = PeerTransport(self, rank, self.near, settings, epoch, lane)

    def check_open(self) -> None:
        if self.fatal is not None:
            raise self.fatal

    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None, what: Callable[[], str]) -> None:
        deadline = time.monotonic() + (WAIT_S if timeout_s is None else timeout_s)
        readable = select.poll()
        readable.register(self.transport.fileno(), select.POLLIN)
        while not condition():
            self.check_open()
            if time.monotonic() > deadline:
                raise StallError(what())
            if readable.poll(max(0.0, 1000 * min(deadline - time.monotonic(), 0.05))):
                with self.state:
                    self.transport.take_message()

    def send(self, message: object, fds: tuple[int, ...] = ()) -> None:
        self.told.append(message)

    def tell(self, message: object) -> None:
        self.told.append(message)


@contextlib.contextmanager
def connected(count: int, settings: Settings, on_machine: int = 1) -> Iterator[list[ConnectedRank]]:
    """``count`` ranks, ``on_machine`` on each machine."""
    ranks = [ConnectedRank(rank, settings, on_machine=on_machine) for rank in range(count)]
    try:
        connect(ranks)
        yield ranks
    finally:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda rank: rank.transport.close(), ranks))


def connect(ranks: list[ConnectedRank]) -> None:
    """Connect all of ``ranks`` with each other, and introduce those of each machine."""
    for rank in ranks:
        for local_rank, near in enumerate(rank.near):
            if near != rank.rank:
                rank.transport.introduce(local_rank, os.dup(ranks[near].transport._inbox.write_fd))
    connectors = [rank.transport.connector for rank in ranks]
    addresses = {rank: connector.address() for rank, connector in enumerate(connectors) if connector is not None}
    with ThreadPoolExecutor(len(ranks)) as pool:
        for done in [
            pool.submit(connector.connect, {r: a for r, a in addresses.items() if r not in ranks[rank].near}, WAIT_S)
            for rank, connector in enumerate(connectors)
            if connector is not None
        ]:
            done.result()
    for rank in ranks:
        far = [other for other in range(len(ranks)) if other not in rank.near]
        rank.wait_until(lambda rank=rank, far=far: rank.transport.knows_memory(far), WAIT_S, lambda: "no MEMORY")
