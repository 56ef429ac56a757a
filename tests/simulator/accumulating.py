"""Jobs whose machines add to values that servers keep, each in its own time, beside sums that all make together.

The values count: element e of each partition belongs to rank e, which adds 1 to it with each of its changes. So every
copy of a partition says by itself whose changes it contains, and how many.

Some travel as int8, in blocks: then element e of each block belongs to rank e % 12, and the last elements to nobody.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from byteps_py.arrivals import LoggedChange
from byteps_py.session import Slot
from byteps_py.tensor_codec import SCALED_BLOCK, Codec, CodecKind
from byteps_py.tensors import NO_BOUND, DType, Op, TensorSpec
from byteps_py.wire import rank_link as protocol
from byteps_py.worker.core.tensor import AccumulatedPart, Part

from .cluster import Cluster
from .codecs import INT8, decoded
from .ledger import Ledger
from .memory import Wide
from .outages import OutageCluster
from .parts import Parts
from .program import Name, Program
from .rank import Rank
from .turn import Life
from .world import InvariantError

RANKS = 12  # at most, see Cluster
_PARTITION_BYTES = 8 * RANKS
_FIRST = 1000  # of the first values
_OWNED = SCALED_BLOCK // RANKS * RANKS  # of a block


def _owners(spec: TensorSpec) -> Wide:
    """Whose each element is; -1: nobody's."""
    if spec.codec is None:
        return np.arange(spec.count) % RANKS
    place = np.arange(spec.count) % SCALED_BLOCK
    return np.where(place < _OWNED, place % RANKS, -1)


def _by_rank(spec: TensorSpec, counts: Wide) -> Wide:
    """Rows of as many elements as there may be ranks, each within a partition."""
    if spec.codec is None:
        return counts.reshape(-1, RANKS)
    blocks = counts.reshape(-1, SCALED_BLOCK)
    if blocks[:, _OWNED:].any():
        raise InvariantError(f"{spec.name}: elements of nobody have changed")
    return blocks[:, :_OWNED].reshape(-1, RANKS)


@dataclass(slots=True)
class Phase:
    """A tensor in which all machines accumulate. ``rounds``: of each machine, with the one that brings the first value.
    ``has_joins``: ranks join at its end; else all machines have the same number, and the last round adds nothing.

    ``given``: by rank, its changes so far. ``joined``: ranks.
    """

    spec: TensorSpec
    rounds: list[int]
    has_joins: bool
    given: dict[int, int] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)


@dataclass(slots=True)
class AccumulatingProgram(Program):
    """``phases``: before all else."""

    phases: list[Phase] = field(default_factory=list)

    @classmethod
    def make(cls, rng: random.Random, size: int) -> Self:
        program = cls(size)
        program.add_steps(rng, [Name.make(rng, f"t{i}", size) for i in range(rng.randint(1, 3))])
        return program

    def plan(self, rng: random.Random, machines: int) -> None:
        """Make the phases of a job of several machines."""
        name = ""
        for number in range(rng.choice((1, 1, 2, 3)) if machines > 1 else 0):
            has_joins = rng.random() < 0.4
            rounds = [rng.choice((1, 2, 5, 12)) for _ in range(machines)]
            if not has_joins:
                rounds = [max(rounds) + 1] * machines
            if not (name and self.phases[-1].has_joins and rng.random() < 0.5):  # all have joined: it is void
                name = f"values {number}"
            shape, staleness = (RANKS * rng.choice((1, 2, 5)),), rng.choice((1, 1, 2, 3, NO_BOUND))
            quorum = random.Random(f"{name} {rounds} 37").choice((0, *range(1, machines + 2)))
            if has_joins and quorum:  # without joins, some would wait for a quorum, and others in a barrier
                staleness = NO_BOUND
            else:
                quorum = 0
            dtype, codec = DType.INT64, None
            if random.Random(f"{name} {rounds} coded").random() < 0.4:
                dtype, shape = DType.FLOAT32, (SCALED_BLOCK * shape[0] // RANKS,)
                codec = Codec(CodecKind.INT8, error_feedback=len(rounds) % 2 == 0)
            spec = TensorSpec(name, dtype, shape, Op.ACCUMULATE, staleness=staleness, quorum=quorum, codec=codec)
            self.phases.append(Phase(spec, rounds, has_joins))


class AccumulatingLedger(Ledger):
    """A machine's answer is its own; and what it supplies is what it has accepted."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._copies: dict[object, bytes] = {}
        self.changes: list[LoggedChange] = []  # what machines would log
        self.changed = 0  # answers that brought changes instead of values

    def accepts(self, machine: int, part: Part, round_: int, address: int) -> None:
        if not isinstance(part, AccumulatedPart):
            super().accepts(machine, part, round_, address)
            return
        if part.changes:
            self._copies[machine, self._name(part, round_)] = self._changed(machine, part, round_)
        else:
            self._copies[machine, self._name(part, round_)] = self.memory.at(address, part.dense_length).tobytes()
        _, clock, added_at = part.told
        tensor = part.tensor
        self.changes.append(LoggedChange(machine, tensor.name, tensor.generation, part.index, round_, added_at, clock))

    def _changed(self, machine: int, part: AccumulatedPart, round_: int) -> bytes:
        """The copy before, with the changes that the answer brings."""
        self.changed += 1
        values = np.frombuffer(self._copies[machine, self._name(part, round_ - 1)], np.float32).copy()
        block, own = part.contribution
        for change in part.changes:
            code = self.memory.at(change or block.address + own, INT8.coded_nbytes(part.count))
            values += decoded(code)[: part.count]
        return values.tobytes()

    def supplies(self, machine: int, part: Part, round_: int, data: bytes | None) -> None:
        if not isinstance(part, AccumulatedPart):
            super().supplies(machine, part, round_, data)
        elif data is None or self._copies.get((machine, self._name(part, round_))) != data:
            raise InvariantError(f"machine {machine} supplies a copy of round {round_} that it never got")


class AccumulatingRank(Rank):
    """``local_sizes``: of the machines."""

    local_sizes: list[int]
    phases: list[Phase]

    def _live(self) -> Life:
        yield from self._join_job()
        for phase in self.phases:
            yield from self._accumulate(phase)
        for number, step in enumerate([*self._program.steps, []]):
            yield from self._go([use for use in step if use.specs[self.number] is not None])
            if number in self._program.barriers:
                yield from self._barrier()
        yield from self._settle()

    def _accumulate(self, phase: Phase) -> Life:
        spec, rounds = phase.spec, phase.rounds[self.machine]
        if phase.has_joins and self.random.random() < 0.1:
            rounds = rounds if self.local_sizes[self.machine] > 1 else 0  # it joins before it has begun
        seen, kind = np.zeros(spec.count, np.int64), spec.dtype.name.lower()
        phase.given[self.number] = 0
        for round_ in range(1, rounds + 1):
            (slot,) = yield from self._declare([spec])
            is_last = round_ == rounds and not phase.has_joins
            if is_last:
                yield from self._barrier()
            yield self.pause()
            if self.random.random() < 0.1:
                yield self.random.choice((0.1, 0.5, 3.0))  # it computes slowly
            self.doing = f"accumulating round {round_} of {spec.name}"
            change = _owners(spec) == self.number if round_ > 1 else _FIRST + np.arange(spec.count)
            np.frombuffer(slot.input, kind)[:] = 0 if is_last else change
            phase.given[self.number] += round_ > 1 and not is_last
            yield from self._swap(slot)
            values = np.frombuffer(slot.result, kind)
            seen = self._check(phase, round_, values.astype(np.int64) - _FIRST - np.arange(spec.count), seen, is_last)
            values[:] = -1  # the user may: it is theirs
        if not phase.has_joins:
            yield from self._barrier()  # no machine may leave before all have got their last copies
        else:
            phase.joined.add(self.number)
            yield from self._ask(protocol.Join(), protocol.AllJoined)
            self.session.join(0.0)
            self.say(f"has joined after {spec.name}")

    def _swap(self, slot: Slot) -> Life:
        session, since_s = self.session, self.world.now_s
        if self.random.random() < 0.3 and len(slot.input) > 8:
            session.hand_over(slot, self.random.randrange(1, len(slot.input)) // 8 * 8)
            yield self.pause()
        session.hand_over(slot)
        yield lambda: session.is_done(slot)
        self.check_waited(since_s)
        session.wait(slot, 1.0)

    def _check(self, phase: Phase, round_: int, counts: Wide, seen: Wide, is_last: bool) -> Wide:
        """What a copy contains."""
        who = f"{self.name}, {phase.spec.name}, round {round_}"
        by_rank = _by_rank(phase.spec, counts)
        given = np.array([phase.given.get(rank, 0) for rank in range(RANKS)])
        if (by_rank[:, self.number] != given[self.number]).any():
            raise InvariantError(f"{who}: it has given {given[self.number]} changes, and gets {by_rank.tolist()}")
        if (by_rank > given).any() or (is_last and (by_rank != given).any()):
            raise InvariantError(f"{who}: {given.tolist()} changes were given, and it gets {by_rank.tolist()}")
        if (counts < seen).any():
            raise InvariantError(f"{who}: changes that it had are gone: {seen.tolist()}, then {counts.tolist()}")
        first = 0
        for size in self.local_sizes:
            ranks = range(first, first + size)
            first += size
            if (by_rank[:, ranks] != by_rank[:, ranks[:1]]).any():
                raise InvariantError(f"{who}: a part of a machine's change: {by_rank.tolist()}")
            is_awaited = not phase.joined.issuperset(ranks) and self.number not in ranks
            if is_awaited and by_rank[:, ranks[0]].min() + 1 < round_ - phase.spec.staleness:
                raise InvariantError(f"{who}: it is too far ahead of ranks {[*ranks]}: {by_rank.tolist()}")
        if phase.spec.quorum and round_ > 1:
            self._check_quorum(phase, round_, counts - seen)
        self.say(f"has got round {round_} of {phase.spec.name}")
        return counts

    def _check_quorum(self, phase: Phase, round_: int, new: Wide) -> None:
        """``new``: what a copy contains and the one before does not. After two faults, a machine may have been answered
        again whose first answer was one of those that were lost, and its copy have changes of a wave under way."""
        by_rank, first, left = _by_rank(phase.spec, new), 0, 0
        in_rows = np.zeros(len(by_rank), np.int64)  # machines; each partition has waves of its own
        for size in self.local_sizes:
            ranks = range(first, first + size)
            first += size
            left += not phase.joined.issuperset(ranks)
            in_rows += by_rank[:, ranks[0]] > 0
        machines = int(in_rows.min())
        if machines < min(phase.spec.quorum, left) and len(self.world.trials) < 2:
            raise InvariantError(f"{self.name}, {phase.spec.name}, round {round_}: {machines} machines are no quorum")


class AccumulatingJob(Cluster):
    """Beside the kind of cluster that a subclass names first."""

    program_class = AccumulatingProgram
    rank_class = AccumulatingRank
    partition_bytes = _PARTITION_BYTES

    def __init__(self, seed: int, parts: type[Parts] = Parts) -> None:
        super().__init__(seed, parts)
        self.ledger = AccumulatingLedger(self.memory, lambda: self.world.active.group)

    def _results(self) -> dict[int, bytes]:
        if isinstance(self.program, AccumulatingProgram):
            self.program.plan(self.world.random, self.machines)
        return super()._results()

    def new_rank(self, settings: Any) -> Rank:
        rank = super().new_rank(settings)
        if isinstance(rank, AccumulatingRank) and isinstance(self.program, AccumulatingProgram):
            rank.local_sizes, rank.phases = self.local_sizes, self.program.phases
        return rank


class AccumulatingCluster(AccumulatingJob):
    """On a reliable network."""


class AccumulatingOutageCluster(AccumulatingJob, OutageCluster):
    """Beside an unreliable network."""
