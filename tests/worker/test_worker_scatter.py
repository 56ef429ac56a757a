"""Scattered reductions under a seeded simulation: machines of several ranks, messages late, reordered, lost, repeated.

Memory is a list of numbers by address; a sum is a sum of numbers, so each contribution's part in it can be told.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from support.worker_core import block, slot as make_slot

from byteps_py.errors import ProtocolError
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.wire.chunks import Arriving, chunk_at
from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.events import (
    Action,
    BytesReady,
    Computed,
    Lend,
    RoundDone,
    Show,
    SumTaken,
    TensorAgreed,
    TensorForgotten,
    TensorVoid,
)
from byteps_py.worker.core.pieces import FetchPiece, Transfer, due
from byteps_py.worker.core.round_pipeline import RoundPipeline
from byteps_py.worker.core.scatter import Scatter, pieces
from byteps_py.worker.core.tensor import AskSum, Compute, RankSlot, SumRequest, Tensor

CHUNK = 8  # bytes
ROUNDS = 4
ITEM = 4


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.memory: dict[int, int] = {}
        self.due: list[Callable[[], None]] = []
        self.now = 0.0
        self.scratch = 1 << 30

    def step(self) -> bool:
        self.now += 0.01
        if not self.due:
            return False
        self.due.pop(self.rng.randrange(len(self.due)))()
        return True


class Machine:
    """``spec``'s ranks of machine ``index``, and its part of the protocol."""

    def __init__(self, world: World, index: int, machine_of: list[int], spec: TensorSpec, all_: list[Machine]) -> None:
        self.world, self.index, self.all, self.spec = world, index, all_, spec
        self.first_rank, self.size = machine_of.index(index), len(machine_of)
        self.queue = PushQueue[Transfer | AskSum](world.rng.choice((0, 8, 64)))
        self.scatter = Scatter(index, machine_of, self.queue, CHUNK)
        self.pipeline = RoundPipeline(self.size, PushQueue(0), self.scatter)
        self.slots: list[RankSlot] = []
        self.arrived: set[AskSum] = set()
        for local_rank in range(machine_of.count(index)):
            base = (index * 8 + local_rank) * 100_000
            made = make_slot(local_rank, spec)
            lends_input = machine_of.count(index) == 1 and len(set(machine_of)) > 1
            made.inputs = tuple(block(base + 1000 * (i + 1)) for i in range(1 + lends_input))
            made.result = block(base + 50_000)
            if world.rng.random() < 0.5:
                made.arriving = Arriving(ITEM * spec.piece(self.first_rank + local_rank, self.size)[1], CHUNK)
            self.slots.append(made)
        self.tensor = Tensor(spec.name, 1, spec, tuple(self.slots), first_rank=self.first_rank)
        self.tensor.machines = len(set(machine_of))
        if len(set(machine_of)) > 1 and len(self.slots) > 1:
            self.tensor.contributions = (block(index * 10**7 + 7_000_000), block(index * 10**7 + 8_000_000))
        self.parts = pieces(spec, self.size, limit=8, chunk_bytes=CHUNK)
        self.delivered = 0
        self.shown: set[tuple[int, int, int]] = set()  # slot, round, chunk
        # Machines hear at different times that the tensor is agreed; ranks may have come before.
        world.due.append(self._agree)
        for made in self.slots:
            world.due.append(lambda made=made: self._give(made, 1))  # type: ignore[misc]

    def _agree(self) -> None:
        for slot in self.slots:
            slot.tensor = self.tensor
        self.run(self.pipeline.handle(TensorAgreed(self.tensor, self.parts), self.world.now))

    def value(self, rank: int, round_: int, element: int) -> int:
        return 10**rank * (round_ + element % 3)

    def _give(self, slot: RankSlot, round_: int) -> None:
        rank = self.first_rank + slot.local_rank
        place = slot.inputs[(round_ - 1) % len(slot.inputs)].address
        for element in range(self.spec.count):
            self.world.memory[place + element * ITEM] = self.value(rank, round_, element)
        self.run(self.pipeline.handle(BytesReady(slot, round_, self.spec.nbytes), self.world.now))

    def run(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Compute):
                self.world.due.append(lambda a=action: self._compute(a))  # type: ignore[misc]
            elif isinstance(action, FetchPiece):
                for _ in range(1 + (self.world.rng.random() < 0.3)):
                    self.world.due.append(lambda a=action: self._ask(a.item))  # type: ignore[misc, arg-type]
            elif isinstance(action, Lend):
                self.world.due.append(lambda a=action: self._lend(a))  # type: ignore[misc]
            elif isinstance(action, Show):
                self._check_chunks(action)
            else:
                assert isinstance(action, RoundDone)
                self._check(action)

    def _check_chunks(self, show: Show) -> None:
        """Each once, and only when it is there."""
        slot = show.slot
        _, count = self.spec.piece(self.first_rank + slot.local_rank, self.size)
        for chunk in show.chunks:
            assert (slot.id, slot.round, chunk) not in self.shown
            self.shown.add((slot.id, slot.round, chunk))
            offset, length = chunk_at(chunk, count * ITEM, CHUNK)
            found = [self.world.memory[slot.result.address + at] for at in range(offset, offset + length, ITEM)]
            assert found == self.expected(slot, slot.round)[offset // ITEM : (offset + length) // ITEM]

    def expected(self, slot: RankSlot, round_: int) -> list[int]:
        first, count = self.spec.piece(self.first_rank + slot.local_rank, self.size)
        return [sum(self.value(r, round_, first + i) for r in range(self.size)) for i in range(count)]

    def _compute(self, compute: Compute) -> None:
        memory = self.world.memory
        for at in range(0, compute.part.length, ITEM):
            total = sum(memory[address + at] for address in compute.inputs)
            for output in compute.outputs:
                memory[output + at] = total
        self.run(self.pipeline.handle(Computed(compute.part), self.world.now))

    def _ask(self, ask: AskSum) -> None:
        part = ask.part
        request = SumRequest((self, ask), self.index, part.tensor.key, 1, part.index, ask.round)
        other = self.all[ask.server]
        other.run(other.scatter.requested(request))

    def _lend(self, lend: Lend) -> None:
        asker, ask = lend.request.origin  # type: ignore[misc]
        given = lend.part.tensor.given(lend.request.round)
        assert given is not None
        start = given.address + lend.part.offset
        data = [self.world.memory[start + at] for at in range(0, lend.part.length, ITEM)]

        def arrive() -> None:
            if ask in asker.arrived:
                return  # requests are numbered
            asker.arrived.add(ask)
            self.world.scratch += 1000
            for i, value in enumerate(data):
                self.world.memory[self.world.scratch + i * ITEM] = value
            asker.run(asker.scatter.arrived(ask, self.world.scratch, self.world.now))

        if self.world.rng.random() < 0.2:  # lost with the connection; on a new one it is asked for again
            self.world.due.append(lambda: asker._ask(ask))
        else:
            self.world.due.append(arrive)
        self.run(self.pipeline.handle(SumTaken(lend.part, lend.request.round), 0.0))

    def _check(self, done: RoundDone) -> None:
        self.delivered += 1
        round_ = self.delivered
        for slot in self.slots:
            expected = self.expected(slot, round_)
            assert [self.world.memory[slot.result.address + i * ITEM] for i in range(len(expected))] == expected
            if round_ < ROUNDS:
                self.world.due.append(lambda slot=slot: self._give(slot, round_ + 1))  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(100))
def test_every_contribution_counts_once_in_its_piece(seed: int) -> None:
    world = World(seed)
    rng = world.rng
    sizes = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
    machine_of = [m for m, count in enumerate(sizes) for _ in range(count)]
    spec = TensorSpec("x", DType.FLOAT32, (rng.choice((1, 2, 5, 9)),), Op.SUM, scatters=True)
    machines: list[Machine] = []
    for index in range(len(sizes)):
        machines.append(Machine(world, index, machine_of, spec, machines))
    while world.step() or any(len(m.queue) for m in machines):
        for machine in machines:
            machine.run([*due(machine.queue, world.now)])
    assert [m.delivered for m in machines] == [ROUNDS] * len(sizes)


def test_only_the_owners_machine_is_given_a_part() -> None:
    world = World(0)
    spec = TensorSpec("x", DType.FLOAT32, (4,), Op.SUM, scatters=True)
    machine = Machine(world, 0, [0, 1, 2], spec, [])
    machine._agree()
    for index, sender in ((1, 2), (0, 1), (99, 1)):
        with pytest.raises(ProtocolError, match=f"machine {sender} asks for part {index}"):
            machine.scatter.requested(SumRequest(None, sender, machine.tensor.key, 1, index, 1))


def _of_two_machines() -> tuple[Scatter, RoundPipeline, Tensor]:
    """One rank on each; machine 0 has given its part to the first round, and got its own."""
    spec = TensorSpec("g", DType.FLOAT32, (4,), scatters=True)
    queue = PushQueue[Transfer | AskSum](0)
    scatter = Scatter(0, [0, 1], queue)
    pipeline = RoundPipeline(2, PushQueue(0), scatter)
    mine = make_slot(0, spec, inputs=2)
    tensor = Tensor("g", 1, spec, (mine,), machines=2)
    mine.tensor = tensor
    pipeline.handle(TensorAgreed(tensor, pieces(spec, 2, limit=64)), 0.0)
    actions = pipeline.handle(BytesReady(mine, 1, spec.nbytes), 0.0)
    (ask,) = [action.item for action in actions if isinstance(action, FetchPiece)]
    assert isinstance(ask, AskSum)
    (lent,) = scatter.requested(SumRequest(None, 1, tensor.key, 1, 1, 1))
    assert isinstance(lent, Lend)
    pipeline.handle(SumTaken(lent.part, 1), 0.0)
    scatter.arrived(ask, 77, 0.0)
    assert [type(action) for action in pipeline.handle(Computed(ask.part), 0.0)] == [RoundDone]
    return scatter, pipeline, tensor


def test_what_was_lost_with_a_connection_is_given_again_after_the_end_of_its_tensor() -> None:
    scatter, pipeline, tensor = _of_two_machines()
    pipeline.handle(TensorVoid(tensor, is_kept=True), 0.0)
    (again,) = scatter.requested(SumRequest(None, 1, tensor.key, 1, 1, 1))
    assert isinstance(again, Lend)
    assert scatter.requested(SumRequest(None, 1, tensor.key, 1, 1, 2)) == []  # no round of a void tensor begins
    pipeline.handle(TensorForgotten(tensor), 0.0)
    assert scatter.requested(SumRequest(None, 1, tensor.key, 1, 1, 1)) == []


def test_a_void_tensor_whose_last_result_nobody_lacks_is_lent_no_more() -> None:
    scatter, pipeline, tensor = _of_two_machines()
    pipeline.handle(TensorVoid(tensor), 0.0)
    assert scatter.requested(SumRequest(None, 1, tensor.key, 1, 1, 1)) == []
