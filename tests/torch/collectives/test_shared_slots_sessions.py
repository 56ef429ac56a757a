"""Sums in shares of two ranks beside a real communication service."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from support.peers import doomed_pair, lasting_service, met, peers, two_ranks
from support.sessions import WAIT_S, failure

from byteps_py.errors import PeerLostError, StallError
from byteps_py.session.service.remote import RemoteSession
from byteps_py.torch.collectives.all_reduce import shared_memory
from byteps_py.torch.collectives.all_reduce.shared_memory import SLOT_BYTES, SharedMemoryAllReduce, SharedMemorySum

lasting = pytest.fixture(scope="module")(lasting_service)
ranks = pytest.fixture(two_ranks)
pair = pytest.fixture(doomed_pair)


def sums_of(session: RemoteSession, name: str) -> SharedMemoryAllReduce:
    other = 1 - session.rank
    slots = peers(session).shared_slots(peers(session).stream(name, (other,)), SLOT_BYTES)
    return SharedMemoryAllReduce(slots, session.rank, {session.rank: session.rank, other: other})


def add_up(sums: list[SharedMemoryAllReduce], *tensors: torch.Tensor) -> None:
    """In a thread for each."""

    def run(work: SharedMemorySum) -> None:
        work.run(time.monotonic() + WAIT_S)
        over.append(work)

    over: list[SharedMemorySum] = []
    works = [SharedMemorySum(one, tensor, tensor, False, "x") for one, tensor in zip(sums, tensors, strict=True)]
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(over) == len(works)


def is_over_soon(work: SharedMemorySum) -> bool:
    try:
        work.run(time.monotonic() + 0.001)
    except StallError:
        return False
    return True


def test_a_sum_goes_on_after_a_wait_that_was_too_short(ranks: list[RemoteSession]) -> None:
    assert shared_memory.is_able()
    name, _ = met(ranks)
    sums = [sums_of(session, name) for session in ranks]
    for operation in range(3):
        tensors = [torch.arange(100_003) * (1.0 + rank + operation) for rank in range(2)]
        expected = tensors[0] + tensors[1]
        works = [SharedMemorySum(one, tensor, tensor, False, "x") for one, tensor in zip(sums, tensors, strict=True)]
        while works:
            works = [work for work in works if not is_over_soon(work)]
        assert all(torch.equal(tensor, expected) for tensor in tensors)
    assert all(len(peers(session)._outgoing.segments) == 1 for session in ranks)


def test_ranks_that_sleep_are_woken(ranks: list[RemoteSession], monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step: nobody looks before it sleeps."""
    assert shared_memory.is_able()
    name, _ = met(ranks)
    for session in ranks:
        monkeypatch.setattr(peers(session)._waiter, "spin_s", lambda: 0.0)
    sums = [sums_of(session, name) for session in ranks]
    for _ in range(5):
        tensors = [torch.arange(1_000_003) * (1.0 + rank) for rank in range(2)]
        expected = tensors[0] + tensors[1]
        add_up(sums, *tensors)
        assert all(torch.equal(tensor, expected) for tensor in tensors)


def test_slots_are_used_again_once_all_have_retired_theirs(ranks: list[RemoteSession]) -> None:
    assert shared_memory.is_able()
    name, streams = met(ranks)
    found: list[list[object]] = [[], []]
    for turn in range(3):
        sums = [sums_of(session, f"{name}, turn {turn}") for session in ranks]
        over = [peers(session).stream(f"{streams[0].name}.{turn}", (1 - session.rank,)) for session in ranks]
        add_up(sums, torch.ones(1000), torch.ones(1000))
        for number, one in enumerate(sums):
            found[number].append(one.slots.block)
        for session, one, stream in list(zip(ranks, sums, over, strict=True))[: 1 + turn]:
            peers(session).retire(one.slots, stream)
        for session in ranks:
            peers(session).take_messages()
    for number, (first, second, third) in enumerate(found):
        assert second is not first, number  # one of the two might still have read it
        assert third is second, number


def test_who_waits_in_a_sum_for_a_neighbour_that_left_is_told(pair: list[RemoteSession]) -> None:
    assert shared_memory.is_able()
    name, _ = met(pair)
    sums = [sums_of(session, name) for session in pair]
    add_up(sums, torch.ones(1000), torch.ones(1000))
    work = SharedMemorySum(sums[0], torch.ones(1000), None, False, "x")
    pair[1].close()
    assert isinstance(failure(lambda: work.run(time.monotonic() + WAIT_S)), PeerLostError)
