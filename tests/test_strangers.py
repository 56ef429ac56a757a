"""Whoever connects and is none of us: closed within seconds, at little cost, and nobody else notices."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from support.data_plane import WAIT_S, LocalMachine, Machine, header_for
from support.processes import command_line
from support.schedulers import Scheduler
from support.strangers import HALF_OPEN, SILENT, local, read_to_end, resident_bytes, tcp
from support.summation import SETTINGS
from zmq.utils import garbage

from byteps_py.channel import Listener
from byteps_py.dataplane.strangers import PATIENCE_S, SWEEP_S
from byteps_py.loop import EventLoop
from byteps_py.scheduler import query
from byteps_py.scheduler.core import REGISTER_TIMEOUT_S
from byteps_py.wire import Header, Kind
from byteps_py.worker import desk
from byteps_py.worker.peers import PeerMachines

MOST_BYTES = 64 << 10  # for each connection
FLOOD = 200


@pytest.fixture(scope="module", autouse=True)
def zeromq_collector() -> Iterator[None]:
    """pyzmq's thread that frees memory sent without copying: one per process, started at the first use."""
    zmq.Frame(bytearray(1 << 20))
    yield
    garbage.gc.stop()


class LoneServer:
    """A summation server as a process."""

    def __init__(self) -> None:
        program = Path(__file__).parent / "programs" / "lone_server.py"
        self.process = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.address, self.local_address = self.process.stdout.readline().split()

    def end(self) -> str:
        """Its log."""
        log = self.process.communicate(timeout=WAIT_S)[1]
        assert self.process.returncode == 0, log
        return log


def check_round(context: zmq.Context, server: LoneServer, round_: int) -> None:
    machines = [Machine(context, server.address, index, SETTINGS) for index in range(2)]
    try:
        for machine in machines:
            machine.push(b"\0\0\x80?" * 1000, round=round_)
        assert [machine.result() for machine in machines] == [b"\0\0\0@" * 1000] * 2
    finally:
        for machine in machines:
            machine.close()


def test_time_limits_are_within_what_is_promised() -> None:
    assert max(PATIENCE_S + SWEEP_S, REGISTER_TIMEOUT_S, desk._PATIENCE_S) < 5


class LoneScheduler:
    """A scheduler as a process."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._scheduler = Scheduler(num_workers=1, secret=secret).wait_listening()
        self.address = self._scheduler.settings.scheduler_address
        self.process = self._scheduler.process

    def check(self) -> None:
        assert query.status(self._scheduler.settings, WAIT_S).members == []

    def end(self) -> str:
        query.stop(self._scheduler.settings, "the test is over", WAIT_S)
        return self._scheduler.ended()[1]

    def close(self) -> None:
        self._scheduler.close()


class CommunicationService:
    """Its two doors, in a loop that the test's thread runs."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.peers = PeerMachines(self.loop, SETTINGS, lambda request: None, lambda machine: None)
        self.listener = Listener("byteps-test-strangers")
        self.desk = desk.Desk(self.loop, self.listener, 1, lambda sentence: None, lambda: None)

    def run(self) -> None:
        """Until none of those that have connected before can be there any more."""
        self.loop.call_later(max(PATIENCE_S + 2 * SWEEP_S, desk._PATIENCE_S), self.loop.stop)
        self.loop.run()
        assert not self.desk._strangers
        assert len(self.peers._listener._strangers) == 0

    def close(self) -> None:
        self.peers.close()
        self.desk.close()
        self.loop.close()


def test_half_open_connections_to_every_port() -> None:
    """All at once, because all take their time."""
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(contextlib.closing(CommunicationService()))
        server = LoneServer()
        schedulers = [
            stack.enter_context(contextlib.closing(LoneScheduler(secret))) for secret in ("", SETTINGS.secret)
        ]
        context = stack.enter_context(zmq.Context())

        def check(round_: int) -> None:
            check_round(context, server, round_)
            for scheduler in schedulers:
                scheduler.check()

        check(1)
        processes = (server, *schedulers)
        before = [resident_bytes(process.process.pid) for process in processes]
        floods = [[tcp(each.address, says) for says in (*HALF_OPEN, *[SILENT] * FLOOD)] for each in processes]
        # Those that get as far as to speak ZeroMQ, say HELLO, and never prove anything.
        hello = stack.enter_context(context.socket(zmq.DEALER))
        hello.linger = 0
        hello.connect(server.address)
        hello.send_multipart([Header(Kind.HELLO, 0).pack(), bytes((1,)) + bytes(32)])
        assert hello.poll(WAIT_S * 1000)
        inside = [local(server.local_address, says) for says in (SILENT, b"noise", header_for(0, b"").pack())]
        outside = [tcp(service.peers.address, says) for says in HALF_OPEN]
        silent = [local(service.listener.name, SILENT) for _ in range(100)]
        nonsense = [local(service.listener.name, says) for says in (b"\x01{", b"\x01[]", b"\x03", b"x" * 1000)]
        check(2)  # beside them all
        for process, then, flood in zip(processes, before, floods, strict=True):
            grown = resident_bytes(process.process.pid) - then
            assert grown < MOST_BYTES * len(flood), f"{process.address}: {grown} bytes for {len(flood)} connections"
        service.run()
        for sock in (*inside, *outside, *silent, *itertools.chain(*floods)):
            read_to_end(sock)
        for sock in nonsense:
            assert b"ProtocolError" in read_to_end(sock)
        check(3)
        with contextlib.closing(LocalMachine(server.local_address, 0, SETTINGS)) as machine:
            machine.send(bytes(64), segment=5)
            assert machine.receive()[0].kind is Kind.REFUSED
        for process in processes:
            assert SETTINGS.secret not in command_line(process.process.pid)
            assert SETTINGS.secret not in process.end()
