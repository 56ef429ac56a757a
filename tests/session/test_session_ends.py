"""Ranks beside a real communication service: how they come and go, and what goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.sessions import RANK, WAIT_S, Service, declare, end, failure, give, got, spec, start, sum_once_more

from byteps_py.errors import (
    BytePSError,
    NotInitializedError,
    PeerLostError,
    RendezvousError,
    UsageError,
)
from byteps_py.session.service.remote import RemoteSession
from byteps_py.system import channel


@pytest.fixture
def service() -> Iterator[Service]:
    """A service of one's own."""
    service = start()
    yield service
    end(service)


@pytest.fixture
def pair(service: Service) -> Iterator[list[RemoteSession]]:
    """Two ranks whose job will not end well."""
    sessions = [service.rank(0), service.rank(1)]
    yield sessions
    for session in sessions:
        session.close()


@pytest.fixture
def name() -> str:
    """Of a tensor that no other test has used."""
    return f"tensor-{uuid.uuid4()}"


# ---- coming and going --------------------------------------------------------------------------------------


def test_a_rank_that_comes_twice_is_turned_away(ranks: list[RemoteSession], lasting: Service) -> None:
    error = failure(lambda: lasting.rank(1))
    assert isinstance(error, UsageError)
    assert "both say that they are local rank 1" in str(error)
    sum_once_more(ranks)


@pytest.mark.parametrize(("local_rank", "local_size"), [(0, 3), (2, 2), (-1, 2), (0, 1)])
def test_a_rank_of_another_size_is_turned_away(lasting: Service, local_rank: int, local_size: int) -> None:
    error = failure(lambda: lasting.rank(local_rank, local_size))
    assert isinstance(error, UsageError)
    assert f"came as local rank {local_rank} of {local_size}" in str(error)


def test_a_stranger_is_turned_away(ranks: list[RemoteSession], lasting: Service) -> None:
    link = channel.connect(lasting.name, WAIT_S)
    link.send(b"what is this?")
    message = link.receive(WAIT_S)
    assert message is not None
    assert b"ProtocolError" in message[0]
    link.close()
    sum_once_more(ranks)


def test_ranks_may_leave_and_come_back(lasting: Service, name: str) -> None:
    for round_ in range(3):
        sessions = [lasting.rank(0), lasting.rank(1)]
        slots = declare(sessions, spec(name))
        for session, slot in zip(sessions, slots, strict=True):
            give(session, slot, round_)
        for session, slot in zip(sessions, slots, strict=True):
            assert got(session, slot) == [2.0 * round_] * 3
        with ThreadPoolExecutor(1) as pool:
            met = pool.submit(sessions[1].barrier, WAIT_S)
            sessions[0].barrier(WAIT_S)
            met.result(WAIT_S)
        for session in sessions:
            session.close()


def test_leaving_with_unread_answers_is_no_death(lasting: Service, name: str) -> None:
    for _ in range(2):
        sessions = [lasting.rank(0), lasting.rank(1)]
        for session, slot in zip(sessions, declare(sessions, spec(name)), strict=True):
            give(session, slot, 1)
        assert got(sessions[1], declare(sessions, spec(name))[1]) == [2.0] * 3
        for session in sessions:
            session.close()


def test_a_closed_session_says_so(ranks: list[RemoteSession], name: str) -> None:
    slot = declare(ranks, spec(name))[0]
    give(ranks[0], slot, 1)
    session = ranks[0]
    session.close()
    session.close()
    assert session.is_done(slot)  # wait raises at once
    for act in (
        lambda: session.wait(slot),
        lambda: session.declare([spec(f"{name}-2")]),
        lambda: session.barrier(),
    ):
        assert isinstance(failure(act), NotInitializedError)


def test_a_thread_that_waits_is_woken_by_close(service: Service, name: str) -> None:
    session = service.rank(0)
    other = service.rank(1)
    slots = declare([session, other], spec(name))
    give(session, slots[0], 1)
    errors: list[BytePSError] = []
    threads = [
        threading.Thread(target=lambda: errors.append(failure(lambda: session.wait(slots[0])))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    while not session._reading:  # one reads, one waits for it
        pass
    session.close()
    for thread in threads:
        thread.join(WAIT_S)
    assert [type(error) for error in errors] == [NotInitializedError] * 2
    other.close()
    assert service.process.wait(WAIT_S) == 0


def test_a_service_ends_with_its_ranks(pair: list[RemoteSession], service: Service) -> None:
    sum_once_more(pair)
    for session in pair:
        session.close()
    assert service.process.wait(WAIT_S) == 0
    error = failure(lambda: channel.connect(service.name, 0.0))
    assert isinstance(error, RendezvousError)


# ---- what goes wrong ---------------------------------------------------------------------------------------


def test_who_waits_for_a_rank_that_left_is_told(pair: list[RemoteSession], service: Service, name: str) -> None:
    slots = declare(pair, spec(name))
    give(pair[0], slots[0], 1)
    pair[1].close()
    error = failure(lambda: pair[0].wait(slots[0], WAIT_S))
    assert isinstance(error, PeerLostError)
    assert "rank 1 shut down" in str(error)
    assert name in str(error)
    pair[0].close()
    assert service.process.wait(WAIT_S) == 1


def test_a_barrier_does_not_wait_for_a_rank_that_left(pair: list[RemoteSession]) -> None:
    pair[1].close()
    error = failure(lambda: pair[0].barrier(WAIT_S))
    assert isinstance(error, PeerLostError)
    assert "rank 1 shut down" in str(error)


def test_a_killed_rank_is_named(service: Service) -> None:
    session = service.rank(0)
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, service.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        slot = session.declare([spec("shared")])[0]
        process.stdin.write(b"give\n")
        process.stdin.flush()
        give(session, slot, 1)
        assert got(session, slot) == [3.0] * 3
        assert process.stdout.readline() == b"done\n"
        give(session, slot, 1)
        process.kill()
        errors = [failure(lambda: session.wait(slot, WAIT_S)), failure(lambda: session.barrier(WAIT_S))]
    for error in errors:
        assert isinstance(error, PeerLostError)
        assert f"rank 1 (process {process.pid} on " in str(error)
        assert "died" in str(error)
    assert session.is_done(slot)
    late = failure(lambda: service.rank(1))
    assert isinstance(late, PeerLostError)  # also to those who come later
    session.close()
    assert service.process.wait(WAIT_S) == 1


def test_a_killed_service_is_noticed(pair: list[RemoteSession], service: Service, name: str) -> None:
    slots = declare(pair, spec(name))
    give(pair[0], slots[0], 1)
    service.process.kill()
    error = failure(lambda: pair[0].wait(slots[0], WAIT_S))
    assert isinstance(error, PeerLostError)
    assert "communication service of this machine is gone" in str(error)
    service.process.wait(WAIT_S)
    assert isinstance(failure(lambda: give(pair[1], slots[1], 1)), PeerLostError)


def test_a_forked_child_may_not_speak_for_the_rank(ranks: list[RemoteSession], name: str) -> None:
    slots = declare(ranks, spec(name))
    give(ranks[0], slots[0], 1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert ranks[0].is_done(slots[0])  # and reads nothing that is the parent's
            for act in (
                lambda: ranks[0].wait(slots[0]),
                lambda: ranks[0].declare([spec(f"{name}-2")]),
                lambda: ranks[1].hand_over(slots[1]),
                lambda: ranks[1].barrier(),
            ):
                error = failure(act)
                assert isinstance(error, UsageError)
                assert "forked" in str(error)
            ranks[0].close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    give(ranks[1], slots[1], 2)
    assert [got(session, slot) for session, slot in zip(ranks, slots, strict=True)] == [[3.0] * 3] * 2
    sum_once_more(ranks)
