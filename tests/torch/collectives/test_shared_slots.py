"""Sums in shares: what is laid in a slot stays there until everybody has read it, in whatever order ranks and messages
come; by the instructions that carry them out, among ranks that are all in this process."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, strategies
from llvmlite import ir
from support.shared_slots import SLOT_BYTES, Rank, deliver, deliver_all, go_on, go_to_the_end, some
from torch_values import same

from byteps_py.errors import JoinedError, MismatchError, ProtocolError
from byteps_py.kernels.jit import all_reduce_kernels, streaming
from byteps_py.session.peers.peer_protocol import PeerMessage, PeerMessageKind
from byteps_py.system.shm import Segment
from byteps_py.system.spin_policy import SpinPolicy
from byteps_py.torch.collectives.all_reduce import shared_memory
from byteps_py.torch.collectives.all_reduce.shared_memory import SharedMemorySum
from byteps_py.torch.collectives.all_reduce.shares import Chunks

WAIT_S = 30.0


# ---- shares and chunks ---------------------------------------------------------------------------------------------


@given(
    count=strategies.integers(1, 5000),
    itemsize=strategies.sampled_from([1, 2, 4, 8]),
    members=strategies.integers(2, 9),
    lines=strategies.integers(1, 4),
)
def test_chunks_of_all_shares_are_the_whole_tensor(count: int, itemsize: int, members: int, lines: int) -> None:
    chunks = Chunks(count, itemsize, members, lines * 64 * members + 7)
    pieces = [chunks.of(position, chunk) for position in range(members) for chunk in range(chunks.count)]
    assert [e for first, length in pieces for e in range(first, first + length)] == list(range(count))
    assert max(length for _, length in pieces) <= chunks.chunk_elements
    assert chunks.chunk_elements * itemsize == lines * 64
    assert all(first * itemsize % 64 == 0 for first, length in pieces if length)
    assert chunks.steps == chunks.count + 1


# ---- ranks in one process ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def instructions_are_there() -> None:
    assert shared_memory.is_able()


class Program:
    """Sums of odd sizes, the same on all ranks: in place, to another place, or the own share only."""

    def __init__(self, order: random.Random, ranks: list[Rank]) -> None:
        size, sums = len(ranks), order.randint(1, 5)
        dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32]
        most = 5 * SLOT_BYTES // 2
        self._inputs: list[list[torch.Tensor]] = []
        self._targets: list[list[torch.Tensor | None]] = []
        self.is_told = [order.random() < 0.4 for _ in range(sums)]
        self._scatters = [order.random() < 0.4 for _ in range(sums)]
        for scatters in self._scatters:
            dtype, count = order.choice(dtypes), order.randint(1, most)
            count = -(-count // size) * size if scatters else count
            tensors = [torch.randint(-99, 99, (count,)).to(dtype) / 8 for _ in range(size)]
            self._inputs.append([tensor.to(dtype) for tensor in tensors])
            length = count // size if scatters else count
            self._targets.append([order.choice([None, torch.empty(length, dtype=dtype)]) for _ in range(size)])
        self._expected = [self._sum(inputs) for inputs in self._inputs]
        self.works = [self._works(rank) for rank in ranks]

    @staticmethod
    def _sum(inputs: list[torch.Tensor]) -> torch.Tensor:
        """As the contract says: half precision in float32, rounded once."""
        is_half = inputs[0].dtype in (torch.bfloat16, torch.float16)
        total = inputs[0].float() if is_half else inputs[0].clone()
        for tensor in inputs[1:]:
            total += tensor
        return total.to(inputs[0].dtype)

    def _works(self, rank: Rank) -> Iterator[SharedMemorySum]:
        for number, expected in enumerate(self._expected):
            tensor, target = self._inputs[number][rank.me], self._targets[number][rank.me]
            if self._scatters[number]:
                share = len(tensor) // len(self._inputs[number])
                own = slice(rank.me * share, (rank.me + 1) * share)
                before, expected = tensor.clone(), expected[own]
                in_place = target is None
                target = tensor[own] if target is None else target
                yield rank.add_up(tensor, target, f"sum {number}", scatters=True)
                before[own] = target if in_place else before[own]
                assert same(tensor, before), (number, rank.me)
            else:
                yield rank.add_up(tensor, target, f"sum {number}")
            assert same(tensor if target is None else target, expected), (number, rank.me)


def play(seed: int) -> None:
    """Ranks and messages in random order, to the end of all sums."""
    order = random.Random(seed)
    torch.manual_seed(seed)
    with some(order.randint(2, 4)) as ranks:
        program = Program(order, ranks)
        ways = [(rank.me, other) for rank in ranks for other in rank.others]
        favourite = order.randrange(len(ranks))  # goes on as far as it can: the most dangerous order
        running = {rank.me: next(program.works[rank.me]) for rank in ranks}
        begun = [0] * len(ranks)
        given = [set[int]() for _ in program.is_told]
        while running:
            me = favourite if order.random() < 0.5 else order.randrange(len(ranks))
            if me not in running or order.random() < 0.3:
                deliver(ranks, *order.choice(ways))
                continue
            number = begun[me]
            if program.is_told[number] and len(given[number]) < len(ranks):
                if me not in given[number]:  # an offer in vain, and one that all make
                    ranks[me].add_up(torch.ones(3000)).write_first_step()
                    running[me].write_first_step()
                    given[number].add(me)
                continue
            if go_on(running[me]):
                begun[me] += 1
                following = next(program.works[me], None)
                if following is None:
                    del running[me]
                else:
                    running[me] = following
        deliver_all(ranks)
        assert all(not flow.payloads for rank in ranks for flow in rank.matcher._flows.values())  # nothing is kept


@pytest.mark.parametrize("seeds", [range(80), pytest.param(range(80, 1000), marks=pytest.mark.long)], ids=str)
def test_what_is_laid_stays_until_all_have_read_it(seeds: range) -> None:
    for seed in seeds:
        play(seed)


class OneSlot(all_reduce_kernels.Steps):
    def _slot(self, position: ir.Value, step: ir.Value) -> ir.Value:
        return super()._slot(position, ir.IntType(64)(0))


class NoWaits(all_reduce_kernels.Steps):
    def _await(self, word: ir.Value) -> None:
        pass


@pytest.mark.parametrize("broken", [OneSlot, NoWaits])
def test_with_one_slot_or_without_waits_it_would_not(
    broken: type[all_reduce_kernels.Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory._steps, "ready", all_reduce_kernels.compile_steps(broken))
    with pytest.raises(AssertionError):
        test_what_is_laid_stays_until_all_have_read_it(range(1000))


@pytest.mark.parametrize("past_caches", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_that_run_side_by_side(size: int, past_caches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for way in map(streaming.choice, (SLOT_BYTES // n // 64 * 64 for n in (2, 3, 4))):
        monkeypatch.setattr(way, "streams", past_caches)
        monkeypatch.setattr(way, "took", lambda *_: None)
    failures: list[BaseException] = []

    def work(sums: Iterator[SharedMemorySum]) -> None:
        try:
            for one in sums:
                one.run(WAIT_S + time.monotonic())
        except BaseException as error:
            failures.append(error)

    for seed in range(20):
        torch.manual_seed(seed)
        with some(size, in_threads=True) as ranks:
            program = Program(random.Random(seed), ranks)
            threads = [threading.Thread(target=work, args=(sums,)) for sums in program.works]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not failures, failures


def test_whoever_sleeps_is_woken_by_the_next_step() -> None:
    with some(2) as ranks:
        works = [rank.add_up(torch.ones(1000)) for rank in ranks]
        assert not any(map(go_on, works))
        deliver_all(ranks)  # they know each other
        assert not go_on(works[0])
        assert not ranks[0].outboxes[1].messages
        assert not go_on(works[1])
        assert {message.kind for message in ranks[1].outboxes[0].messages} == {PeerMessageKind.WAKE}
        deliver_all(ranks)
        assert not go_on(works[0])
        assert {message.kind for message in ranks[0].outboxes[1].messages} == {PeerMessageKind.WAKE}
        go_to_the_end(ranks, works)


class Remembered(SpinPolicy):
    """``due``: what it has said to each wait in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.due: list[bool] = []

    def is_due(self) -> bool:
        self.due.append(super().is_due())
        return self.due[-1]


def test_steps_are_looked_for_again_after_some_waits_and_always_once_it_pays() -> None:
    """A look that was not made says nothing about looks."""
    with some(2) as ranks:
        for rank in ranks:
            rank.sums.step_spin_s = 1e-6
        spin_policy = ranks[0].sums.spin_policy = Remembered()
        go_to_the_end(ranks, [rank.add_up(torch.ones(40 * SLOT_BYTES)) for rank in ranks])
        in_vain = spin_policy.due[spin_policy.due.index(False) :]
        assert 0 < in_vain.count(True) <= len(in_vain) / 10
        while not spin_policy.due[-1]:  # what is one step only needs no look that could be in vain
            go_to_the_end(ranks, [rank.add_up(torch.ones(1)) for rank in ranks])
        spin_policy.due.clear()
        go_to_the_end(ranks, [rank.add_up(torch.ones(1)) for rank in ranks])
        assert all(spin_policy.due)


def test_a_member_that_does_something_else_is_told_of() -> None:
    with some(2) as ranks:
        works = [rank.add_up(torch.ones(count)) for rank, count in zip(ranks, (1000, 1001), strict=True)]
        assert not any(map(go_on, works))
        deliver_all(ranks)
        assert not go_on(works[0])
        with pytest.raises(MismatchError, match="tensor 'x': rank 0 adds 4000 bytes, rank 1 4004; call the same"):
            works[1].run(0.0)
        with pytest.raises(MismatchError, match="tensor 'x': rank 1 adds 4004 bytes, rank 0 4000; call the same"):
            works[0].run(0.0)


def test_a_member_that_is_elsewhere_in_the_order_is_waited_for() -> None:
    """Who waits finds out what it has called."""
    with some(2) as ranks:
        works = [rank.add_up(torch.ones(1000), name=name) for rank, name in zip(ranks, ("one", "two"), strict=True)]
        assert not any(map(go_on, works))
        deliver_all(ranks)
        assert not go_on(works[0])
        assert not go_on(works[1])
        assert works[1]._slots._missing() == [0]


def test_nothing_begins_without_a_member_that_has_joined() -> None:
    with some(3) as ranks:
        for turn in range(3):
            works = [rank.add_up(torch.full((1000,), 1.0 + turn)) for rank in ranks]
            go_to_the_end(ranks, works)
            assert bool((works[0]._source == 3 * (1 + turn)).all())
            late = [rank.add_up(torch.ones(1000)) for rank in ranks]
            assert not go_on(late[0])
            deliver_all(ranks)
            for target in (0, 1):
                ranks[target].matcher.on_message(PeerMessage(PeerMessageKind.JOINED, 2, turn), None)
            for work in late[:2]:
                with pytest.raises(JoinedError, match=r"rank 2 has called join\(\)"):
                    work.run(0.0)
            for rank in ranks:
                rank.matcher.begin_era()


def test_who_knows_nobody_yet_is_told_that_one_has_joined() -> None:
    with some(2) as ranks:
        work = ranks[0].add_up(torch.ones(1000))
        assert not go_on(work)
        ranks[0].matcher.on_message(PeerMessage(PeerMessageKind.JOINED, 1, 0), None)
        with pytest.raises(JoinedError, match=r"rank 1 has called join\(\)"):
            work.run(0.0)


def test_memory_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with some(2) as ranks:

        def find(source: int, number: int, end: int) -> Segment:
            raise ProtocolError(f"no memory up to {end}")

        monkeypatch.setattr(ranks[1].slots, "_incoming", type("", (), {"find": staticmethod(find)})())
        works = [rank.add_up(torch.ones(1000)) for rank in ranks]
        assert not any(map(go_on, works))
        deliver_all(ranks)
        with pytest.raises(ProtocolError, match="no memory up to 8192"):  # a page of lines, and one of slots
            works[1].run(0.0)


@pytest.mark.parametrize(("total", "slot_bytes"), [(4096, SLOT_BYTES), (8192, 2 * SLOT_BYTES)])
def test_slots_that_are_too_small_are_refused(total: int, slot_bytes: int) -> None:
    with some(2) as ranks:
        work = ranks[0].add_up(torch.ones(1000))
        assert not go_on(work)
        ranks[1].slots.prepare()
        key = ranks[0].slots._stream.key
        ranks[0].take(PeerMessage(PeerMessageKind.SHARED, 1, 0, 0, key, 1, total, total, 0, 0, slot_bytes))
        with pytest.raises(ProtocolError, match="rank 1 has slots of"):
            work.run(0.0)
