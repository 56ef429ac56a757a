"""The scheduler as a process, its links as programs use them: real sockets, real deaths."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import grpc
import pytest

from byteps_py import errors
from byteps_py.cli import __main__ as cli
from byteps_py.loop import EventLoop
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import client, query, rpc
from byteps_py.settings import Settings

TIMEOUT_S = 20.0

Factory = Callable[..., "Scheduler"]


@pytest.fixture(autouse=True, scope="module")
def grpc_library() -> Iterator[None]:
    """gRPC's own descriptors live as long as any channel does: keep one, so that no test seems to leak them."""
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        call = channel.unary_unary("/warm/up")
        with contextlib.suppress(grpc.RpcError):
            call(b"", timeout=0.05)
        yield


class Scheduler:
    """A scheduler process on a free loopback port, and the settings to reach it."""

    def __init__(self, **changes: object) -> None:
        self.settings = Settings(
            scheduler_host="127.0.0.1",
            scheduler_port=_free_port(),
            log_level="INFO",
            **changes,  # type: ignore[arg-type]
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "byteps_py.scheduler"],
            env=environment(self.settings), stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.log: list[str] = []

    def wait_listening(self) -> Scheduler:
        pipe = self.process.stderr
        assert pipe is not None
        while not any("listening on" in line for line in self.log):
            assert select.select([pipe], [], [], TIMEOUT_S)[0], "the scheduler says nothing"
            line = pipe.readline()
            assert line, f"the scheduler ended with {self.process.wait(TIMEOUT_S)}: {self.log}"
            self.log.append(line)
        return self

    def ended(self) -> tuple[int, str]:
        """Wait for its end; exit status and log."""
        rest = self.process.communicate(timeout=TIMEOUT_S)[1]
        return self.process.returncode, "".join(self.log) + rest

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        with self.process:
            pass


def environment(settings: Settings) -> dict[str, str]:
    values = {
        "DMLC_PS_ROOT_URI": settings.scheduler_host,
        "DMLC_PS_ROOT_PORT": str(settings.scheduler_port),
        "DMLC_NUM_WORKER": str(settings.num_workers),
        "DMLC_NUM_SERVER": str(settings.num_servers),
        "BYTEPS_START_TIMEOUT_S": str(settings.start_timeout_s),
        "PS_HEARTBEAT_TIMEOUT": str(settings.heartbeat_timeout_s),
        "PS_HEARTBEAT_INTERVAL": str(settings.heartbeat_interval_s),
        "BYTEPS_LOG_LEVEL": settings.log_level,
        "BYTEPS_SECRET": settings.secret,
    }
    return {**os.environ, **values}


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def start() -> Iterator[Factory]:
    with contextlib.ExitStack() as stack:

        def factory(**changes: object) -> Scheduler:
            scheduler = Scheduler(**changes)
            stack.callback(scheduler.close)
            return scheduler

        yield factory


class Member:
    """One end of a control link with an event loop of its own, and what came to it."""

    def __init__(self, settings: Settings, register: pb.Register) -> None:
        self.summed = 300 if register.role == pb.ROLE_SUMMATION else 0
        self.messages: queue.Queue[pb.SchedulerMessage] = queue.Queue()
        self.lost: queue.Queue[errors.BytePSError] = queue.Queue()
        self.beats = threading.Semaphore(0)
        self.callback_threads: set[threading.Thread] = set()
        self.loop = EventLoop()
        self.thread = threading.Thread(target=self.loop.run, name="member-loop")
        self.thread.start()
        self.link = client.connect(settings, register, self.loop, self._message, self._lost, self._heartbeat)

    def _message(self, message: pb.SchedulerMessage) -> None:
        self.callback_threads.add(threading.current_thread())
        self.messages.put(message)

    def _lost(self, error: errors.BytePSError) -> None:
        self.callback_threads.add(threading.current_thread())
        self.lost.put(error)

    def _heartbeat(self) -> pb.Heartbeat:
        self.callback_threads.add(threading.current_thread())
        self.beats.release()
        return pb.Heartbeat(statistics=pb.Statistics(bytes_summed=self.summed, cpu_s=1.5))

    def leave(self) -> None:
        """Close the link where a service does: in the loop's thread."""
        left = threading.Event()
        self.loop.post(lambda: self.link.close("done"))
        self.loop.post(left.set)
        assert left.wait(TIMEOUT_S)

    def wait(self, body: str) -> pb.SchedulerMessage:
        """The next message of this kind; others before it are dropped."""
        while True:
            message = self.messages.get(timeout=TIMEOUT_S)
            if message.HasField(body):
                return message

    def close(self) -> None:
        self.link.close("the test is over")
        self.loop.stop()
        self.thread.join(TIMEOUT_S)
        self.loop.close()


@pytest.fixture
def attend() -> Iterator[Callable[..., Member]]:
    members: list[Member] = []

    def factory(settings: Settings, register: pb.Register) -> Member:
        members.append(Member(settings, register))
        return members[-1]

    yield factory
    for member in members:
        member.close()


Attend = Callable[..., Member]


def as_worker(index: int = 0) -> pb.Register:
    return pb.Register(role=pb.ROLE_COMMUNICATION, kind=pb.MACHINE_KIND_GPU, machine_index=index, local_size=1)


def as_server(index: int = -1) -> pb.Register:
    kind = pb.MACHINE_KIND_CPU if index < 0 else pb.MACHINE_KIND_GPU
    return pb.Register(role=pb.ROLE_SUMMATION, kind=kind, machine_index=index, address=f"tcp://127.0.0.1:{100 + index}")


def ballot(rank: int) -> pb.MemberMessage:
    spec = pb.Spec(dtype=1, shape=[2], op=1, root=-1)
    one = pb.Ballot(name="w", generation=1, votes=[pb.Vote(ranks=[rank], spec=spec)])
    return pb.MemberMessage(declare=pb.Declare(ballots=[one]))


# ---- a job's life --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", ["", "s3cret"])
def test_a_job_from_start_to_end(start: Factory, attend: Attend, secret: str) -> None:
    scheduler = start(num_workers=2, num_servers=2, secret=secret).wait_listening()
    settings = scheduler.settings
    workers = [attend(settings, as_worker(i)) for i in range(2)]
    servers = [attend(settings, at_port(as_server(), i)) for i in range(2)]
    for member in (*workers, *servers):
        membership = member.wait("membership").membership
        assert [m.machine_index for m in membership.workers] == [0, 1]
        assert [m.address for m in membership.servers] == ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]
    for rank, member in enumerate(workers):
        member.link.send(ballot(rank))
        member.link.send(pb.MemberMessage(arrive=pb.Arrive(sequence=1)))
    for member in workers:
        assert member.wait("verdicts").verdicts.verdicts[0].error == ""
        assert member.wait("release").release.sequence == 1
    for member in (*workers, *servers):
        assert member.beats.acquire(timeout=TIMEOUT_S)
    status = query.status(settings, TIMEOUT_S)
    assert (status.state, status.tensors, len(status.members)) == (pb.StatusReply.STATE_RUNNING, 1, 4)
    for member in workers:
        member.leave()
    for member in servers:
        assert member.wait("stop").stop.reason == "all workers have left"
        member.leave()
    code, log = scheduler.ended()
    assert code == 0, log
    assert log.rstrip().endswith("all workers have left")
    for member in (*workers, *servers):
        assert member.callback_threads == {member.thread}
        assert member.lost.empty()


def at_port(register: pb.Register, index: int) -> pb.Register:
    register.address = f"tcp://127.0.0.1:{index + 1}"
    return register


_CHILD = """
import sys
from byteps_py.loop import EventLoop
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import client
from byteps_py.settings import Settings
loop = EventLoop()
register = pb.Register(role=1, kind=1, machine_index=1, local_size=1)
def told(message):
    print(message.WhichOneof("body"), flush=True)
client.connect(Settings.from_env(), register, loop, told, print, pb.Heartbeat)
loop.run()
"""


@pytest.mark.parametrize(
    ("number", "heartbeat_timeout_s", "text"),
    [(signal.SIGKILL, 60.0, "its connection ended"), (signal.SIGSTOP, 2.0, "nothing was heard of it")],
)
def test_a_member_that_dies_or_freezes_fails_the_others_in_bounded_time(
    start: Factory, attend: Attend, number: signal.Signals, heartbeat_timeout_s: float, text: str
) -> None:
    scheduler = start(num_workers=2, num_servers=2, heartbeat_timeout_s=heartbeat_timeout_s).wait_listening()
    settings = scheduler.settings
    here = attend(settings, as_worker(0))
    servers = [attend(settings, at_port(as_server(), i)) for i in range(2)]
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD], env=environment(settings), stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            here.wait("membership")
            child.send_signal(number)
            failure = here.wait("failure").failure
            assert failure.error == "PeerLostError"
            assert failure.message.startswith(f"lost worker 1 (rank 1, host {socket.gethostname()}, pid {child.pid})")
            assert text in failure.message
            assert servers[0].wait("failure").failure == failure
            status = query.status(settings, TIMEOUT_S)
            assert (status.state, status.reason) == (pb.StatusReply.STATE_FAILED, failure.message)
        finally:
            child.kill()
    here.link.close()
    for member in servers:
        member.wait("stop")
        member.link.close()
    code, log = scheduler.ended()
    assert code == 1
    assert f"ERROR: {failure.message}" in log


def test_a_scheduler_that_dies_is_reported_once(start: Factory, attend: Attend) -> None:
    scheduler = start(num_workers=2).wait_listening()
    member = attend(scheduler.settings, as_worker())
    member.wait("welcome")
    scheduler.process.kill()
    error = member.lost.get(timeout=TIMEOUT_S)
    assert isinstance(error, errors.PeerLostError)
    assert scheduler.settings.scheduler_address in str(error)
    member.link.send(pb.MemberMessage())
    member.link.close()
    assert member.lost.empty()


def test_a_rendezvous_that_fails_ends_all(start: Factory, attend: Attend) -> None:
    scheduler = start(num_workers=2, num_servers=2, start_timeout_s=1.0).wait_listening()
    member = attend(scheduler.settings, as_worker())
    failure = member.wait("failure").failure
    assert failure.error == "RendezvousError"
    assert "waiting for 1 worker (DMLC_ROLE=worker, DMLC_WORKER_ID=1) and 2 servers" in failure.message
    member.link.close()
    code, log = scheduler.ended()
    assert code == 1
    assert failure.message in log


def test_a_member_may_come_before_the_scheduler(start: Factory, attend: Attend) -> None:
    scheduler = start(num_workers=1)
    member = attend(scheduler.settings, as_worker())
    member.link.send(ballot(0))  # waits for its turn, after the registration
    member.wait("welcome")
    assert "before the cluster was complete" not in member.wait("verdicts").verdicts.verdicts[0].error
    member.link.close()
    assert scheduler.ended()[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_job_in_order(start: Factory, attend: Attend, number: signal.Signals) -> None:
    scheduler = start(num_workers=1).wait_listening()
    member = attend(scheduler.settings, as_worker())
    member.wait("membership")
    scheduler.process.send_signal(number)
    assert member.wait("stop").stop.reason == f"stopped: the scheduler got {number.name}"
    member.link.close()
    assert scheduler.ended()[0] == 0
    assert member.lost.empty()


# ---- refusals ------------------------------------------------------------------------------------------------


def test_a_refusal_comes_as_its_typed_error(start: Factory, attend: Attend) -> None:
    scheduler = start(num_workers=2).wait_listening()
    first = attend(scheduler.settings, as_worker())
    first.wait("welcome")
    second = attend(scheduler.settings, as_worker())
    assert second.wait("refused").refused.error == "RendezvousError"
    error = second.lost.get(timeout=TIMEOUT_S)
    assert isinstance(error, errors.RendezvousError)
    assert "DMLC_WORKER_ID=0 is taken" in str(error)
    assert first.lost.empty()


@pytest.mark.parametrize("secret", ["", "wrong"])
def test_without_the_secret_nobody_gets_in(start: Factory, attend: Attend, secret: str) -> None:
    scheduler = start(num_workers=1, secret="right").wait_listening()
    # Without a secret nothing says why the other end hangs up: the process tries until it is late, then names it.
    settings = dataclasses.replace(scheduler.settings, secret=secret, start_timeout_s=2.0)
    error = attend(settings, as_worker()).lost.get(timeout=TIMEOUT_S)
    assert isinstance(error, errors.RendezvousError)
    assert "BYTEPS_SECRET" in str(error)
    with pytest.raises(errors.RendezvousError, match="BYTEPS_SECRET"):
        query.status(settings, TIMEOUT_S)
    with pytest.raises(errors.RendezvousError, match="BYTEPS_SECRET"):
        query.stop(settings, "no", TIMEOUT_S)
    assert query.status(scheduler.settings, TIMEOUT_S).members == []


def test_an_occupied_port_is_named(start: Factory) -> None:
    first = start(num_workers=1).wait_listening()
    run = subprocess.run(
        [sys.executable, "-m", "byteps_py.scheduler"],
        env=environment(first.settings), capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert f"DMLC_PS_ROOT_PORT={first.settings.scheduler_port}: Address already in use" in run.stderr


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"DMLC_PS_ROOT_URI": "0.0.0.0"}, "set BYTEPS_SECRET"),
        ({"DMLC_PS_ROOT_URI": "192.0.2.1", "BYTEPS_SECRET": "s"}, "DMLC_PS_ROOT_URI=192.0.2.1"),
        ({"DMLC_PS_ROOT_URI": "no.such.host.invalid", "BYTEPS_SECRET": "s"}, "no.such.host.invalid is not known"),
        ({"DMLC_PS_ROOT_URI": "", "DMLC_PS_ROOT_PORT": ""}, "needs DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"),
    ],
)
def test_an_address_that_can_not_be_served_is_explained(changes: dict[str, str], text: str) -> None:
    settings = Settings(scheduler_host="127.0.0.1", scheduler_port=_free_port())
    run = subprocess.run(
        [sys.executable, "-m", "byteps_py.scheduler"],
        env={**environment(settings), **changes}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert text in run.stderr
    assert "Traceback" not in run.stderr


# ---- nobody there --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_frozen", [False, True])
def test_no_scheduler_is_an_error_at_the_deadline(attend: Attend, is_frozen: bool) -> None:
    """Nobody listens, or somebody does and never says a word."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        if is_frozen:
            sock.listen()
        settings = Settings(scheduler_host="127.0.0.1", scheduler_port=sock.getsockname()[1], start_timeout_s=0.5)
        error = attend(settings, as_worker()).lost.get(timeout=TIMEOUT_S)
        assert isinstance(error, errors.RendezvousError)
        assert f"no scheduler answers at {settings.scheduler_address} after 0.5 s" in str(error)
        with pytest.raises(errors.CommunicationError, match=settings.scheduler_address):
            query.status(settings, 0.3)


def test_a_link_can_be_closed_while_it_still_tries(attend: Attend) -> None:
    settings = Settings(scheduler_host="127.0.0.1", scheduler_port=_free_port())
    member = attend(settings, as_worker())
    member.link.close()
    assert member.lost.empty()


# ---- one machine without a scheduler -------------------------------------------------------------------------


def test_a_single_machine_schedules_itself(attend: Attend) -> None:
    member = attend(Settings(local_size=2), pb.Register(role=1, kind=1, local_size=2))
    membership = member.wait("membership").membership
    assert [(m.first_rank, m.local_size) for m in membership.workers] == [(0, 2)]
    assert not membership.servers
    spec = pb.Spec(dtype=1, shape=[2], op=1, root=-1)
    one = pb.Ballot(name="w", generation=1, votes=[pb.Vote(ranks=[0, 1], spec=spec)])
    member.link.send(pb.MemberMessage(declare=pb.Declare(ballots=[one])))
    assert member.wait("verdicts").verdicts.verdicts[0].spec == spec
    member.link.send(pb.MemberMessage(arrive=pb.Arrive(sequence=1)))
    assert member.wait("release").release.sequence == 1
    for _ in range(3):
        assert member.beats.acquire(timeout=TIMEOUT_S)
    assert member.callback_threads == {member.thread}


def test_several_machines_need_a_scheduler() -> None:
    loop = EventLoop()
    with pytest.raises(errors.ConfigurationError, match="DMLC_PS_ROOT_URI"):
        client.connect(Settings(num_workers=2), as_worker(), loop, print, print, pb.Heartbeat)
    loop.close()


# ---- command line --------------------------------------------------------------------------------------------


def test_bps_status_and_stop(start: Factory, attend: Attend, capsys: pytest.CaptureFixture[str]) -> None:
    scheduler = start(num_workers=1, num_servers=1).wait_listening()
    settings = scheduler.settings
    where = ["--scheduler", settings.scheduler_address]
    assert cli.main(["status", *where]) == 0
    assert capsys.readouterr().out.startswith("forming: 0 of 1 worker, 0 of 1 server: waiting for 1 worker")
    members = [attend(settings, as_worker()), attend(settings, as_server())]
    for member in members:
        member.wait("membership")
        for _ in range(2):  # the second beat comes after the first was sent
            assert member.beats.acquire(timeout=TIMEOUT_S)
    assert cli.main(["status", *where]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("running: all are there: 1 worker with 1 rank")
    worker, server = table[-2:] if table[-2].startswith("worker") else table[:-3:-1]
    assert worker.split()[:2] == ["worker", "GPU"]
    assert f"{socket.gethostname()}:{os.getpid()}" in worker
    assert "100.0%" in server
    assert cli.main(["status", "--json", *where]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["state"] == "running"
    assert {m["kind"] for m in facts["members"]} == {"worker", "server"}
    assert cli.main(["stop", "--reason", "enough", *where]) == 0
    for member in members:
        assert member.wait("stop").stop.reason == "stopped: enough"
        member.link.close()
    assert scheduler.ended()[0] == 0
    assert cli.main(["status", "--timeout", "1", *where]) == 1
    assert "no scheduler answers at" in capsys.readouterr().err
    assert cli.main(["status", "--scheduler", "nowhere"]) == 2


def test_trainers_and_the_core_do_not_load_grpc() -> None:
    code = "import sys, byteps_py, byteps_py.settings, byteps_py.scheduler.core; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_S, check=False).returncode == 0


def test_tokens_are_bound_to_the_job() -> None:
    one, other = (Settings(secret="s", job_id=job) for job in "ab")
    assert rpc.token(one) != rpc.token(other)
    assert rpc.metadata(Settings()) == ()
