"""Whoever connects and is none of us: closed within seconds, at little cost, and nobody else notices."""

from __future__ import annotations

import contextlib
import functools
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import zmq
from support.data_plane import WAIT_S, LocalMachine, Machine, header_for
from support.processes import command_line
from support.schedulers import Scheduler
from support.strangers import (
    HALF_OPEN,
    HTTP2,
    SILENT,
    ZMTP,
    ZMTP_GUESS,
    Greeting,
    Stranger,
    Visit,
    begin_visit,
    resident_bytes,
    see_off,
    unread_bytes,
    visit,
    visit_locally,
    zmtp_beginning,
)
from support.summation import SETTINGS

from byteps_py.dataplane import listener
from byteps_py.runtime import Runtime
from byteps_py.scheduler import query
from byteps_py.scheduler.core import REGISTER_TIMEOUT_S
from byteps_py.security.unauthenticated_connections import PATIENCE_S
from byteps_py.system.channel import Listener
from byteps_py.system.loop import EventLoop
from byteps_py.wire.data_link import Kind
from byteps_py.worker.io.peers import PeerMachines
from byteps_py.worker.ranks import rank_server

# What docs/explanation/security.md promises of a connection.
MOST_S = 5
MOST_BYTES = 64 << 10
MARGIN_S = 5  # for a machine that is busy with other things
FLOOD = 200  # fewer than may wait at once

_MOST_FRAME_BYTES = SETTINGS.max_partition_bytes + listener._SLACK_BYTES  # ZMQ_MAXMSGSIZE
#: As far as a connection gets that shows no password; what a wrong one leads to, test_listening_ports.py shows.
UNPROVEN = Stranger("ZeroMQ: half a password", ZMTP_GUESS[:-4], ZMTP)
UNFINISHED = Stranger(
    "ZeroMQ: all but a byte of the longest frame",
    zmtp_beginning(_MOST_FRAME_BYTES) + bytes(_MOST_FRAME_BYTES - 1),
    ZMTP,
)
TOO_LONG = Stranger(
    "ZeroMQ: all but a byte of a longer one",
    zmtp_beginning(_MOST_FRAME_BYTES + 1) + bytes(_MOST_FRAME_BYTES),
    ZMTP,
)
KINDS = (*HALF_OPEN, UNPROVEN, UNFINISHED, TOO_LONG)


pytestmark = pytest.mark.usefixtures("zeromq_collector")


class LoneServer:
    """A summation server as a process."""

    spoken: Greeting = ZMTP

    def __init__(self) -> None:
        program = Path(__file__).parents[1] / "programs" / "lone_server.py"
        self.process = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.address, self.local_address = self.process.stdout.readline().split()
        self._context = zmq.Context()
        self._rounds = itertools.count(1)

    def check(self) -> None:
        """It sums."""
        round_ = next(self._rounds)
        machines = [Machine(self._context, self.address, index, SETTINGS) for index in range(2)]
        try:
            for machine in machines:
                machine.push(b"\0\0\x80?" * 1000, round=round_)
            assert [machine.result() for machine in machines] == [b"\0\0\0@" * 1000] * 2
        finally:
            for machine in machines:
                machine.close()

    def end(self) -> str:
        """Its log."""
        log = self.process.communicate(timeout=WAIT_S)[1]
        assert self.process.returncode == 0, log
        return log

    def close(self) -> None:
        self._context.term()
        if self.process.poll() is None:
            self.process.kill()
        with self.process:
            pass


def test_time_limits_are_within_what_is_promised() -> None:
    assert max(PATIENCE_S, REGISTER_TIMEOUT_S) < MOST_S - 0.5  # they are looked at from time to time


class LoneScheduler:
    """A scheduler as a process."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self.spoken: Greeting = () if secret else HTTP2  # within TLS, where no stranger gets
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
        self.peers = PeerMachines(Runtime(loop=self.loop), SETTINGS, lambda request: None, lambda machine: None)
        self.listener = Listener("byteps-test-strangers")
        self.rank_server = rank_server.RankServer(
            Runtime(loop=self.loop), self.listener, 1, lambda sentence: None, lambda: None
        )

    def see_off(self, visits: Sequence[Visit]) -> None:
        """Run until they have all been sent away."""

        def hear() -> None:
            try:
                see_off(visits)
            finally:
                self.loop.post(self.loop.stop)

        hearing = threading.Thread(target=hear)
        hearing.start()
        self.loop.run()
        hearing.join()
        self.peers._listener.on_monitor()  # of those that have just gone
        assert not list(self.rank_server._strangers)
        assert len(self.peers._listener._strangers) == 0

    def close(self) -> None:
        self.peers.close()
        self.rank_server.close()
        self.loop.close()


@contextlib.contextmanager
def processes(*starts: Callable[[], LoneServer | LoneScheduler]) -> Iterator[list[LoneServer | LoneScheduler]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(start())) for start in starts]


class Crowd(list[Visit]):
    """UnauthenticatedConnections; whoever is still there in the end is sent home."""

    def add(self, it: Visit) -> Visit:
        self.append(it)
        return it

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for it in self:
            it.close()


start_server = LoneServer
start_scheduler = functools.partial(LoneScheduler, "")
start_secret_scheduler = functools.partial(LoneScheduler, SETTINGS.secret)


@pytest.mark.slow
def test_half_open_connections_to_every_port() -> None:
    """All at once, because all take their time."""
    with (
        processes(start_server, start_scheduler, start_secret_scheduler) as (server, *schedulers),
        contextlib.closing(CommunicationService()) as service,
        Crowd() as visits,
    ):
        assert isinstance(server, LoneServer)
        everybody = (server, *schedulers)
        for process in everybody:
            process.check()
        for process in everybody:
            for stranger in (*KINDS, *[SILENT] * FLOOD):
                visits.add(visit(process.address, stranger, process.spoken))
        for said in (b"", b"noise", header_for(0, b"").pack()):
            visits.add(visit_locally(server.local_address, Stranger(f"{said!r}", said)))
        for process in everybody:
            process.check()  # beside them all
        for stranger in KINDS:
            visits.add(begin_visit(service.peers.address, stranger, ZMTP))
        for stranger in [SILENT] * 100:
            visits.add(visit_locally(service.listener.name, stranger))
        nonsense = [
            visits.add(visit_locally(service.listener.name, Stranger(f"{said[:10]!r}", said)))
            for said in (b"\x01{", b"\x01[]", b"\x03", b"x" * 1000)
        ]
        service.see_off(visits)
        assert not [it for it in visits if it.lasted_s > MOST_S + MARGIN_S]
        assert not [it for it in visits if not it.is_through]
        assert all(b"ProtocolError" in it.heard for it in nonsense)
        for process in everybody:
            process.check()
        with contextlib.closing(LocalMachine(server.local_address, 0, SETTINGS)) as machine:
            machine.send(bytes(64), segment=5)
            assert machine.receive()[0].kind is Kind.REFUSED
        for process in everybody:
            assert SETTINGS.secret not in command_line(process.process.pid)
            assert SETTINGS.secret not in process.end()


def kinds_for(start: Callable[[], LoneServer | LoneScheduler], spoken: Greeting, name: str) -> list[object]:
    """What is no more than noise to it is left out."""
    found = [it for it in KINDS if it.after in ((), spoken)]
    # Each has a process of its own: one in six of them always runs, two more are slow tests, and the others long ones.
    marks = [(), *[pytest.mark.slow, pytest.mark.long, pytest.mark.long] * 2]
    return [pytest.param(start, it, id=f"{name}-{it.name}", marks=marks[number % 6]) for number, it in enumerate(found)]


@pytest.mark.parametrize(
    ("start", "stranger"),
    [
        *kinds_for(start_server, ZMTP, "server"),
        *kinds_for(start_scheduler, HTTP2, "scheduler"),
        *kinds_for(start_secret_scheduler, (), "secret scheduler"),
    ],
)
def test_what_a_connection_costs(start: Callable[[], LoneServer | LoneScheduler], stranger: Stranger) -> None:
    """One kind in a fresh process: what another has left behind would serve it."""
    with processes(start) as (process,), Crowd() as visits:
        process.check()  # and so has what it needs in any case
        before = resident_bytes(process.process.pid)
        while len(visits) < FLOOD:
            visits.add(visit(process.address, stranger, process.spoken))
        process.check()
        while unread_bytes(process.address):
            process.check()
        each = (resident_bytes(process.process.pid) - before) / FLOOD
        # libzmq gives frames only whole, so what there is of one lies in its memory, whoever sends it: as much as
        # ZMQ_MAXMSGSIZE lets it have. (TOO_LONG is cut off at its first bytes.)
        most = MOST_BYTES + (_MOST_FRAME_BYTES if stranger is UNFINISHED else 0)
        assert each < most, f"{each / 1024:.1f} KB for each connection"
        process.end()
