"""Communication services that fetch from each other by RDMA: pieces of a gather, and sums for their owners."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import zmq
from support.rdma import StandInAgent
from support.worker_core import slot, tensor

from byteps_py.config.settings import Settings
from byteps_py.dataplane.rdma_lane import RdmaLane
from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime
from byteps_py.system.loop import EventLoop
from byteps_py.system.shm import Arena
from byteps_py.worker.core.pieces import PieceRequest, Receipt
from byteps_py.worker.core.tensor import AskSum, ScatterPart, SumRequest
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.io.peers import PeerMachines

pytestmark = pytest.mark.usefixtures("zeromq_collector")

SETTINGS = Settings(
    scheduler_host="127.0.0.1", scheduler_port=9999, node_host="127.0.0.1", job_id="test", num_workers=2,
    secret="s3cret of members", enable_rdma="1", rdma_transports="tcp",
)  # fmt: skip
NBYTES = 600 << 10
SCATTERED = tensor([slot(0)])


class Pair:
    """Machine 0 has NBYTES in shared memory; machine 1 asks for them."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.arenas = [Arena(), Arena()]
        self.block = self.arenas[0].allocate(NBYTES)
        self.freed: list[int] = []
        self.came: list[bytes] = []
        self.lanes: list[RdmaLane] = []
        self.agents: list[StandInAgent] = []
        self.peers = [
            PeerMachines(
                Runtime(loop=self.loop), replace(SETTINGS, worker_id=index), self._requested, lambda machine: None
            )
            for index in range(2)
        ]

    def new_lane(self, index: int) -> RdmaLane:
        self.agents.append(StandInAgent())
        lane = RdmaLane(self.agents[-1], self.loop, SETTINGS.patience_s)
        lane.watch(self.arenas[index])
        self.lanes.append(lane)
        return lane

    def open(self, index: int, group: int = 1) -> None:
        workers = tuple(pb.Member(machine_index=i, address=self.peers[i].address) for i in range(2))
        topology = Topology(group, index, workers, (), 1 << 20, group)
        self.peers[index].open(topology, lambda *lost: None, self.new_lane(index))

    def ask(self, value: int) -> None:
        ctypes.memset(self.block.address, value, NBYTES)
        round_ = len(self.came) + 1
        ask = AskSum(ScatterPart(SCATTERED, 0, 0, NBYTES, -1), round_, 0, NBYTES)
        self.peers[1].fetch(ask, self._then, lambda error: pytest.fail(str(error)))

    def _then(self, frame: zmq.Frame) -> None:
        ctypes.c_char.from_buffer(frame.buffer)  # as those who add from there do
        self.came.append(frame.bytes)

    def _requested(self, request: PieceRequest | SumRequest | Receipt) -> None:
        assert isinstance(request, SumRequest)
        view = memoryview((ctypes.c_char * NBYTES).from_address(self.block.address)).cast("B")
        self.peers[0].serve(request.origin, view, lambda: self.freed.append(request.round))

    def until(self, is_so: Callable[[], bool]) -> None:
        end_s = self.loop.time() + 20
        while not is_so():
            assert self.loop.time() < end_s
            self.loop.run_once(self.loop.time() + 0.05)

    def close(self) -> None:
        for peers in self.peers:
            peers.close()
        for lane in self.lanes:
            lane.close()
        self.loop.close()
        for arena in self.arenas:
            arena.close()


@pytest.fixture(name="pair")
def opened() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_what_is_fetched_is_read_and_its_memory_is_free_after_that(pair: Pair) -> None:
    pair.open(0)
    pair.open(1)
    pair.agents[1].is_stuck = True
    pair.ask(3)
    pair.until(lambda: bool(pair.agents[1].reads))
    for _ in range(5):
        pair.loop.run_once(pair.loop.time() + 0.005)
    assert (pair.came, pair.freed) == ([], [])
    pair.agents[1].is_stuck = False
    pair.until(lambda: bool(pair.freed))
    assert pair.came == [bytes([3]) * NBYTES]
    assert pair.lanes[1].bytes_read == NBYTES


def test_who_asks_before_the_group_is_known_there_waits_and_reads(pair: Pair) -> None:
    """It would be TCP, and nobody would have asked for that."""
    pair.open(1)
    pair.ask(4)
    pair.until(lambda: bool(pair.peers[0]._listener._asked_early))
    pair.open(0)
    pair.until(lambda: bool(pair.freed))
    assert pair.came == [bytes([4]) * NBYTES]
    assert pair.lanes[0].bytes_read == NBYTES


@pytest.mark.parametrize("first", [0, 1])
def test_the_next_group_reads_from_memory_of_its_own(pair: Pair, first: int) -> None:
    pair.open(0)
    pair.open(1)
    pair.ask(5)
    pair.until(lambda: bool(pair.freed))
    for index in (first, 1 - first):
        pair.peers[index].leave()
        pair.open(index, group=2)
        if index:
            pair.ask(6)
            pair.until(lambda: pair.peers[1]._link(0).is_open or bool(pair.peers[0]._listener._asked_early))
    pair.until(lambda: len(pair.freed) == 2)
    assert pair.came[-1] == bytes([6]) * NBYTES
    assert pair.lanes[-1 if first == 0 else 2].bytes_read == NBYTES


def test_who_has_gone_before_the_group_is_known_there_is_forgotten(pair: Pair) -> None:
    pair.open(1)
    pair.ask(4)
    pair.until(lambda: bool(pair.peers[0]._listener._asked_early))
    pair.peers[1].leave()
    pair.until(lambda: not pair.peers[0]._listener._asked_early)
    pair.open(0)
    assert not pair.agents[1].known
