"""The core of gathers and exchanges under a seeded simulation: machines whose messages and copies are delayed,
reordered and said twice, and ranks that go at their own pace. Every byte is followed, and memory is reused at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from support.worker_core import slot as make_slot

from byteps_py.errors import ProtocolError
from byteps_py.shm import Block
from byteps_py.strips import Arriving, strip_at
from byteps_py.tensors import DType, Layout, Op, Sizes, TensorSpec
from byteps_py.worker import serving
from byteps_py.worker.actions import AskSum, Fail, Fetch, Show
from byteps_py.worker.credit import PushQueue
from byteps_py.worker.direct import Direct
from byteps_py.worker.pieces import (
    ALL,
    Copy,
    CopyHere,
    Delivered,
    DirectAction,
    Outgrown,
    Receipt,
    Refuse,
    Request,
    Serve,
    Transfer,
    due,
)
from byteps_py.worker.receipts import Receipts, Way
from byteps_py.worker.tensor import RankSlot

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
        self.direct = Direct(index, machine_of, piece, local_piece, queue, small)
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
                self.run(self.direct.copied_here(action.pairs))
            elif isinstance(action, Copy):
                world.due.append(lambda a=action: self._copy(a))  # type: ignore[misc]
            elif isinstance(action, Fetch):
                world.due.append(lambda a=action: self._ask(a.item))  # type: ignore[misc]
                if world.rng.random() < 0.2:
                    world.due.append(lambda a=action: self._ask(a.item))  # type: ignore[misc]
            elif isinstance(action, Serve):
                world.due.append(lambda a=action: self._send(a))  # type: ignore[misc]
            elif isinstance(action, Delivered):
                self.on_delivered[action.slot.id](action.round)
            elif isinstance(action, Show):
                self.on_shown[action.slot.id](action.strips)
            elif isinstance(action, Fail):
                self.on_failed[action.slots[0].id](str(action.error))
            elif isinstance(action, Refuse):
                world.due.append(lambda a=action: self._refuse(a))  # type: ignore[misc]
            else:
                assert isinstance(action, Outgrown)
                self.outgrown.append(action.slot)

    def _copy(self, copy: Copy) -> None:
        memory, length = self.world.memory, copy.transfer.length
        for output in copy.outputs:
            memory[output : output + length] = memory[copy.source : copy.source + length]
        self.run(self.direct.copied(copy.transfer))

    def _ask(self, transfer: Transfer) -> None:
        channel = transfer.channel
        request = Request(
            (self, transfer), self.index, channel.key, transfer.round, channel.ranks[transfer.source], transfer.target,
            transfer.offset, transfer.length, transfer.total, transfer.is_tentative,
        )  # fmt: skip
        other = self.all[transfer.server]
        if round_ := self.receipts.say(self.way(transfer)):
            self.say(self.way(transfer), round_)
        try:
            other.run(other.direct.requested(request))
        except ProtocolError:
            assert transfer in self.arrived  # said again, and said since that it has come

    def way(self, transfer: Transfer) -> Way:
        channel = transfer.channel
        return Way(transfer.server, channel.key, channel.ranks[transfer.source], transfer.target)

    def say(self, way: Way, round_: int) -> None:
        other = self.all[way.machine]
        for _ in range(self.world.rng.choice((1, 1, 2))):
            other.run(other.direct.received(Receipt(self.index, way.key, round_, way.source, way.target)))

    def say_due(self) -> None:
        for way, round_ in self.receipts.take_due():
            self.say(way, round_)

    def _refuse(self, refuse: Refuse) -> None:
        asker, transfer = refuse.request.origin  # type: ignore[misc]
        if transfer not in asker.arrived:
            asker.arrived.add(transfer)
            asker.run(asker.direct.refused(transfer, refuse.error, self.world.now))

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
            asker.receipts.came(asker.way(transfer), transfer.round, len(data), transfer.total)
            self.world.due.append(asker.say_due)
            asker.run(asker.direct.arrived(transfer, place.address, self.world.now))

        lost = self.world.rng.random() < 0.15
        self.world.due.append((lambda: asker._ask(transfer)) if lost else arrive)


@pytest.mark.parametrize("sizes", list(Sizes))
@pytest.mark.parametrize("seed", range(60))
def test_every_byte_arrives_in_every_order_of_events(seed: int, sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("byteps_py.strips.STRIP_BYTES", 3)
    simulate(random.Random(seed), sizes, wrong=0.0)


@pytest.mark.parametrize("sizes", [Sizes.CHECKED, Sizes.TOGETHER])
@pytest.mark.parametrize("seed", range(200))
def test_sizes_that_differ_end_a_round_only_for_those_who_disagree(
    seed: int, sizes: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("byteps_py.strips.STRIP_BYTES", 3)
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
        in_strips = rng.random() < 0.5
        seen: set[int] = set()  # strips of this round
        slot = make_slot(rank - machine_of.index(machine_of[rank]), spec, inputs=2)

        def declare(round_: int) -> None:
            nonlocal slot
            slot = make_slot(slot.local_rank, spec, inputs=2)
            slot.inputs, slot.result = (world.block(ROOM), world.block(ROOM)), world.block(ROOM * 8)
            machine.on_delivered[slot.id], machine.on_failed[slot.id] = delivered, failed
            machine.on_shown[slot.id] = shown
            if in_strips:
                slot.arriving = Arriving(ROOM * 8)
            machine.run(machine.direct.declare(rank, slot))
            assert slot.round == round_ - 1
            world.due.append(lambda: begin(round_))

        def due_now(round_: int) -> bytes:
            column = 0 if op is Op.GATHER else me
            return b"".join(bytes([byte(s, column, round_)]) * expected(round_, s, me) for s in range(len(group)))

        def shown(strips: list[int]) -> None:
            """Each once, and as it stays."""
            assert in_strips
            assert not seen.intersection(strips)
            seen.update(strips)
            data = due_now(slot.round)
            for offset, length in (strip_at(strip, ROOM * 8) for strip in strips):
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
            machine.run(machine.direct.ready(slot, round_, Layout(tuple(sends), tuple(receives), how), world.now))

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


def local(op: Op = Op.EXCHANGE) -> tuple[Direct, list[RankSlot]]:
    direct = Direct(0, [0, 0, 1], 100, 100, PushQueue(0))
    slots = [make_slot(i, make_spec(op), inputs=2) for i in range(2)]
    for rank, each in enumerate(slots):
        direct.declare(rank, each)
    return direct, slots


def test_a_round_out_of_turn_breaks_the_protocol() -> None:
    direct, (slot, _) = local()
    nothing = Layout(((0, 0),) * 3, ((0, 0),) * 3)
    with pytest.raises(ProtocolError, match="gave no layout"):
        direct.ready(slot, 1, None, 0.0)
    with pytest.raises(ProtocolError, match="handed over round 2 after round 0"):
        direct.ready(slot, 2, nothing, 0.0)
    assert direct.ready(slot, 1, nothing, 0.0) == [Delivered(slot, 1)]


def test_other_machines_get_what_is_theirs_and_no_more() -> None:
    direct, (slot, _) = local()
    request = Request(None, 1, 0, 1, 0, 2, 0, 4, 4)
    request.key = next(iter(direct.members()))[0].key
    assert direct.requested(request) == []  # it has not come to the round
    (serve,) = direct.ready(slot, 1, Layout(((0, 0), (0, 0), (8, 4)), ((0, 0),) * 3), 0.0)[:1]
    assert isinstance(serve, Serve)
    assert (serve.block, serve.offset) == (slot.inputs[0], 8)
    for wrong, error, text in (
        (Request(None, 1, request.key, 1, 0, 2, 2, 4, 4), ProtocolError, "does not have"),
        (Request(None, 1, request.key, 1, 0, 9, 0, 4, 4), ProtocolError, "has no part"),
        (Request(None, 1, request.key, 1, 2, 2, 0, 4, 4), ProtocolError, "is not a rank of this machine"),
        (Request(None, 1, request.key, 1, 0, ALL, 0, 4, 4), ProtocolError, "a gather's piece is for a machine"),
        (Request(None, 0, request.key, 1, 0, 2, 0, 4, 4), ProtocolError, "machine 0 asks for another's rank"),
    ):
        with pytest.raises(error, match=text):
            direct.requested(wrong)
    (refuse,) = direct.requested(Request(None, 1, request.key, 1, 0, 2, 0, 5, 5))
    assert isinstance(refuse, Refuse)
    assert "rank 0 sends 4 bytes to rank 2, which expects 5" in str(refuse.error)


def test_memory_to_which_a_piece_is_being_copied_is_kept_though_its_round_was_abandoned() -> None:
    queue: PushQueue[Transfer | AskSum] = PushQueue(0)
    direct = Direct(0, [0, 1], 100, 100, queue)
    small, large = (make_slot(0, TensorSpec("x", DType.UINT8, (4, room), Op.GATHER), inputs=2) for room in (8, 16))
    direct.declare(0, small)
    (fetch,) = direct.ready(small, 1, Layout(((0, 0),), ((0, 0), (0, 4))), 0.0)
    assert isinstance(fetch, Fetch)
    assert isinstance(fetch.item, Transfer)
    (copy,) = direct.arrived(fetch.item, 77, 0.0)
    assert isinstance(copy, Copy)
    ((_, member),) = direct.members()
    direct.abandon(member)
    assert direct.declare(0, large) == []
    assert direct.copied(fetch.item) == [Outgrown(small)]


def test_a_wrong_request_that_came_too_early_is_refused_not_held_against_the_rank() -> None:
    direct, (slot, _) = local()
    key = next(iter(direct.members()))[0].key
    wrong = Request(None, 1, key, 1, 0, 2, 2, 4, 4)
    assert direct.requested(wrong) == []
    actions = direct.ready(slot, 1, Layout(((0, 0), (0, 0), (8, 4)), ((0, 0),) * 3), 0.0)
    assert [action.request for action in actions if isinstance(action, Refuse)] == [wrong]
    assert not any(isinstance(action, Serve) for action in actions)


def test_requests_for_rounds_to_come_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_EARLY", 3)
    direct, _ = local()
    key = next(iter(direct.members()))[0].key
    for _ in range(3):
        assert direct.requested(Request(None, 1, key, 7, 0, 2, 0, 4, 4)) == []
    with pytest.raises(ProtocolError, match="machine 1 asks for too much too soon"):
        direct.requested(Request(None, 1, key, 7, 0, 2, 0, 4, 4))


def test_a_round_from_before_all_joined_is_not_looked_at() -> None:
    """It may be asked for once more, when its name is other ranks'."""
    direct = Direct(0, [0, 0, 1], 100, 100, PushQueue(0))
    direct.start_anew(3)
    slot = make_slot(0, make_spec(Op.EXCHANGE, (0, 2)), inputs=2)
    direct.declare(0, slot)
    request = Request(None, 1, next(iter(direct.members()))[0].key, 3, 1, 2, 0, 4, 4)
    assert direct.requested(request) == []
    request.round = 4
    assert direct.requested(request) == []  # perhaps all have joined again, and the name is another group's by then
    actions = direct.ready(slot, 4, Layout(((0, 0),) * 2, ((0, 0),) * 2), 0.0)
    (refuse,) = [action for action in actions if isinstance(action, Refuse)]
    assert refuse.request is request
    assert "has no part" in str(refuse.error)


def test_who_knows_first_that_all_have_joined_may_use_a_name_for_other_ranks() -> None:
    other = make_slot(1, make_spec(Op.GATHER, (1, 2)), inputs=2)
    direct = Direct(0, [0, 0, 1], 100, 100, PushQueue(0))
    direct.declare(0, make_slot(0, make_spec(Op.EXCHANGE, (0, 2)), inputs=2))
    key = next(iter(direct.members()))[0].key
    request = Request(None, 1, key, 1, 1, ALL, 0, 4, 4)
    assert direct.requested(request) == []
    direct.start_anew(0)
    direct.declare(1, other)
    actions = direct.ready(other, 1, Layout(((0, 4),), ((0, 4), (4, 0))), 0.0)
    assert [type(action) for action in actions if not isinstance(action, CopyHere)] == [Serve]


def test_one_name_has_one_group_and_kind() -> None:
    direct, _ = local()
    with pytest.raises(ProtocolError, match="rank 1 declares it for gather of bytes, others of this machine for exch"):
        direct.declare(1, make_slot(1, make_spec(Op.GATHER), inputs=2))
