"""Ranks beside a real communication service, which stays for all tests: rounds and declarations."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.sessions import WAIT_S, declare, failure, give, got, spec, sum_once_more

from byteps_py.errors import (
    MismatchError,
    StallError,
    UsageError,
)
from byteps_py.session.service.remote import RemoteSession
from byteps_py.tensors import DType, Op


@pytest.fixture
def name() -> str:
    """Of a tensor that no other test has used."""
    return f"tensor-{uuid.uuid4()}"


# ---- reducing ----------------------------------------------------------------------------------------------


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


# ---- declaring ---------------------------------------------------------------------------------------------


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
    assert "declared again" in str(failure(lambda: ranks[0].hand_over(old[0])))
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
