"""Whoever connects and is none of us: closed within seconds, at little cost, and nobody else notices."""

from __future__ import annotations

import contextlib
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


def test_half_open_connections_to_a_summation_server() -> None:
    server = LoneServer()
    with zmq.Context() as context:
        check_round(context, server, 1)
        before = resident_bytes(server.process.pid)
        silent = [tcp(server.address, SILENT) for _ in range(FLOOD)]
        # Those that get as far as to speak ZeroMQ, say HELLO, and never prove anything.
        hello = context.socket(zmq.DEALER)
        hello.linger = 0
        hello.connect(server.address)
        hello.send_multipart([Header(Kind.HELLO, 0).pack(), bytes((1,)) + bytes(32)])
        assert hello.poll(WAIT_S * 1000)
        many = [tcp(server.address, says) for says in HALF_OPEN]
        inside = [local(server.local_address, says) for says in (SILENT, b"noise", header_for(0, b"").pack())]
        check_round(context, server, 2)  # beside them all
        grown = resident_bytes(server.process.pid) - before
        assert grown < MOST_BYTES * (len(silent) + len(many) + len(inside)), grown
        for sock in (*silent, *many, *inside):
            read_to_end(sock)
        hello.close()
        check_round(context, server, 3)
        with contextlib.closing(LocalMachine(server.local_address, 0, SETTINGS)) as inside_machine:
            inside_machine.send(bytes(64), segment=5)
            assert inside_machine.receive()[0].kind is Kind.REFUSED
    assert SETTINGS.secret not in command_line(server.process.pid)
    log = server.end()
    assert "was not asked for a proof" not in log
    assert SETTINGS.secret not in log


@pytest.mark.parametrize("secret", ["", "known to members"], ids=["open", "tls"])
def test_half_open_connections_to_the_scheduler(secret: str) -> None:
    with contextlib.closing(Scheduler(num_workers=1, secret=secret).wait_listening()) as scheduler:
        settings = scheduler.settings
        assert query.status(settings, WAIT_S).members == []
        before = resident_bytes(scheduler.process.pid)
        socks = [tcp(settings.scheduler_address, says) for says in (*HALF_OPEN, *[SILENT] * FLOOD)]
        assert query.status(settings, WAIT_S).members == []
        assert resident_bytes(scheduler.process.pid) - before < MOST_BYTES * len(socks)
        for sock in socks:
            read_to_end(sock)
        assert query.status(settings, WAIT_S).members == []
        assert not secret or secret not in command_line(scheduler.process.pid)
        query.stop(settings, "the test is over", WAIT_S)
        log = scheduler.ended()[1]
        assert "the test is over" in log
        assert not secret or secret not in log


def test_silent_connections_to_a_communication_service() -> None:
    loop = EventLoop()
    listener = Listener("byteps-test-silent-strangers")
    reception = desk.Desk(loop, listener, 1, lambda sentence: None, lambda: None)
    socks = [local(listener.name, SILENT) for _ in range(100)]
    extra = [local(listener.name, says) for says in (b"\x01{", b"\x01[]", b"\x03", b"x" * 1000)]
    loop.call_later(desk._PATIENCE_S + 0.5, loop.stop)
    loop.run()
    assert not reception._strangers
    for sock in socks:
        assert read_to_end(sock) == b""
    for sock in extra:
        assert b"ProtocolError" in read_to_end(sock)
    reception.close()
    loop.close()
