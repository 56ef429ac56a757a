"""The core of gathers and exchanges under a seeded simulation: machines whose messages and copies are delayed,
reordered and said twice, and ranks that go at their own pace. Every byte is followed, and memory is reused at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from support.worker_core import slot as make_slot

from byteps_py.errors import ProtocolError
from byteps_py.system.shm import Block
from byteps_py.tensors import DType, Layout, Op, Sizes, TensorSpec
from byteps_py.wire.chunks import Arriving, chunk_at
from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.events import (
    CopiedHere,
    DirectAction,
    Fail,
    PieceArrived,
    PieceCopied,
    PieceRefused,
    PiecesDeclared,
    PiecesReady,
    Show,
)
from byteps_py.worker.core.piece_exchange import PieceExchange
from byteps_py.worker.core.pieces import (
    Copy,
    CopyHere,
    Delivered,
    FetchPiece,
    Outgrown,
    PieceRequest,
    Receipt,
    Receipts,
    RefusePiece,
    Serve,
    Transfer,
    Way,
    due,
)
from byteps_py.worker.core.tensor import AskSum, RankSlot

CHUNK = 3
ROOM = 64
SIZES = (0, 0, 1, 3, 8, 20)


def make_spec(op: Op, group: tuple[int, ...] = (), name: str = "x") -> TensorSpec:
    return TensorSpec(name, DType.UINT8, (ROOM, ROOM * 8), op, group=group)


@dataclass
class World:
    """``memory``: all machines', by address. ``due``: what may happen next, in any order."""

    rng: random.Random
    memory: bytearray = field(default_factory=lambda: bytearray(1 << 20))
    used: int = 64
    due: list[Callable[[], None]] = field(default_factory=list)
    now: float = 0.0

    def block(self, nbytes: int) -> Block:
        start, self.used = self.used, self.used + nbytes
        return Block(0, start, nbytes, start)

    def step(self) -> bool:
        if not self.due:
            return False
        self.now += 0.01
        index = self.rng.randrange(len(self.due))
        self.due.pop(index)()
        return True


class Machine:
    def __init__(self, world: World, index: int, machine_of: list[int], all_: list[Machine]) -> None:
        self.world, self.index, self.all = world, index, all_
        queue = self.queue = PushQueue[Transfer | AskSum](world.rng.choice((0, 8, 40)))
        piece, local_piece, small = (world.rng.choice(sizes) for sizes in ((4, 7, 100), (5, 100), (0, 5, 100)))
        self.direct = PieceExchange(index, machine_of, piece, local_piece, queue, small)
        self.on_delivered: dict[int, Callable[[int], None]] = {}  # by slot id
        self.on_failed: dict[int, Callable[[str], None]] = {}
        self.on_shown: dict[int, Callable[[list[int]], None]] = {}
        self.outgrown: list[RankSlot] = []
        self.arrived: set[Transfer] = set()
        self.receipts = Receipts()

    def run(self, actions: list[DirectAction]) -> None:
        world = self.world
        for action in actions:
            if isinstance(action, CopyHere):
                for _, _, source, place, nbytes in action.pairs:
                    world.memory[place : place + nbytes] = world.memory[source : source + nbytes]
                self.run(self.direct.handle(CopiedHere(action.pairs), 0.0))
            elif isinstance(action, Copy):
                world.due.append(lambda a=action: self._copy(a))  # type: ignore[misc]
            elif isinstance(action, FetchPiece):
                world.due.append(lambda a=action: self._ask(a.item))  # type: ignore[misc]
                if world.rng.random() < 0.2:
                    world.due.append(lambda a=action: self._ask(a.item))  # type: ignore[misc]
            elif isinstance(action, Serve):
                world.due.append(lambda a=action: self._send(a))  # type: ignore[misc]
            elif isinstance(action, Delivered):
                self.on_delivered[action.slot.id](action.round)
            elif isinstance(action, Show):
                self.on_shown[action.slot.id](action.chunks)
            elif isinstance(action, Fail):
                self.on_failed[action.slots[0].id](str(action.error))
            elif isinstance(action, RefusePiece):
                world.due.append(lambda a=action: self._refuse(a))  # type: ignore[misc]
            else:
                assert isinstance(action, Outgrown)
                self.outgrown.append(action.slot)

    def _copy(self, copy: Copy) -> None:
        memory, length = self.world.memory, copy.transfer.length
        for output in copy.outputs:
            memory[output : output + length] = memory[copy.source : copy.source + length]
        self.run(self.direct.handle(PieceCopied(copy.transfer), 0.0))

    def _ask(self, transfer: Transfer) -> None:
        channel = transfer.channel
        request = PieceRequest(
            (self, transfer), self.index, channel.key, transfer.round, channel.ranks[transfer.source], transfer.target,
            transfer.offset, transfer.length, transfer.total, transfer.is_tentative,
        )  # fmt: skip
        other = self.all[transfer.server]
        if round_ := self.receipts.say(self.way(transfer)):
            self.say(self.way(transfer), round_)
        try:
            other.run(other.direct.handle(request, 0.0))
        except ProtocolError:
            assert transfer in self.arrived  # said again, and said since that it has come

    def way(self, transfer: Transfer) -> Way:
        channel = transfer.channel
        return Way(transfer.server, channel.key, channel.ranks[transfer.source], transfer.target)

    def say(self, way: Way, round_: int) -> None:
        other = self.all[way.machine]
        for _ in range(self.world.rng.choice((1, 1, 2))):
            other.run(other.direct.handle(Receipt(self.index, way.key, round_, way.source, way.target), 0.0))

    def say_due(self) -> None:
        for way, round_ in self.receipts.take_due():
            self.say(way, round_)

    def _refuse(self, refuse: RefusePiece) -> None:
        asker, transfer = refuse.request.origin  # type: ignore[misc]
        if transfer not in asker.arrived:
            asker.arrived.add(transfer)
            asker.run(asker.direct.handle(PieceRefused(transfer, refuse.error), self.world.now))

    def _send(self, serve: Serve) -> None:
        """Read when it arrives: it is sent from where it lies. It may be lost, and is asked for again."""
        asker, transfer = serve.request.origin  # type: ignore[misc]

        def arrive() -> None:
            if transfer in asker.arrived:
                return  # an answer is taken once: requests are numbered
            asker.arrived.add(transfer)
            start = serve.block.address + serve.offset
            data = bytes(self.world.memory[start : start + serve.request.length])
            place = self.world.block(len(data))
            self.world.memory[place.address : place.address + len(data)] = data
            asker.receipts.arrived(asker.way(transfer), transfer.round, len(data), transfer.total)
            self.world.due.append(asker.say_due)
            asker.run(asker.direct.handle(PieceArrived(transfer, place.address), self.world.now))

        lost = self.world.rng.random() < 0.15
        self.world.due.append((lambda: asker._ask(transfer)) if lost else arrive)


@pytest.mark.parametrize("sizes", list(Sizes))
@pytest.mark.parametrize("seed", range(60))
def test_every_byte_arrives_in_every_order_of_events(seed: int, sizes: Sizes) -> None:
    simulate(random.Random(seed), sizes, wrong=0.0)


@pytest.mark.parametrize("sizes", [Sizes.CHECKED, Sizes.TOGETHER])
@pytest.mark.parametrize("seed", range(200))
def test_sizes_that_differ_end_a_round_only_for_those_who_disagree(seed: int, sizes: Sizes) -> None:
    simulate(random.Random(seed), sizes, wrong=random.Random(seed).choice((0.02, 0.1, 0.5)))


def simulate(rng: random.Random, how: Sizes, wrong: float) -> None:
    """Random rounds of random ranks. ``wrong``: how likely a rank expects something else than another has for it."""
    world = World(rng)
    sizes = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
    machine_of = [m for m, count in enumerate(sizes) for _ in range(count)]
    machines: list[Machine] = []
    for index in range(len(sizes)):
        machines.append(Machine(world, index, machine_of, machines))
    size = len(machine_of)
    group = tuple(sorted(rng.sample(range(size), rng.randint(1, size))))
    op = rng.choice((Op.GATHER, Op.EXCHANGE))
    spec = make_spec(op, group)
    rounds = 5
    columns = 1 if op is Op.GATHER else len(group)
    matrices = [
        [[rng.choice(SIZES[: 4 if columns > 3 else 6]) for _ in range(columns)] for _ in group] for _ in range(rounds)
    ]
    wrongs = {
        (round_, s, t): rng.choice((0, 1, 2, 9))
        for round_ in range(1, rounds + 1)
        for s in range(len(group))
        for t in range(len(group))
        if rng.random() < wrong
    }
    left = dict.fromkeys(group, rounds)

    def expected(round_: int, s: int, t: int) -> int:
        return wrongs.get((round_, s, t), matrices[round_ - 1][s][0 if op is Op.GATHER else t])

    def differing(round_: int) -> set[tuple[int, int]]:
        return {
            (s, t)
            for (r, s, t), due in wrongs.items()
            if r == round_
            and due != matrices[r - 1][s][0 if op is Op.GATHER else t]
            and not (op is Op.GATHER and s == t and not due)  # it has it
        }

    def byte(source: int, target: int, round_: int) -> int:
        return (round_ * 49 + source * 7 + target) % 255 + 1

    def live(rank: int) -> None:
        machine = machines[machine_of[rank]]
        me = group.index(rank)
        in_chunks = rng.random() < 0.5
        seen: set[int] = set()  # chunks of this round
        slot = make_slot(rank - machine_of.index(machine_of[rank]), spec, inputs=2)

        def declare(round_: int) -> None:
            nonlocal slot
            slot = make_slot(slot.local_rank, spec, inputs=2)
            slot.inputs, slot.result = (world.block(ROOM), world.block(ROOM)), world.block(ROOM * 8)
            machine.on_delivered[slot.id], machine.on_failed[slot.id] = delivered, failed
            machine.on_shown[slot.id] = shown
            if in_chunks:
                slot.arriving = Arriving(ROOM * 8, CHUNK)
            machine.run(machine.direct.handle(PiecesDeclared(rank, slot), 0.0))
            assert slot.round == round_ - 1
            world.due.append(lambda: begin(round_))

        def due_now(round_: int) -> bytes:
            column = 0 if op is Op.GATHER else me
            return b"".join(bytes([byte(s, column, round_)]) * expected(round_, s, me) for s in range(len(group)))

        def shown(chunks: list[int]) -> None:
            """Each once, and as it stays."""
            assert in_chunks
            assert not seen.intersection(chunks)
            seen.update(chunks)
            data = due_now(slot.round)
            for offset, length in (chunk_at(chunk, ROOM * 8, CHUNK) for chunk in chunks):
                start = slot.result.address + offset
                assert bytes(world.memory[start : start + length]) == data[offset : offset + length]

        def begin(round_: int) -> None:
            seen.clear()
            matrix = matrices[round_ - 1]
            sends, receives, at = [], [], 0
            place = slot.inputs[(round_ - 1) % 2]
            for column, nbytes in enumerate(matrix[me]):
                sends.append((at, nbytes))
                start = place.address + at
                world.memory[start : start + nbytes] = bytes([byte(me, column, round_)]) * nbytes
                at += nbytes
            world.memory[place.address + at : place.address + ROOM] = bytes(ROOM - at)
            at = 0
            for s in range(len(group)):
                nbytes = expected(round_, s, me)
                receives.append((at, nbytes))
                at += nbytes
            machine.run(
                machine.direct.handle(PiecesReady(slot, round_, Layout(tuple(sends), tuple(receives), how)), world.now)
            )

        def delivered(round_: int) -> None:
            data = due_now(round_)
            start = slot.result.address
            assert bytes(world.memory[start : start + len(data)]) == data
            wrong_pairs = differing(round_)
            assert me not in {t for _, t in wrong_pairs}
            assert how is not Sizes.TOGETHER or op is Op.GATHER or me not in {s for s, _ in wrong_pairs}
            left[rank] -= 1
            if round_ < rounds:
                world.due.append(lambda: begin(round_ + 1))

        def failed(text: str) -> None:
            round_ = rounds - left[rank] + 1
            wrong_pairs = differing(round_)
            assert wrong_pairs
            assert op is Op.GATHER or me in {each for pair in wrong_pairs for each in pair}
            assert "rank" in text
            left[rank] -= 1
            if round_ < rounds:
                world.due.append(lambda: declare(round_ + 1))

        declare(1)

    for rank in group:
        world.due.append(lambda rank=rank: live(rank))  # type: ignore[misc]
    while world.step() or any(len(m.queue) for m in machines):
        world.now += 1.0 if not world.due else 0.0
        for machine in machines:
            machine.run(due(machine.queue, world.now))
    assert not any(left.values())
    assert not any(m.offers for machine in machines for _, m in machine.direct.members())
