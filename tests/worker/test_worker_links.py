"""The worker's link to a server over TCP, when the network between them breaks and both live."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np
import pytest
import zmq
from support.data_plane import WAIT_S, Server, exact_sum, header_for, random_values
from support.proxy import Proxy

from byteps_py.config.settings import Settings
from byteps_py.runtime import Runtime
from byteps_py.system.loop import EventLoop
from byteps_py.system.shm import Block
from byteps_py.tensors import DType
from byteps_py.wire.data_link import RESENT, SUPPLY, Header, Kind
from byteps_py.worker.io.server_links import LinkEvents, LinkOrigin, LinkTarget, TcpLink

SETTINGS = Settings(
    scheduler_host="127.0.0.1",
    scheduler_port=9999,  # nobody is there: the server's scheduler is the test
    node_host="127.0.0.1",
    job_id="test",
    num_workers=2,
    heartbeat_timeout_s=50.0,
)
COUNT = 50_000


pytestmark = pytest.mark.usefixtures("zeromq_collector")


class Worker:
    """Machine 0: a link in a loop that the test's thread runs. Machine 1 is the far end's, said by hand."""

    def __init__(self) -> None:
        self.server = Server(SETTINGS, num_machines=0, tells_awaited=False)
        self.loop = EventLoop()
        target = urlsplit(self.server.service.address)
        self.proxy = Proxy((str(target.hostname), int(target.port or 0)), self._connected)
        self.server.service._network.address = self.proxy.address  # under which it is known
        self.server.set_members(2)
        self.other = self.server.machine(1)
        self.connections = 0
        self.accepted = threading.Semaphore(0)
        self.answers: list[tuple[Header, bytes]] = []
        self.losses: list[str] = []
        self.given: np.ndarray | None = None  # and not answered
        self.data = bytearray()
        self.context = zmq.Context()
        self.link = TcpLink(
            LinkOrigin(
                self.context, Runtime(loop=self.loop), 0, SETTINGS,
                lambda block, offset, length: memoryview(self.data)[offset : offset + length],
            ),
            LinkTarget(self.proxy.address),
            LinkEvents(self._answered, self._again, self._lost),
        )  # fmt: skip

    def _answered(self, header: Header, frame: zmq.Frame | None) -> None:
        assert frame is not None
        self.answers.append((header, frame.bytes))
        self.given = None
        self.loop.stop()

    def _lost(self, sentence: str) -> None:
        self.losses.append(sentence)
        self.loop.stop()

    def _again(self) -> None:
        """As the executor does."""
        if self.given is not None:
            self.push(self.given, self.round, flags=RESENT)

    def _connected(self, count: int) -> None:
        def wake() -> None:
            self.connections = count
            self.loop.stop()

        self.accepted.release()
        # Twice: what the link's monitor said before is heard in between.
        self.loop.post(lambda: self.loop.post(wake))

    def run(self) -> None:
        """Until the next thing happens."""
        self.loop._stopped = False
        self.loop.run()

    def push(self, values: np.ndarray, round_: int, flags: int = 0) -> None:
        self.given, self.round = values, round_
        self.data = bytearray(values.tobytes())
        header = header_for(0, self.data, round=round_, flags=flags)
        self.link.push(header, Block(0, 0, len(self.data), 0), 0, None)

    def supply(self, values: np.ndarray, round_: int) -> None:
        """The other machine has the result, and is asked for its part once more."""
        asked = threading.Thread(target=self._supply, args=(values, round_))
        asked.start()
        while not self.answers:
            self.run()
        asked.join(WAIT_S)

    def _supply(self, values: np.ndarray, round_: int) -> None:
        assert self.other.receive()[0].kind is Kind.WANT
        self.other.push(values.tobytes(), round=round_, flags=RESENT | SUPPLY)

    def check_round(self, round_: int) -> None:
        """One round of both machines: its sum is exact."""
        both = [random_values(DType.FLOAT32, COUNT, seed=2 * round_ + machine) for machine in range(2)]
        self.push(both[0], round_)
        self.other.push(both[1].tobytes(), round=round_)
        expected = exact_sum(DType.FLOAT32, both).tobytes()
        while not self.answers:
            self.run()
        header, answer = self.answers.pop()
        assert (header.kind, header.round, answer == expected) == (Kind.ANSWER, round_, True)
        assert self.other.result() == expected
        assert self.losses == []

    def close(self) -> None:
        self.link.close()
        self.context.term()
        self.server.__exit__(None, None, None)
        self.proxy.close()
        self.loop.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    try:
        yield worker
    finally:
        worker.close()


def test_a_connection_that_breaks_between_rounds_is_made_again(worker: Worker) -> None:
    for turn in range(1, 4):
        worker.check_round(2 * turn - 1)
        worker.check_round(2 * turn)
        worker.proxy.cut()
        while worker.connections <= turn:
            worker.run()
    worker.check_round(7)
    assert worker.server.link.statistics().rounds == 7


def test_an_answer_that_is_lost_with_its_connection_is_asked_for_again(worker: Worker) -> None:
    worker.check_round(1)
    both = [random_values(DType.FLOAT32, COUNT, seed=seed) for seed in (1, 2)]
    worker.proxy.cut_at(b"BPS1")  # the magic of a header: the answer's
    worker.push(both[0], 2)
    worker.other.push(both[1].tobytes(), round=2)
    assert worker.other.result() == exact_sum(DType.FLOAT32, both).tobytes()
    worker.supply(both[1], 2)
    header, answer = worker.answers.pop()
    assert (header.round, answer) == (2, exact_sum(DType.FLOAT32, both).tobytes())
    worker.check_round(3)


def test_a_push_into_a_connection_that_has_just_ended_waits_for_nothing(worker: Worker) -> None:
    """And is made once more on the next one."""
    worker.check_round(1)
    worker.proxy.cut()
    assert worker.link._dialer._monitor.poll(WAIT_S * 1000)  # it has ended, and the link has not looked
    both = [random_values(DType.FLOAT32, COUNT, seed=seed) for seed in (1, 2)]
    worker.push(both[0], 2)
    worker.other.push(both[1].tobytes(), round=2)
    while not worker.answers:
        worker.run()
    assert worker.answers.pop()[1] == exact_sum(DType.FLOAT32, both).tobytes()


def test_a_server_that_can_not_be_reached_is_told_again_and_again(worker: Worker) -> None:
    """Who is told may want to hear it twice."""
    worker.check_round(1)
    worker.link._silence_s = lambda: 0.25
    worker.proxy.refuse()
    while len(worker.losses) < 2:
        worker.run()
    told = [f"the summation service at {worker.proxy.address} can't be reached since {time} s" for time in (0.25, 0.5)]
    assert worker.losses == told


def test_a_server_that_is_late_and_can_not_be_reached_is_told_after_ten_timeouts(worker: Worker) -> None:
    """It was a member before anybody connected: not for the whole time that a start may take."""
    settings = dataclasses.replace(SETTINGS, heartbeat_timeout_s=0.1, heartbeat_interval_s=0.05, start_timeout_s=600.0)
    worker.proxy.refuse()
    late = TcpLink(
        LinkOrigin(worker.context, Runtime(loop=worker.loop), 0, settings, lambda *block: memoryview(b"")),
        LinkTarget(worker.proxy.address, is_late=True), LinkEvents(worker._answered, worker._again, worker._lost),
    )  # fmt: skip
    worker.link.close()
    try:
        while not worker.losses:
            worker.run()
    finally:
        late.close()
    assert not late.is_open
    assert worker.losses[0] == f"the summation service at {worker.proxy.address} can't be reached since 1 s"
