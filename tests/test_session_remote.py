"""Ranks beside a real communication service: one machine, no scheduler. Most tests share one service, which stays;
those that end the job have their own.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

from byteps_py import channel
from byteps_py.errors import (
    BytePSError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    RendezvousError,
    StallError,
    UsageError,
)
from byteps_py.machine import local_socket
from byteps_py.session import Slot
from byteps_py.session.remote import RemoteSession
from byteps_py.settings import Settings
from byteps_py.tensors import DType, Op, TensorSpec

WAIT_S = 30.0
TWO = 2

#: A rank in a process of its own: takes part in what it is asked to, one word per line.
RANK = """
import sys, numpy as np
from byteps_py import channel
from byteps_py.session.remote import RemoteSession
from byteps_py.tensors import DType, TensorSpec
session = RemoteSession(channel.connect(sys.argv[1], 30), 1, 2, 30, 600)
slot, = session.declare([TensorSpec("shared", DType.FLOAT32, (3,))])
for word in sys.stdin:
    if word == "give\\n":
        np.frombuffer(slot.input, np.float32)[:] = 2
        session.hand_over(slot)
        session.wait(slot, 30)
    print("done", flush=True)
"""


@dataclass
class Service:
    """A running communication service for two ranks."""

    process: subprocess.Popen[bytes]
    settings: Settings

    @property
    def name(self) -> str:
        return local_socket(self.settings, "cs")

    def rank(self, local_rank: int, local_size: int = TWO) -> RemoteSession:
        link = channel.connect(self.name, WAIT_S)
        try:
            return RemoteSession(link, local_rank, local_size, WAIT_S, 600.0)
        except BaseException:
            link.close()
            raise


def start(*arguments: str) -> Service:
    settings = Settings(job_id=f"test-{uuid.uuid4()}", local_size=TWO)
    ours = ("BYTEPS_", "DMLC_", "PS_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environ |= {"BYTEPS_JOB_ID": settings.job_id, "BYTEPS_LOCAL_SIZE": str(TWO), "BYTEPS_LOG_LEVEL": "FATAL"}
    process = subprocess.Popen([sys.executable, "-m", "byteps_py.worker", *arguments], env=environ)
    return Service(process, settings)


def end(service: Service) -> None:
    service.process.terminate()
    try:
        service.process.wait(WAIT_S)
    finally:
        service.process.kill()
        service.process.wait()


@pytest.fixture(scope="module")
def lasting() -> Iterator[Service]:
    """One service for all tests that leave the job well."""
    service = start("--stay")
    yield service
    end(service)
    assert service.process.returncode == 0


@pytest.fixture
def service() -> Iterator[Service]:
    """A service of one's own."""
    service = start()
    yield service
    end(service)


@pytest.fixture
def ranks(lasting: Service) -> Iterator[list[RemoteSession]]:
    sessions = [lasting.rank(0), lasting.rank(1)]
    yield sessions
    for session in sessions:
        session.close()


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


def spec(name: str, count: int = 3, dtype: DType = DType.FLOAT32, **facts: object) -> TensorSpec:
    return TensorSpec(name, dtype, (count,), **facts)  # type: ignore[arg-type]


def give(session: RemoteSession, slot: Slot, value: float) -> None:
    """Hand over a round of nothing but ``value``."""
    np.frombuffer(slot.input, slot.spec.dtype.name.lower())[:] = value
    session.hand_over(slot)


def got(session: RemoteSession, slot: Slot) -> list[float]:
    session.wait(slot, WAIT_S)
    return np.frombuffer(slot.result, slot.spec.dtype.name.lower()).tolist()  # type: ignore[no-any-return]


def declare(ranks: list[RemoteSession], what: TensorSpec) -> list[Slot]:
    return [session.declare([what])[0] for session in ranks]


def sum_once_more(ranks: list[RemoteSession]) -> None:
    """The job still works."""
    slots = declare(ranks, spec(f"tensor-{uuid.uuid4()}"))
    for session, slot in zip(ranks, slots, strict=True):
        give(session, slot, 1.5)
    assert [got(session, slot) for session, slot in zip(ranks, slots, strict=True)] == [[3.0] * 3] * len(ranks)


def failure(act: Callable[[], object]) -> BytePSError:
    with pytest.raises(BytePSError) as raised:
        act()
    return raised.value


# ---- reducing ----------------------------------------------------------------------------------------------------


def test_ranks_know_their_place(ranks: list[RemoteSession]) -> None:
    assert [(s.rank, s.local_rank, s.size, s.local_size) for s in ranks] == [(0, 0, 2, 2), (1, 1, 2, 2)]
    assert [(s.machine_index, s.num_machines) for s in ranks] == [(0, 1)] * 2


OPERATIONS = [
    ({}, [6.0] * 3),
    ({"average": True}, [3.0] * 3),
    ({"op": Op.MIN}, [2.0] * 3),
    ({"op": Op.MAX}, [4.0] * 3),
    ({"op": Op.PRODUCT}, [8.0] * 3),
    ({"op": Op.BROADCAST, "root": 1}, [4.0] * 3),
    ({"count": 0}, []),
    ({"count": 1, "dtype": DType.INT64}, [6]),
    ({"count": 300_000}, [6.0] * 300_000),
    ({"count": 5, "dtype": DType.FLOAT16}, [6.0] * 5),
]


@pytest.mark.parametrize(("facts", "expected"), OPERATIONS, ids=[str(facts) for facts, _ in OPERATIONS])
def test_round_trips(ranks: list[RemoteSession], name: str, facts: dict[str, object], expected: list[float]) -> None:
    slots = declare(ranks, spec(name, **facts))  # type: ignore[arg-type]
    for _ in range(3):
        for session, slot, value in zip(ranks, slots, (2, 4), strict=True):
            give(session, slot, value)
        for session, slot in zip(ranks, slots, strict=True):
            assert got(session, slot) == expected


def test_a_round_may_be_handed_over_in_pieces(ranks: list[RemoteSession], name: str) -> None:
    slots = declare(ranks, spec(name))
    give(ranks[0], slots[0], 1)
    for nbytes in (0, 4, 8):
        np.frombuffer(slots[1].input, np.float32)[:] = 2
        ranks[1].hand_over(slots[1], nbytes)
    assert not slots[1].pending
    for nbytes in (7, 13):
        error = failure(functools.partial(ranks[1].hand_over, slots[1], nbytes))
        assert "bytes handed over, after 8 of 12 bytes" in str(error)
    assert "is pending" in str(failure(lambda: ranks[1].declare([spec(name, 4)])))
    ranks[1].hand_over(slots[1])
    assert [got(session, slot) for session, slot in zip(ranks, slots, strict=True)] == [[3.0] * 3] * 2


def test_whether_a_round_is_done_can_be_asked(ranks: list[RemoteSession], name: str) -> None:
    slots = declare(ranks, spec(name))
    assert ranks[0].is_done(slots[0])  # nothing is pending
    give(ranks[0], slots[0], 1)
    assert not ranks[0].is_done(slots[0])
    give(ranks[1], slots[1], 2)
    assert got(ranks[1], slots[1]) == [3.0] * 3
    while not ranks[0].is_done(slots[0]):
        pass
    assert np.frombuffer(slots[0].result, np.float32).tolist() == [3.0] * 3


def test_a_wait_may_end_in_time_and_be_taken_up_again(ranks: list[RemoteSession], name: str) -> None:
    slots = declare(ranks, spec(name))
    give(ranks[0], slots[0], 1)
    error = failure(lambda: ranks[0].wait(slots[0], 0.01))
    assert isinstance(error, StallError)
    assert name in str(error)
    give(ranks[1], slots[1], 2)
    assert got(ranks[0], slots[0]) == [3.0] * 3


def test_many_tensors_without_a_look_at_the_answers(ranks: list[RemoteSession], name: str) -> None:
    """More answers than the socket takes: the service keeps them, and goes on."""
    specs = [spec(f"{name}-{i}", 1) for i in range(3000)]
    slots = [session.declare(specs) for session in ranks]
    for session, mine in zip(ranks, slots, strict=True):
        for i, slot in enumerate(mine):
            give(session, slot, i)
    sum_once_more([*reversed(ranks)])
    for session, mine in zip(ranks, slots, strict=True):
        assert [got(session, slot) for slot in mine] == [[2.0 * i] for i in range(3000)]


def test_threads_wait_for_different_tensors_at_once(ranks: list[RemoteSession], name: str) -> None:
    specs = [spec(f"{name}-{i}") for i in range(8)]
    slots = [session.declare(specs) for session in ranks]
    for i, slot in enumerate(slots[0]):
        give(ranks[0], slot, i)
    with ThreadPoolExecutor(8) as pool:
        results = [pool.submit(got, ranks[0], slot) for slot in slots[0]]
        for i in (5, 0, 7, 2, 1, 3, 6, 4):
            give(ranks[1], slots[1][i], 1)
        assert [result.result(WAIT_S) for result in results] == [[i + 1.0] * 3 for i in range(8)]
        for slot in slots[1]:
            ranks[1].wait(slot, WAIT_S)


def test_barriers_wait_for_all(ranks: list[RemoteSession]) -> None:
    passed: list[int] = []

    def meet(session: RemoteSession) -> None:
        for _ in range(3):
            session.barrier(WAIT_S)
            passed.append(session.rank)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meet, ranks[1])
        assert not passed
        meet(ranks[0])
        other.result(WAIT_S)
    assert sorted(passed) == [0, 0, 0, 1, 1, 1]


# ---- declaring ---------------------------------------------------------------------------------------------------


def test_the_same_declaration_gives_the_same_slot(ranks: list[RemoteSession], name: str) -> None:
    first, second = ranks[0].declare([spec(name), spec(name)])
    assert first is second
    assert ranks[0].declare([spec(name)]) == [first]
    ranks[1].declare([spec(name)])


def test_a_name_can_be_declared_anew(ranks: list[RemoteSession], name: str) -> None:
    old = declare(ranks, spec(name))
    for session, slot in zip(ranks, old, strict=True):
        give(session, slot, 1)
    for session, slot in zip(ranks, old, strict=True):
        assert got(session, slot) == [2.0] * 3
    new = declare(ranks, spec(name, 5))
    assert "declared anew" in str(failure(lambda: ranks[0].hand_over(old[0])))
    for session, slot in zip(ranks, new, strict=True):
        give(session, slot, 2)
    for session, slot in zip(ranks, new, strict=True):
        assert got(session, slot) == [4.0] * 5


def test_declarations_may_follow_each_other_unused(ranks: list[RemoteSession], name: str) -> None:
    for session in ranks:
        session.declare([spec(name, 7)])
        session.declare([spec(name, 2)])
    slots = declare(ranks, spec(name))
    for session, slot in zip(ranks, slots, strict=True):
        give(session, slot, 2)
    assert [got(session, slot) for session, slot in zip(ranks, slots, strict=True)] == [[4.0] * 3] * 2


MISUSES = [
    (lambda s, name: s.declare([spec(name), spec(name, 4)]), "declared twice in one call"),
    (lambda s, name: s.declare([spec(name, op=Op.BROADCAST, root=2)]), "root rank 2 does not exist"),
]


@pytest.mark.parametrize(("misuse", "text"), MISUSES)
def test_misuse_is_found_at_home(
    ranks: list[RemoteSession], name: str, misuse: Callable[[RemoteSession, str], object], text: str
) -> None:
    error = failure(lambda: misuse(ranks[0], name))
    assert isinstance(error, UsageError)
    assert text in str(error)
    sum_once_more(ranks)


def test_a_pending_tensor_is_left_alone(ranks: list[RemoteSession], name: str) -> None:
    slots = declare(ranks, spec(name))
    give(ranks[0], slots[0], 1)
    assert "is pending" in str(failure(lambda: ranks[0].hand_over(slots[0])))
    assert "is pending as sum of float32[3]" in str(failure(lambda: ranks[0].declare([spec(name, 4)])))
    give(ranks[1], slots[1], 1)
    assert [got(session, slot) for session, slot in zip(ranks, slots, strict=True)] == [[2.0] * 3] * 2


@pytest.mark.parametrize("agreed_before", [False, True])
def test_a_mismatch_is_an_error_for_all_and_the_name_lives_on(
    ranks: list[RemoteSession], name: str, agreed_before: bool
) -> None:
    if agreed_before:
        for session, slot in zip(ranks, declare(ranks, spec(name)), strict=True):
            give(session, slot, 1)
        for session in ranks:
            session.wait(session.declare([spec(name)])[0], WAIT_S)
    slots = [ranks[0].declare([spec(name)])[0], ranks[1].declare([spec(name, 4)])[0]]
    for session, slot in zip(ranks, slots, strict=True):
        give(session, slot, 1)
    errors = [
        failure(functools.partial(session.wait, slot, WAIT_S)) for session, slot in zip(ranks, slots, strict=True)
    ]
    assert {type(error) for error in errors} == {MismatchError}
    assert len({str(error) for error in errors}) == 1
    assert f"tensor {name!r}: rank 0 gave sum of float32[3], rank 1 gave sum of float32[4]" in str(errors[0])
    # The void slot's memory is still its rank's: another tensor must not lie there.
    others = declare(ranks, spec(f"{name}-other"))
    for session, slot, other in zip(ranks, slots, others, strict=True):
        give(session, other, 5)
        np.frombuffer(slot.input, np.float32)[:] = -1
    assert [got(session, other) for session, other in zip(ranks, others, strict=True)] == [[10.0] * 3] * 2
    for session, slot in zip(ranks, declare(ranks, spec(name)), strict=True):
        give(session, slot, 2)
    assert [got(s, s.declare([spec(name)])[0]) for s in ranks] == [[4.0] * 3] * 2


# ---- coming and going --------------------------------------------------------------------------------------------


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


# ---- what goes wrong ---------------------------------------------------------------------------------------------


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
