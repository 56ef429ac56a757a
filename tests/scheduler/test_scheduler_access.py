"""The scheduler as a process: which processes it refuses, what callers see without one, and its command line."""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import json
import os
import re
import socket
import subprocess
import sys

import pytest
from support.schedulers import TIMEOUT_S, Attend, Factory, Scheduler, as_server, as_worker, environment

from byteps_py import errors
from byteps_py.cli import __main__ as cli
from byteps_py.config.settings import Settings
from byteps_py.launch.process_plan import free_port
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import call_authenticator, client, query, rpc
from byteps_py.system.loop import EventLoop
from byteps_py.tensors import DType, TensorSpec
from byteps_py.wire.control_link import ControlEvents
from byteps_py.wire.rank_link import pack_spec

pytestmark = pytest.mark.usefixtures("grpc_library")


# ---- refusals ----------------------------------------------------------------------------------------------


def test_a_refusal_is_raised_as_its_typed_error(start: Factory, attend: Attend) -> None:
    scheduler = start(num_workers=2).wait_listening()
    first = attend(scheduler.settings, as_worker())
    first.wait("welcome")
    second = attend(scheduler.settings, as_worker())
    assert second.wait("refused").refused.error == "RendezvousError"
    error = second.lost.get(timeout=TIMEOUT_S)
    assert isinstance(error, errors.RendezvousError)
    assert "DMLC_WORKER_ID=0 is taken" in str(error)
    assert first.lost.empty()


@pytest.mark.parametrize("secret", [pytest.param("", marks=pytest.mark.slow), "not what they know"])
def test_without_the_secret_no_process_is_admitted(start: Factory, attend: Attend, secret: str) -> None:
    scheduler = start(num_workers=1, secret="known to members").wait_listening()
    # Without a secret nothing says why the other end hangs up: the process tries until it is late, then names it.
    settings = dataclasses.replace(scheduler.settings, secret=secret, start_timeout_s=3.0)
    error = attend(settings, as_worker()).lost.get(timeout=TIMEOUT_S)
    assert isinstance(error, errors.RendezvousError)
    assert "BYTEPS_SECRET" in str(error)
    with pytest.raises(errors.RendezvousError, match="BYTEPS_SECRET"):
        query.status(settings, TIMEOUT_S)
    with pytest.raises(errors.RendezvousError, match="BYTEPS_SECRET"):
        query.stop(settings, "no", TIMEOUT_S)
    assert query.status(scheduler.settings, TIMEOUT_S).members == []


def test_refused_processes_are_logged_with_their_addresses(start: Factory) -> None:
    """One that fails TLS's handshake, one that does not begin it; no others."""
    scheduler = start(num_workers=1, secret="right" * 4).wait_listening()
    assert query.status(scheduler.settings, TIMEOUT_S).members == []
    with pytest.raises(errors.RendezvousError, match="BYTEPS_SECRET"):
        query.status(dataclasses.replace(scheduler.settings, secret="wrong" * 4), TIMEOUT_S)
    scheduler.wait_for("it has not proven within 4 s that it knows the cluster secret")
    own = stranger(scheduler, "127.0.0.2")
    scheduler.wait_for(f"turned away {own}: it has not proven within 4 s that it knows the cluster secret")
    with pytest.raises(errors.RendezvousError, match="BYTEPS_JOB_ID"):
        query.status(dataclasses.replace(scheduler.settings, job_id="other"), TIMEOUT_S)
    assert query.status(scheduler.settings, TIMEOUT_S).members == []
    scheduler.process.terminate()
    found = re.findall(r"turned away (127\.0\.0\.\d):\d+: ", scheduler.ended()[1])
    assert found == ["127.0.0.1", "127.0.0.2"]


def test_a_flood_of_refusals_does_not_flood_the_log(start: Factory) -> None:
    scheduler = start(num_workers=1, secret="right" * 4).wait_listening()
    for _ in range(200):
        stranger(scheduler)
    scheduler.wait_for("turned away")
    assert query.status(scheduler.settings, TIMEOUT_S).members == []
    scheduler.process.terminate()
    assert scheduler.ended()[1].count("turned away") == 1


def stranger(scheduler: Scheduler, host: str = "127.0.0.1") -> str:
    """At ``host``, says something that begins no handshake, until it is turned away. Returns its address."""
    place = ("127.0.0.1", scheduler.settings.scheduler_port)
    with socket.create_connection(place, TIMEOUT_S, source_address=(host, 0)) as connection:
        host, port = connection.getsockname()
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            connection.recv(1)
        return f"{host}:{port}"


def test_the_doctest_of_call_authenticator() -> None:
    assert doctest.testmod(call_authenticator).failed == 0


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
        ({"DMLC_PS_ROOT_URI": "192.0.2.1", "BYTEPS_SECRET": "x" * 16}, "DMLC_PS_ROOT_URI=192.0.2.1"),
        ({"DMLC_PS_ROOT_URI": "no.such.host.invalid", "BYTEPS_SECRET": "x" * 16}, "invalid can't be resolved"),
        ({"DMLC_PS_ROOT_URI": "", "DMLC_PS_ROOT_PORT": ""}, "set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"),
    ],
)
def test_an_address_that_can_not_be_served_is_explained(changes: dict[str, str], text: str) -> None:
    settings = Settings(scheduler_host="127.0.0.1", scheduler_port=free_port())
    run = subprocess.run(
        [sys.executable, "-m", "byteps_py.scheduler"],
        env={**environment(settings), **changes}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert text in run.stderr
    assert "Traceback" not in run.stderr


# ---- nobody there ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_frozen", [False, True])
def test_no_scheduler_is_an_error_at_the_deadline(attend: Attend, is_frozen: bool) -> None:
    """No process listens, or one does and never answers."""
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
    settings = Settings(scheduler_host="127.0.0.1", scheduler_port=free_port())
    member = attend(settings, as_worker())
    member.link.close()
    assert member.lost.empty()


# ---- one machine without a scheduler -----------------------------------------------------------------------


def test_a_single_machine_schedules_itself(attend: Attend) -> None:
    member = attend(Settings(local_size=2), pb.Register(role=1, kind=1, local_size=2))
    membership = member.wait("membership").membership
    assert [(m.first_rank, m.local_size) for m in membership.workers] == [(0, 2)]
    assert not membership.servers
    spec = pack_spec(TensorSpec("w", DType.FLOAT32, (2,)))
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
        client.connect(Settings(num_workers=2), as_worker(), loop, ControlEvents(print, print, pb.Heartbeat))
    loop.close()


# ---- command line ------------------------------------------------------------------------------------------


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
    assert table[0].startswith("running: all members have registered: 1 worker with 1 rank")
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
    code = "import sys, byteps_py, byteps_py.config.settings, byteps_py.scheduler.core; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_S, check=False).returncode == 0


def test_tokens_are_bound_to_the_job() -> None:
    one, other = (Settings(secret="x" * 16, job_id=job) for job in "ab")
    assert rpc.token(one) != rpc.token(other)
    assert rpc.metadata(Settings()) == ()
