"""Memory that ranks of a machine share, between two sessions of this process."""

from __future__ import annotations

import ctypes

import pytest
from support.peers import lasting_service, met, peers, two_ranks
from support.sessions import WAIT_S

from byteps_py.errors import NotInitializedError, ProtocolError, StallError
from byteps_py.session.peers import StreamReceipt
from byteps_py.session.service.remote import RemoteSession
from byteps_py.system.shm import PAGE, Arena

lasting = pytest.fixture(scope="module")(lasting_service)
ranks = pytest.fixture(two_ranks)
LARGE = 100_000  # too large for a message


def test_both_see_what_one_writes(ranks: list[RemoteSession]) -> None:
    _, (sent, got) = met(ranks)
    its = peers(ranks[1]).shared_segment(got, 0, 3 * PAGE - 5)
    with pytest.raises(StallError, match="nothing came from rank 0"):
        its.map(0.01)
    with pytest.raises(ValueError, match="not mapped yet"):
        _ = its.segment
    mine = peers(ranks[0]).shared_segment(sent, 0, 3 * PAGE - 5)
    for each in (mine, its):
        each.map(WAIT_S)
    assert mine.segment.nbytes == its.segment.nbytes == 3 * PAGE
    mine.segment.view[:5] = b"there"
    its.segment.view[-4:] = b"back"
    assert bytes(its.segment.view[:5]) == b"there"
    assert bytes(mine.segment.view[-4:]) == b"back"
    its.segment.forget(0, 3 * PAGE)
    assert not any(mine.segment.view)


def test_payloads_go_on_beside_it(ranks: list[RemoteSession]) -> None:
    """Before and after it, through memory that is made for payloads."""
    _, (shared, its) = met(ranks)
    _, (sent, got) = met(ranks)
    data = bytes(range(250)) * (LARGE // 250)
    source, target = ctypes.create_string_buffer(data, LARGE), ctypes.create_string_buffer(LARGE)
    for turn in range(3):
        if turn == 1:
            mine = peers(ranks[0]).shared_segment(shared, 0, PAGE)
            other = peers(ranks[1]).shared_segment(its, 0, PAGE)
            other.map(WAIT_S)
            mine.segment.view[:] = bytes([7]) * PAGE
        peers(ranks[0]).send(sent, (1,), ((ctypes.addressof(source), LARGE),), is_led=True)
        receipt = StreamReceipt(got, owner=target)
        receipt.expect(0, ((ctypes.addressof(target), LARGE),), LARGE)
        peers(ranks[1]).collect(receipt, WAIT_S)
        assert target.raw == data
        ctypes.memset(target, 0, LARGE)
    assert bytes(other.segment.view) == bytes([7]) * PAGE


def test_both_know_its_size(ranks: list[RemoteSession]) -> None:
    _, (sent, got) = met(ranks)
    peers(ranks[0]).shared_segment(sent, 0, PAGE)
    with pytest.raises(ProtocolError, match="rank 0 shares 4096 bytes, not 4097"):
        peers(ranks[1]).shared_segment(got, 0, PAGE + 1).map(WAIT_S)


def test_it_outlives_the_session(ranks: list[RemoteSession]) -> None:
    _, (sent, got) = met(ranks)
    segment = peers(ranks[0]).shared_segment(sent, 0, PAGE).segment
    its = peers(ranks[1]).shared_segment(got, 0, PAGE)
    for session in ranks:
        session.close()
    segment.view[0] = 1
    assert segment.view[0] == 1
    with pytest.raises(NotInitializedError):
        its.map(WAIT_S)


def test_an_arena_fills_its_other_segments() -> None:
    arena = Arena(4 * PAGE)
    first, alone, second = arena.allocate(PAGE), arena.allocate_alone(10), arena.allocate(PAGE)
    assert (alone.segment, alone.offset, alone.nbytes) == (1, 0, PAGE)
    assert (second.segment, second.offset) == (first.segment, PAGE)
    third = arena.allocate(3 * PAGE)
    assert (third.segment, third.offset) == (2, 0)
    assert [segment.nbytes for segment in arena.segments] == [4 * PAGE, PAGE, 4 * PAGE]
    arena.close()
    assert arena.allocate(PAGE).segment == 0
    arena.close()
