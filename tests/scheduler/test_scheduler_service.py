"""The scheduler as a process, its links as programs use them, from start to end: real sockets, real deaths."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from support.breaking import command
from support.clusters import has_namespaces
from support.schedulers import (
    CHILD,
    TIMEOUT_S,
    Attend,
    Factory,
    as_server,
    as_worker,
    ballot,
    environment,
)

from byteps_py import errors
from byteps_py.config.settings import Settings
from byteps_py.dataplane.traffic import Limiter, Traffic
from byteps_py.launch.process_plan import free_port
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import query
from byteps_py.scheduler.grpc_link import GrpcControlLink
from byteps_py.scheduler.member_links.links import Sent
from byteps_py.scheduler.service import UNREGISTERED, SchedulerService

pytestmark = pytest.mark.usefixtures("grpc_library")


def test_a_members_connection_says_again_at_a_steady_pace(start: Factory, attend: Attend) -> None:
    settings = start(num_workers=1).wait_listening().settings
    member = attend(settings, as_worker(0))
    member.wait("membership")
    assert cast(GrpcControlLink, member.link).steady_connections == 1
    member.leave()


@pytest.mark.parametrize("secret", ["", "s3cret of members"])
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


@pytest.mark.parametrize(
    ("number", "heartbeat_timeout_s", "text"),
    [(signal.SIGKILL, 60.0, "its connection ended"), (signal.SIGSTOP, 2.0, "nothing was heard of it")],
)
def test_a_member_that_dies_or_freezes_fails_the_others_in_bounded_time(
    start: Factory, attend: Attend, number: signal.Signals, heartbeat_timeout_s: float, text: str
) -> None:
    limits = {"heartbeat_timeout_s": heartbeat_timeout_s, "heartbeat_timeout_max_s": 3 * heartbeat_timeout_s}
    scheduler = start(num_workers=2, num_servers=2, **limits).wait_listening()
    settings = scheduler.settings
    here = attend(settings, as_worker(0))
    servers = [attend(settings, at_port(as_server(), i)) for i in range(2)]
    elsewhere = {**environment(settings), "BYTEPS_MACHINE_ID": "elsewhere"}
    with subprocess.Popen([sys.executable, "-c", CHILD], env=elsewhere, stdout=subprocess.PIPE, text=True) as child:
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


def test_a_scheduler_that_dies_early_and_does_not_come_back_is_reported_once(start: Factory, attend: Attend) -> None:
    scheduler = start(num_workers=2, start_timeout_s=3.0).wait_listening()
    member = attend(scheduler.settings, as_worker())
    member.wait("welcome")
    scheduler.kill()
    for error in (member.away.get(timeout=TIMEOUT_S), member.lost.get(timeout=TIMEOUT_S)):
        assert isinstance(error, errors.PeerLostError)
        assert scheduler.settings.scheduler_address in str(error)
    member.link.send(pb.MemberMessage())
    member.link.close()
    assert member.lost.empty()


def test_a_rendezvous_that_fails_ends_all(start: Factory, attend: Attend) -> None:
    scheduler = start(num_workers=2, num_servers=2, start_timeout_s=5.0).wait_listening()
    member = attend(scheduler.settings, as_worker())
    failure = member.wait("failure").failure
    assert failure.error == "RendezvousError"
    assert "waiting for 1 worker (DMLC_ROLE=worker, DMLC_WORKER_ID=1) and 2 servers" in failure.message
    member.link.close()
    code, log = scheduler.ended()
    assert code == 1
    assert failure.message in log


def test_a_member_may_start_before_the_scheduler(start: Factory, attend: Attend) -> None:
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_that_arrive_while_it_exits_do_not_change_its_status(start: Factory, number: signal.Signals) -> None:
    scheduler = start(num_workers=1).wait_listening()
    while scheduler.process.poll() is None:
        scheduler.process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            scheduler.process.wait(0.002)
    assert scheduler.ended()[0] == 0


def test_a_flood_of_strangers_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    service = SchedulerService(Settings(num_workers=2))
    service._strangers = Traffic(_log_limiter=Limiter(5, clock=lambda: 0.0))
    refused = pb.SchedulerMessage(refused=pb.Refused(error="ProtocolError", message="not registered in time"))
    stranger, member = (SimpleNamespace(who=who, put=lambda sent: None) for who in (UNREGISTERED, "worker 3"))
    for stream in range(100):
        service._streams[stream] = stranger if stream % 10 else member  # type: ignore[assignment]
        service._send(Sent(stream, refused))
    said = [record.getMessage() for record in caplog.records]
    assert said.count("turned away a process: not registered in time") == 5
    assert said.count("turned away worker 3: not registered in time") == 10
    assert len(said) == 15


@pytest.mark.skipif(not has_namespaces(), reason="needs root and iproute2 (namespaces)")
def test_a_name_that_leads_to_loopback_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.1.1 gpu1\n")
    enter = 'mount --bind "$1" /etc/hosts; shift; exec "$@"'
    words = ("unshare", "-m", "sh", "-c", enter, "-", str(tmp_path / "hosts"))
    environ = {"DMLC_PS_ROOT_URI": "gpu1", "DMLC_PS_ROOT_PORT": str(free_port()), "DMLC_NUM_WORKER": "2"}
    with command(*words, sys.executable, "-m", "byteps_py.scheduler", **environ) as job:
        job.until("gpu1 is 127.0.1.1 on this machine, which other machines can't reach")
        job.signal(signal.SIGTERM)
        job.end()
