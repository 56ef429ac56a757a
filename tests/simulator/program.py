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
    """One round of one name. ``specs``: what each rank says it is. ``first``: what each says before that, without
    using it; None if it does not. They disagree if ``is_mismatch``."""

    id: int
    name: str
    specs: tuple[TensorSpec, ...]
    first: TensorSpec | None = None
    is_mismatch: bool = False

    def contribution(self, rank: int) -> Bytes:
        spec = self.specs[rank]
        start = (self.id * 1136 + rank * 392) % (_POOL_BYTES // 2) // 8 * 8
        return _POOL[spec.dtype][start : start + spec.nbytes]

    def result(self, local_sizes: list[int]) -> bytes:
        """In two stages, as the contract says: over each machine's ranks, then over the machines."""
        spec = self.specs[0]
        if spec.op is Op.BROADCAST:
            return self.contribution(spec.root).tobytes()
        sums = []
        rank = 0
        for size in local_sizes:
            sums.append(combine(spec.op, spec.dtype, [self.contribution(r) for r in range(rank, rank + size)]))
            rank += size
        return combine(spec.op, spec.dtype, sums, spec.divisor(rank)).tobytes()


@dataclass(slots=True)
class Program:
    """``steps``: the uses of each step. ``barriers``: after which steps all ranks meet."""

    steps: list[list[Use]] = field(default_factory=list)
    barriers: set[int] = field(default_factory=set)

    @classmethod
    def make(cls, rng: random.Random, size: int) -> Program:
        program = cls()
        names = [f"t{i}" for i in range(rng.randint(1, 5))]
        known: dict[str, TensorSpec] = {}
        uses = 0
        for step in range(rng.randint(1, 5)):
            chosen = rng.sample(names, rng.randint(1, len(names)))
            program.steps.append([])
            for name in chosen:
                use = _make_use(rng, uses, name, known.pop(name, None), size)
                if not use.is_mismatch:
                    known[name] = use.specs[0]
                program.steps[-1].append(use)
                uses += 1
            if rng.random() < 0.2:
                program.barriers.add(step)
        return program


def _make_spec(rng: random.Random, name: str, size: int) -> TensorSpec:
    op, dtype, count = rng.choice(_OPS), rng.choice(_DTYPES), rng.choice(_COUNTS)
    shape = (count,) if count % 2 else (2, count // 2)
    root = rng.randrange(size) if op is Op.BROADCAST else -1
    return TensorSpec(name, dtype, shape, op, op is Op.SUM and rng.random() < 0.3, root)


def _make_use(rng: random.Random, number: int, name: str, known: TensorSpec | None, size: int) -> Use:
    spec = known if known is not None and rng.random() < 0.75 else _make_spec(rng, name, size)
    kind = rng.random()
    first = None
    specs = [spec] * size
    # An empty tensor's round is over where it is handed over: nobody waits there for those who disagree.
    if kind < 0.12 and size > 1 and (known is None or known.nbytes):
        for rank in rng.sample(range(size), rng.randint(1, size - 1)):
            specs[rank] = _make_spec(rng, name, size)
    elif kind < 0.2:
        first = _make_spec(rng, name, size)
    is_mismatch = len({each.signature() for each in specs}) > 1
    return Use(number, name, tuple(specs), first, is_mismatch)
