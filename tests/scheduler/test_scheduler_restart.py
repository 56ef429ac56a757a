"""Schedulers that are killed and started again, and connections to them that break: real processes, real sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import cast

import grpc
import pytest
from support.ports import answering
from support.proxy import Proxy
from support.schedulers import (
    CHILD,
    TIMEOUT_S,
    Attend,
    Factory,
    Member,
    Scheduler,
    as_server,
    as_worker,
    ballot,
    environment,
)

from byteps_py import errors
from byteps_py.config.settings import Settings
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import query
from byteps_py.scheduler.grpc_link import GrpcControlLink
from byteps_py.wire.launch_protocol import NO_JOURNAL_STATUS

pytestmark = pytest.mark.usefixtures("grpc_library")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Factory]:
    with contextlib.ExitStack() as stack:

        def factory(**changes: object) -> Scheduler:
            scheduler = Scheduler(**{"journal_dir": str(tmp_path), **changes})
            stack.callback(scheduler.close)
            return scheduler

        yield factory


def cluster(settings: Settings, attend: Attend) -> list[Member]:
    """Two workers and a server, complete."""
    members = [attend(settings, as_worker(0)), attend(settings, as_worker(1)), attend(settings, as_server())]
    for member in members:
        assert member.wait("membership").membership.epoch == 1
    return members


def arrive(sequence: int) -> pb.MemberMessage:
    return pb.MemberMessage(arrive=pb.Arrive(sequence=sequence))


SHAPE = {"num_workers": 2, "num_servers": 1, "placement": "servers-only"}


@pytest.mark.parametrize("secret", ["", "s3cret of members"])
def test_a_killed_scheduler_takes_its_members_back(start: Factory, attend: Attend, tmp_path: Path, secret: str) -> None:
    scheduler = start(**SHAPE, secret=secret).wait_listening()
    one, two, server = members = cluster(scheduler.settings, attend)
    one.link.send(ballot(0))
    one.link.send(arrive(1))
    for number in (1, 2):
        scheduler.kill()
        for member in members:
            assert isinstance(member.away.get(timeout=TIMEOUT_S), errors.PeerLostError)
        two.link.send(arrive(number))  # while nobody is there
        scheduler.restart()
        for member in members:
            assert member.back.acquire(timeout=TIMEOUT_S)
        for worker in (one, two):
            assert worker.wait("release").release.sequence == number
        one.link.send(arrive(number + 1))
    two.link.send(ballot(1))
    assert two.wait("verdicts").verdicts.verdicts[0].name == "w"
    status = query.status(scheduler.settings, TIMEOUT_S)
    assert (status.restarts, status.epoch, status.tensors) == (2, 1, 1)
    assert [(member.alive, member.doubt) for member in status.members] == [(True, "")] * 3
    (journal,) = tmp_path.iterdir()
    assert str(journal) == status.journal
    assert journal.stat().st_mode & 0o777 == 0o600
    assert b"s3cret of members" not in journal.read_bytes()
    for worker in (one, two):
        worker.leave()
    assert server.wait("stop").stop.reason == "all workers have left"
    server.leave()
    code, log = scheduler.ended()
    assert code == 0, log
    assert not list(tmp_path.iterdir())
    assert all(member.lost.empty() for member in members)


@pytest.mark.slow
def test_a_member_that_dies_while_the_scheduler_is_away_is_lost_when_it_is_back(start: Factory, attend: Attend) -> None:
    scheduler = start(**SHAPE).wait_listening()
    one, server = attend(scheduler.settings, as_worker(0)), attend(scheduler.settings, as_server())
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], env=environment(scheduler.settings), stdout=subprocess.PIPE, text=True
    ) as child:
        one.wait("membership")
        scheduler.kill()
        child.kill()
    scheduler.restart()
    assert (
        "it did not come back within 5 s after the scheduler was started again" in one.wait("failure").failure.message
    )
    for member in (one, server):
        member.link.close()
    assert scheduler.ended()[0] == 1


def test_a_member_that_leaves_while_the_scheduler_is_away_may_still_say_so(start: Factory, attend: Attend) -> None:
    scheduler = start(num_workers=1).wait_listening()
    member = attend(scheduler.settings, as_worker())
    link = cast(GrpcControlLink, member.link)
    link.away_close_s = link.close_timeout_s = TIMEOUT_S  # a loaded machine starts a scheduler slowly
    member.wait("membership")
    scheduler.restart()
    member.link.close()
    assert scheduler.ended()[0] == 0


def test_without_its_journal_a_scheduler_knows_no_member_and_begins_with_a_later_epoch(
    start: Factory, attend: Attend
) -> None:
    scheduler = start(num_workers=1, journal_dir="none").wait_listening()
    old = attend(scheduler.settings, as_worker())
    assert old.wait("membership").membership.epoch == 1
    scheduler.restart()
    error = old.away.get(timeout=TIMEOUT_S)
    while isinstance(error, errors.PeerLostError):  # it was away first
        error = old.away.get(timeout=TIMEOUT_S)
    assert isinstance(error, errors.RendezvousError)
    assert "this scheduler does not know worker 0 " in str(error)
    assert "BYTEPS_JOURNAL_DIR" in str(error)
    assert old.lost.empty()
    new = attend(scheduler.settings, as_worker())
    assert new.wait("membership").membership.epoch == 2
    new.leave()
    assert scheduler.ended()[0] == 0


def test_a_job_that_was_killed_with_all_its_processes_is_not_waited_for(start: Factory, attend: Attend) -> None:
    scheduler = start(num_workers=1).wait_listening()
    dead = attend(scheduler.settings, as_worker())
    assert dead.wait("membership").membership.epoch == 1
    scheduler.kill()
    dead.leave()
    scheduler.restart()
    member = attend(scheduler.settings, as_worker())
    assert member.wait("membership").membership.epoch == 2
    member.leave()
    code, log = scheduler.ended()
    assert code == 0
    assert "no worker of the journal's job came back" in log


@pytest.mark.parametrize("journal", ["none", pytest.param("old copy", marks=pytest.mark.slow)])
def test_members_go_back_to_their_scheduler_from_one_with_another_journal(
    start: Factory, attend: Attend, tmp_path: Path, journal: str
) -> None:
    scheduler = start(**SHAPE).wait_listening()
    one, two, _ = cluster(scheduler.settings, attend)
    (path,) = tmp_path.iterdir()
    other = tmp_path / "other" / path.name
    other.parent.mkdir()
    other.write_bytes(path.read_bytes())
    other.chmod(0o600)
    for worker in (one, two):
        worker.link.send(arrive(1))
    for worker in (one, two):
        worker.wait("release")
    own = scheduler.settings
    scheduler.settings = dataclasses.replace(own, journal_dir="none" if journal == "none" else str(other.parent))
    scheduler.restart()
    for worker in (one, two):
        while isinstance(error := worker.away.get(timeout=TIMEOUT_S), errors.PeerLostError):
            pass
        assert "BYTEPS_JOURNAL_DIR" in str(error)
    if journal != "none":  # it gives its members up, and says so to those that ask again
        assert "it did not come back within" in scheduler.wait_for("did not come back within").log[-1]
    scheduler.settings = own
    scheduler.restart()
    for worker in (one, two):  # the server has heard nothing that the old copy does not know
        assert worker.back.acquire(timeout=TIMEOUT_S)
        worker.link.send(arrive(2))
    for worker in (one, two):
        assert worker.wait("release").release.sequence == 2
        assert worker.lost.empty()
        worker.leave()


def test_workers_that_are_started_again_need_not_wait_for_dead_ones(start: Factory, attend: Attend) -> None:
    """All but the server was killed: it joins the new job at once, and that begins without it, too."""
    scheduler = start(**SHAPE, heartbeat_timeout_s=20.0).wait_listening()
    dead, also_dead, server = cluster(scheduler.settings, attend)
    scheduler.kill()
    for member in (dead, also_dead):
        cast(GrpcControlLink, member.link).away_close_s = 0.0
        member.leave()
    # The end of an absence is reported only if its beginning was. A scheduler may be back before that.
    assert isinstance(server.away.get(timeout=TIMEOUT_S), errors.PeerLostError)
    scheduler.restart()
    assert server.back.acquire(timeout=TIMEOUT_S)  # it believes that its job goes on
    new = [attend(scheduler.settings, as_worker(index)) for index in range(2)]
    refusal = server.wait("refused").refused
    assert refusal.replaced
    assert "is over: its workers were started again, and a new job has begun at this address" in refusal.message
    new.append(attend(scheduler.settings, as_server()))
    for member in new:
        assert member.wait("membership").membership.epoch == 2
    for member in new[:2]:
        member.leave()
    new[2].wait("stop")
    new[2].leave()
    code, log = scheduler.ended()
    assert code == 0, log


def test_connections_that_are_cut_repeatedly_lose_no_message_and_no_member(start: Factory, attend: Attend) -> None:
    scheduler = start(**SHAPE).wait_listening()
    with contextlib.closing(Proxy((scheduler.settings.scheduler_host, scheduler.settings.scheduler_port))) as proxy:
        port = int(proxy.address.rpartition(":")[2])
        through = dataclasses.replace(scheduler.settings, scheduler_port=port, job_id=scheduler.settings.job)
        one, two, server = members = cluster(through, attend)
        for sequence in range(1, 21):
            for worker in (one, two):
                worker.link.send(arrive(sequence))
            proxy.cut()
            for worker in (one, two):
                assert worker.wait("release").release.sequence == sequence
        status = query.status(scheduler.settings, TIMEOUT_S)
        assert (status.state, status.restarts) == (status.STATE_RUNNING, 0)
        for worker in (one, two):
            worker.leave()
        server.wait("stop")
        server.leave()
        code, log = scheduler.ended()
        assert code == 0, log
        assert all(member.lost.empty() for member in members)


def test_a_short_absence_of_the_scheduler_is_not_reported(start: Factory, attend: Attend) -> None:
    """Neither its beginning nor its end; its members go on all the same."""
    scheduler = start(**SHAPE).wait_listening()
    one, two, _ = members = cluster(scheduler.settings, attend)
    for member in members:
        cast(GrpcControlLink, member.link).short_absence_s = 2 * TIMEOUT_S
    scheduler.restart()
    for worker in (one, two):
        worker.link.send(arrive(1))
    for worker in (one, two):
        assert worker.wait("release").release.sequence == 1
    for member in members:
        assert member.away.empty()
        assert not member.back.acquire(blocking=False)
        assert member.lost.empty()


def test_a_process_that_ends_waits_for_a_dead_scheduler_no_longer_than_for_an_absent_one(
    start: Factory, attend: Attend
) -> None:
    """Also if the scheduler dies just before, so that the link still takes it for alive."""
    scheduler = start(num_workers=1).wait_listening()
    member = attend(scheduler.settings, as_worker())
    link = cast(GrpcControlLink, member.link)
    link.away_close_s, link.close_timeout_s = 0.0, TIMEOUT_S
    member.wait("membership")
    scheduler.process.send_signal(signal.SIGSTOP)  # it takes Leave no more
    closing = threading.Thread(target=link.close)
    closing.start()
    assert link._closing.wait(TIMEOUT_S)
    scheduler.kill()
    closing.join(TIMEOUT_S / 2)
    assert not closing.is_alive()


def test_a_damaged_journal_is_named(start: Factory, attend: Attend, tmp_path: Path) -> None:
    scheduler = start(num_workers=1).wait_listening()
    attend(scheduler.settings, as_worker()).wait("membership")
    scheduler.kill()
    (journal,) = tmp_path.iterdir()
    data = bytearray(journal.read_bytes())
    data[40] ^= 1
    journal.write_bytes(data)
    scheduler.restart()
    code, log = scheduler.ended()
    assert code == NO_JOURNAL_STATUS
    assert f"the scheduler's journal {journal} is damaged: frame 1, at byte 17 of {len(data)}, is damaged" in log
    assert "Traceback" not in log


def test_a_frozen_scheduler_loses_no_member_when_it_wakes(start: Factory, attend: Attend) -> None:
    scheduler = start(**SHAPE).wait_listening()
    one, two, server = cluster(scheduler.settings, attend)
    scheduler.process.send_signal(signal.SIGSTOP)
    one.link.send(arrive(1))
    for _ in range(15):
        assert one.beats.acquire(timeout=TIMEOUT_S)
    scheduler.process.send_signal(signal.SIGCONT)
    two.link.send(arrive(1))
    for worker in (one, two):
        assert worker.wait("release").release.sequence == 1
        worker.leave()
    server.wait("stop")
    server.leave()
    code, log = scheduler.ended()
    assert code == 0, log


def silent(port: int) -> contextlib.AbstractContextManager[None]:
    return answering(port, b"")


def rubbish(port: int) -> contextlib.AbstractContextManager[None]:
    return answering(port, b"HTTP/1.1 400 Bad Request\r\n\r\n")


def unimplemented(port: int) -> contextlib.AbstractContextManager[None]:
    @contextlib.contextmanager
    def serving() -> Iterator[None]:
        server = grpc.server(futures.ThreadPoolExecutor(1))
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        try:
            yield
        finally:
            server.stop(0).wait()

    return serving()


@pytest.mark.parametrize("secret", ["", "known to members"])
@pytest.mark.parametrize(
    "impostor", [silent, *(pytest.param(each, marks=pytest.mark.slow) for each in (rubbish, unimplemented))]
)
def test_the_port_of_the_scheduler(
    start: Factory, attend: Attend, impostor: Callable[[int], contextlib.AbstractContextManager[None]], secret: str
) -> None:
    """Members wait for theirs, which takes them back when it has its port again."""
    scheduler = start(num_workers=2, num_servers=1, placement="servers-only", secret=secret).wait_listening()
    members = cluster(scheduler.settings, attend)
    scheduler.kill()
    scheduler.process.wait(TIMEOUT_S)
    with impostor(scheduler.settings.scheduler_port):
        for member in members:
            assert isinstance(member.away.get(timeout=TIMEOUT_S), errors.PeerLostError)
    scheduler.restart()
    for member in members:
        assert member.back.acquire(timeout=TIMEOUT_S)
    assert all(member.lost.empty() for member in members)
    assert query.status(scheduler.settings, TIMEOUT_S).restarts == 1


def test_a_handshake_that_is_dropped_is_no_wrong_secret(start: Factory, attend: Attend) -> None:
    """A scheduler with more callers than it can serve drops some; a member tries again until the start timeout."""
    scheduler = start(num_workers=1, secret="known to members")
    scheduler.kill()
    scheduler.process.wait(TIMEOUT_S)
    came = threading.Semaphore(0)
    with socket.create_server(("127.0.0.1", scheduler.settings.scheduler_port)) as door:

        def drop() -> None:
            for _ in range(3):
                with door.accept()[0] as visitor:
                    visitor.recv(1 << 16)
                came.release()

        dropping = threading.Thread(target=drop)
        dropping.start()
        member = attend(scheduler.settings, as_worker(0))
        for _ in range(3):
            assert came.acquire(timeout=TIMEOUT_S)
        dropping.join(TIMEOUT_S)
    scheduler.restart()
    assert member.wait("membership").membership.workers
    assert member.lost.empty()


def test_who_finds_no_scheduler_hears_why(attend: Attend) -> None:
    """Not that its own deadline ended the last attempt."""
    settings = Settings(scheduler_host="127.0.0.1", scheduler_port=9, num_workers=1, start_timeout_s=1.0)
    for register in (as_worker(0), as_server()):
        error = attend(settings, register).lost.get(timeout=TIMEOUT_S)
        assert str(error).endswith("(Connection refused)"), error
