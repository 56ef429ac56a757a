"""What a communication service (machine 0) answers other machines (machine 1: the test), and what it does not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import zmq
from support.damage import Flipper
from support.data_plane import Machine
from support.proxy import Proxy
from support.worker_core import slot, tensor

from byteps_py.config.settings import Settings
from byteps_py.dataplane.listener import RemotePeer
from byteps_py.errors import MismatchError
from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime
from byteps_py.system.loop import EventLoop
from byteps_py.wire.data_link import Fetch, Header, Kind
from byteps_py.worker.core.pieces import PieceRequest, Receipt
from byteps_py.worker.core.tensor import AskSum, ScatterPart, SumRequest
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.io.peers import PeerMachines

SETTINGS = Settings(
    scheduler_host="127.0.0.1",
    scheduler_port=9999,
    node_host="127.0.0.1",
    job_id="test",
    num_workers=2,
    secret="s3cret of members",
)
Connect = Callable[..., Machine]
LARGE = bytes(range(256)) * 4096
SCATTERED = tensor([slot(0)])


class Service:
    """Answers a request for key 1, or SCATTERED's, with LARGE, for key 2 with a few bytes, and refuses others."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.peers = PeerMachines(Runtime(loop=self.loop), SETTINGS, self._requested, lambda machine: None)
        self.requests: list[PieceRequest | SumRequest | Receipt] = []
        self.served = threading.Semaphore(0)
        self._thread = threading.Thread(target=self.loop.run)
        self._thread.start()

    def open(self) -> None:
        workers = tuple(pb.Member(machine_index=i) for i in range(2))
        self.loop.post(lambda: self.peers.open(Topology(1, 0, workers, (), 1 << 20, 1), lambda *lost: None))

    def _requested(self, request: PieceRequest | SumRequest | Receipt) -> None:
        self.requests.append(request)
        if isinstance(request, Receipt):
            return
        if request.key not in (1, 2, SCATTERED.key):
            raise MismatchError("sizes differ")
        data = memoryview(b"few" if request.key == 2 else LARGE)
        self.peers.serve(request.origin, data, self.served.release)

    def close(self) -> None:
        self.loop.stop()
        self._thread.join()
        self.peers.close()
        self.loop.close()


pytestmark = pytest.mark.usefixtures("zeromq_collector")


@pytest.fixture(name="service")
def real_machine() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()


@pytest.fixture(name="connect")
def other_machine(service: Service) -> Iterator[Connect]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    machines = []

    def connect(shown: bytes | None = None) -> Machine:
        machines.append(Machine(context, service.peers.address, 1, SETTINGS, shown))
        return machines[-1]

    yield connect
    for machine in machines:
        machine.socket.close()
    context.term()


def fetch(machine: Machine, key: int, body: bytes | None = None, kind: Kind = Kind.FETCH) -> tuple[Header, bytes]:
    header = Header(kind, machine.index, epoch=1, key=key, index=77, round=3, offset=5, length=9)
    machine.send(header, Fetch(0, 1, 9).pack() if body is None else body)
    return machine.receive()


def test_who_asks_before_the_cluster_is_known_here_is_answered_after(service: Service, connect: Connect) -> None:
    machine = connect()
    service.loop.call_later(0.0, service.open)
    header, answer = fetch(machine, 2)
    assert (header.kind, header.index, answer) == (Kind.ANSWER, 77, b"few")
    (request,) = service.requests
    assert isinstance(request, PieceRequest)
    facts = (request.machine, request.round, request.source, request.target, request.offset, request.length)
    assert (*facts, request.total) == (1, 3, 0, 1, 5, 9, 9)


def test_large_answers_leave_from_where_they_lie_and_then_it_is_told(service: Service, connect: Connect) -> None:
    service.open()
    machine = connect()
    assert fetch(machine, 1, b"", Kind.FETCH_SUM)[1] == LARGE
    assert service.served.acquire(timeout=10)
    assert isinstance(service.requests[0], SumRequest)
    assert service.peers.traffic.bytes_sent == len(LARGE)


@pytest.mark.parametrize("nbytes", [3, len(LARGE)])
def test_what_is_for_a_machine_that_is_gone_is_not_taken(service: Service, nbytes: int) -> None:
    """It asks again on its next connection, and then must find it."""
    nobody = SimpleNamespace(send_result=lambda *given: False, send_tracked=lambda *given: None)
    peer = RemotePeer(cast(Any, nobody), b"", 1, cast(Any, (None, None)), 0)
    service.peers.serve((peer, Header(Kind.FETCH, 1)), memoryview(LARGE)[:nbytes], service.served.release)
    assert not service.served.acquire(blocking=False)


def test_memory_is_free_once_all_that_is_being_sent_has_left() -> None:
    timers: list[Callable[[], None]] = []
    told: list[str] = []
    peers = object.__new__(PeerMachines)
    peers._loop = cast(Any, SimpleNamespace(call_later=lambda delay_s, then: timers.append(then)))
    peers._runtime = Runtime(loop=peers._loop)
    peers._leaving, peers._is_watching = [], False
    tracker = SimpleNamespace(done=False)
    network = SimpleNamespace(send_tracked=lambda *given: tracker)
    peer = RemotePeer(cast(Any, network), b"", 1, cast(Any, (None, None)), 0)
    peers.serve((peer, Header(Kind.FETCH, 1)), memoryview(LARGE), lambda: told.append("sent"))
    peers.when_left(lambda: told.append("free"))
    timers.pop()()
    assert told == []
    tracker.done = True
    timers.pop()()
    assert told == ["sent", "free"]
    assert timers == []
    peers.when_left(lambda: told.append("at once"))
    assert told[-1] == "at once"


@pytest.mark.parametrize(("newer", "gone"), [(None, [1]), (object(), [])])
def test_a_machine_that_has_connected_again_is_not_gone(newer: object, gone: list[int]) -> None:
    """The end of its older connection shows late, and what it has asked for since must stay."""
    told: list[int] = []
    peers = object.__new__(PeerMachines)
    peers._listener = cast(Any, SimpleNamespace(peer_of=lambda machine: newer))
    peers._on_gone = told.append
    peers._gone(cast(Any, SimpleNamespace(machine=1)))
    assert told == gone


def test_strangers_and_nonsense_are_refused_and_nothing_else_happens(service: Service, connect: Connect) -> None:
    service.open()
    stranger = connect(b"guessed")
    stranger.prove()
    assert stranger.refusal().endswith("its proof of membership is wrong: do job and secret agree?")
    assert "no HELLO was accepted" in fetch(stranger, 1)[1].decode()
    assert service.requests == []
    machine = connect()
    for kind, body, text in (
        (Kind.FETCH, b"short", "malformed Fetch: it has at least 25 bytes, got 5"),
        (Kind.FETCH, None, "MismatchError\nsizes differ"),
        (Kind.PUSH, b"", "machine 1 must not send PUSH as machine 1"),
    ):
        header, answer = fetch(machine, 9, body, kind)
        assert header.kind is Kind.REFUSED
        assert text in answer.decode()
    assert fetch(machine, 2)[1] == b"few"


@pytest.mark.parametrize("to_listener", [False, True], ids=["answer", "request"])
def test_what_is_damaged_between_communication_services_is_said_again(service: Service, to_listener: bool) -> None:
    """Machine 1, a real one, asks for a part over a network that flips a bit once."""
    service.open()
    target = urlsplit(service.peers.address)
    proxy = Proxy((str(target.hostname), int(target.port or 0)))
    service.peers._listener.address = proxy.address  # under which it is known
    loop = EventLoop()
    asking = PeerMachines(
        Runtime(loop=loop), replace(SETTINGS, worker_id=1), lambda request: None, lambda machine: None
    )
    workers = (pb.Member(machine_index=0, address=proxy.address), pb.Member(machine_index=1))
    asking.open(Topology(1, 1, workers, (), 1 << 20, 1), lambda *lost: None)
    came: list[bytes] = []

    def ask() -> None:
        ask = AskSum(ScatterPart(SCATTERED, 0, 0, len(LARGE), -1), len(came) + 1, 0, len(LARGE))
        asking.fetch(ask, then, lambda error: loop.stop())

    def then(frame: zmq.Frame) -> None:
        came.append(frame.bytes)
        if len(came) == 3:
            loop.stop()
            return
        # A request is a small chunk, so any will do; of an answer, some chunk is large.
        flipper = proxy.alter = proxy.alter or Flipper(to_listener, 1, least=80 if to_listener else 8192)
        assert isinstance(flipper, Flipper)
        ask()

    ask()
    try:
        loop.run()
        assert came == [LARGE] * 3
        assert isinstance(proxy.alter, Flipper)
        assert proxy.alter.flipped == 1
    finally:
        asking.close()
        loop.close()
        proxy.close()


def test_who_has_got_a_piece_says_so_with_a_request_or_by_itself(service: Service, connect: Connect) -> None:
    service.open()
    machine = connect()
    machine.send(Header(Kind.TAKEN, 1, epoch=1, key=2, index=5, round=2), Fetch(0, 1, 0, taken=2).pack())
    assert fetch(machine, 2, Fetch(0, 1, 9, taken=3).pack())[1] == b"few"
    first, second, request = service.requests
    for receipt, round_ in ((first, 2), (second, 3)):
        assert isinstance(receipt, Receipt)
        assert (receipt.machine, receipt.key, receipt.round, receipt.source, receipt.target) == (1, 2, round_, 0, 1)
    assert isinstance(request, PieceRequest)
