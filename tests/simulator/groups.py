"""What one group of an elastic job is to do, from its first rank's welcome to its end, and what it has done so far."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from byteps_py.tensors import DType, Op, TensorSpec

from .memory import Bytes
from .program import Name, Program
from .uses import Use
from .world import InvariantError

#: What the whole job has to do, however many groups it takes.
STEPS = 6
_MOST_IDS = 1000  # of one group


@dataclass(frozen=True, slots=True)
class Told(Use):
    """A broadcast of what rank 0 knows only then. ``words``: by use."""

    words: dict[int, int] = field(default_factory=dict)

    def contribution(self, rank: int) -> Bytes:
        return np.array([self.words[self.id] if rank == 0 else -1], np.int64).view(np.uint8)


class Book:
    """``number``: the epoch that the group began with. ``results``: see Turn. ``first``: the job's step with which its
    program begins, once somebody has said it. ``shuts_down_after``: so many steps of this group, and all ranks shut
    down, and initialize again; 0: they do not."""

    program_class: type[Program] = Program

    def __init__(self, seed: int, number: int, local_sizes: list[int]) -> None:
        self.number = number
        self.local_sizes = local_sizes
        self.size = sum(local_sizes)
        self.results: dict[int, bytes] = {}
        self.first = -1
        self.words: dict[int, int] = {}
        rng = random.Random(f"{seed}/{number}")
        self.program = program = self.program_class(self.size)
        program.uses = number * _MOST_IDS  # other values than in any group before
        names = [Name.make(rng, f"t{i}", self.size) for i in range(rng.randint(1, 4))]
        while len(program.steps) < STEPS:
            program.add_steps(rng, names)
        for step in program.steps:  # nobody is a step ahead of others
            spec = TensorSpec("all", DType.FLOAT32, (rng.choice((1, 40)),))
            step.append(Use(program.uses, "all", (spec,) * self.size))
            program.uses += 1
        rng = random.Random(f"{seed}/{number}/shut down")
        self.shuts_down_after = rng.randint(1, STEPS) if rng.random() < 0.2 else 0
        self.results = {
            use.id: use.combined(local_sizes)
            for step in program.steps
            for use in step
            if not (use.is_mismatch or use.pieces)
        }

    def begin(self, step: int) -> None:
        """A rank goes on with this step."""
        self.first = step if self.first < 0 else self.first
        if step != self.first:
            raise InvariantError(f"a rank of group {self.number} goes on with step {step}, others with {self.first}")

    def state(self) -> Told:
        """Rank 0's number of steps."""
        return self._told("state", -1)

    def hosts(self, step: int) -> Told:
        """What rank 0 has heard of machines that come or go."""
        return self._told("hosts", -2 - step)

    def _told(self, name: str, number: int) -> Told:
        spec = TensorSpec(name, DType.INT64, (1,), Op.BROADCAST, False, 0)
        return Told(number, name, (spec,) * self.size, words=self.words)

    def tell(self, use: Told, word: int) -> None:
        """Rank 0 does."""
        self.words[use.id] = word
        self.results[use.id] = use.contribution(0).tobytes()
