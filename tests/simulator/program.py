"""Random programs for the ranks, and what must come out of them.

A program is a list of steps that all ranks go through, each at its own pace and in its own order; only within a
step does the order differ. What a rank gives, and so every result, follows from the seed alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from byteps_py.tensors import DType, Op, TensorSpec

from .memory import Bytes, combine

PARTITION_BYTES = 64
_DTYPES = (DType.FLOAT32, DType.FLOAT32, DType.FLOAT16, DType.FLOAT64, DType.INT8, DType.INT32, DType.INT64)
_OPS = (Op.SUM, Op.SUM, Op.SUM, Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT, Op.BROADCAST)
_COUNTS = (0, 1, 2, 15, 16, 17, 40, 64, 100)
_POOL_BYTES = 1 << 14


def _make_pool() -> dict[DType, Bytes]:
    """Values of many magnitudes, so that another order of adding gives other bits."""
    generator = np.random.default_rng(4)
    floats = generator.standard_normal(_POOL_BYTES) * np.exp2(generator.integers(-5, 6, _POOL_BYTES))
    integers = generator.integers(-(1 << 62), 1 << 62, _POOL_BYTES)
    return {
        dtype: (floats if dtype.is_floating else integers).astype(dtype.name.lower()).view(np.uint8)
        for dtype in set(_DTYPES)
    }


_POOL = _make_pool()


@dataclass(frozen=True, slots=True)
class Use:
    """One round of one name. ``specs``: what each rank says it is; None if it does not take part. ``first``: what each
    says before that, without using it; None if it does not. They disagree if ``is_mismatch``."""

    id: int
    name: str
    specs: tuple[TensorSpec | None, ...]
    first: TensorSpec | None = None
    is_mismatch: bool = False
    is_unsupported: bool = False  # it can't do without ranks that have joined

    def spec(self, rank: int) -> TensorSpec:
        spec = self.specs[rank]
        if spec is None:
            raise AssertionError(f"rank {rank} takes no part in use {self.id}")
        return spec

    def contribution(self, rank: int) -> Bytes:
        spec = self.spec(rank)
        start = (self.id * 1136 + rank * 392) % (_POOL_BYTES // 2) // 8 * 8
        return _POOL[spec.dtype][start : start + spec.nbytes]

    def result(self, local_sizes: list[int]) -> bytes:
        """In two stages, as the contract says: over each machine's ranks, then over the machines."""
        spec = next(spec for spec in self.specs if spec is not None)
        if spec.op is Op.BROADCAST:
            return self.contribution(spec.root).tobytes()
        sums = []
        rank = 0
        for size in local_sizes:
            here = [r for r in range(rank, rank + size) if self.specs[r] is not None]
            if here:
                sums.append(combine(spec.op, spec.dtype, [self.contribution(r) for r in here]))
            rank += size
        return combine(spec.op, spec.dtype, sums, spec.divisor(rank)).tobytes()


@dataclass(slots=True)
class Program:
    """``steps``: the uses of each step. ``barriers``: after which steps all ranks meet. ``joins``: how many steps each
    rank goes through before it joins, from one join to the next."""

    steps: list[list[Use]] = field(default_factory=list)
    barriers: set[int] = field(default_factory=set)
    joins: list[list[int]] = field(default_factory=list)

    @classmethod
    def make(cls, rng: random.Random, size: int) -> Program:
        program = cls()
        names = [f"t{i}" for i in range(rng.randint(1, 5))]
        # A name is one group's for good, or until all have joined: ranks outside don't know what they interfere with.
        groups = {name: _make_group(rng, size) for name in names}
        uses = program._add_steps(rng, groups, size, 0)
        for _ in range(rng.choice((0, 0, 1, 2))):
            uses = program._add_uneven(rng, groups, size, uses)
            groups = {name: _make_group(rng, size) for name in names}
        if program.joins:
            program._add_steps(rng, groups, size, uses)
        return program

    def _add_uneven(self, rng: random.Random, groups: dict[str, tuple[int, ...]], size: int, uses: int) -> int:
        """Steps which some ranks go through and others don't, and a join at the end."""
        first = len(self.steps)
        counts = [rng.randint(0, 4) for _ in range(size)]
        self.joins.append([first + count for count in counts])
        names = list(groups)
        known: dict[str, TensorSpec] = {}
        for step in range(max(counts)):
            self.steps.append([])
            for name in rng.sample(names, rng.randint(1, len(names))):
                members = groups[name] or range(size)
                here = [rank for rank in members if counts[rank] > step]
                if not here:
                    continue
                spec = known.get(name)
                if spec is None or rng.random() < 0.25:
                    spec = _make_spec(rng, name, size, groups[name])
                is_unsupported = spec.needs_all and len(here) < len(members)
                if is_unsupported and not spec.nbytes:
                    continue  # its rounds are over where it is handed over
                specs = dict.fromkeys(here, spec)
                self.steps[-1].append(
                    Use(uses, name, tuple(specs.get(r) for r in range(size)), is_unsupported=is_unsupported)
                )
                known[name] = spec
                if is_unsupported:
                    del known[name]
                uses += 1
            if rng.random() < 0.2:
                self.barriers.add(len(self.steps) - 1)
        return uses

    def _add_steps(self, rng: random.Random, groups: dict[str, tuple[int, ...]], size: int, uses: int) -> int:
        """Steps which all go through."""
        names = list(groups)
        known: dict[str, TensorSpec] = {}
        for _ in range(rng.randint(1, 5)):
            chosen = rng.sample(names, rng.randint(1, len(names)))
            self.steps.append([])
            for name in chosen:
                use = _make_use(rng, uses, name, known.pop(name, None), size, groups[name])
                if not use.is_mismatch:
                    known[name] = use.spec((groups[name] or (0,))[0])
                self.steps[-1].append(use)
                uses += 1
            if rng.random() < 0.2:
                self.barriers.add(len(self.steps) - 1)
        return uses


def _make_group(rng: random.Random, size: int) -> tuple[int, ...]:
    """Of most names all ranks."""
    if rng.random() < 0.6:
        return ()
    return tuple(sorted(rng.sample(range(size), rng.randint(1, size))))


def _make_spec(rng: random.Random, name: str, size: int, group: tuple[int, ...]) -> TensorSpec:
    op, dtype, count = rng.choice(_OPS), rng.choice(_DTYPES), rng.choice(_COUNTS)
    shape = (count,) if count % 2 else (2, count // 2)
    root = rng.choice(group or range(size)) if op is Op.BROADCAST else -1
    return TensorSpec(name, dtype, shape, op, op is Op.SUM and rng.random() < 0.3, root, group=group)


def _make_use(
    rng: random.Random,
    number: int,
    name: str,
    known: TensorSpec | None,
    size: int,
    group: tuple[int, ...],
) -> Use:
    members = group or range(size)
    spec = known if known is not None and rng.random() < 0.75 else _make_spec(rng, name, size, group)
    kind = rng.random()
    first = None
    specs = dict.fromkeys(members, spec)
    # An empty tensor's round is over where it is handed over: nobody waits there for those who disagree.
    if kind < 0.12 and len(members) > 1 and (known is None or known.nbytes):
        if kind < 0.04 and len(members) > 2:
            # About the group: one rank leaves others out, but not all that say something else; so neither group is
            # complete, and nobody can go on.
            odd, *others = rng.sample(members, rng.randint(2, len(members) - 1))
            specs[odd] = _make_spec(rng, name, size, tuple(sorted((odd, *others))))
        else:
            for rank in rng.sample(members, rng.randint(1, len(members) - 1)):
                specs[rank] = _make_spec(rng, name, size, group)
    elif kind < 0.2:
        first = _make_spec(rng, name, size, group)
    is_mismatch = len({each.signature() for each in specs.values()}) > 1
    return Use(number, name, tuple(specs.get(rank) for rank in range(size)), first, is_mismatch)
