"""One round of one name: who takes part, what each gives, and what must come out."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from byteps_py.tensors import DType, Op, TensorSpec

from .codecs import Floats, coded, decoded, from_floats, to_floats
from .memory import Bytes, combine
from .pieces import Pieces

DTYPES = (DType.FLOAT32, DType.FLOAT32, DType.FLOAT16, DType.FLOAT64, DType.INT8, DType.INT32, DType.INT64)
_POOL_BYTES = 1 << 14


def _make_pool() -> dict[DType, Bytes]:
    """Values of many magnitudes, so that another order of adding gives other bits."""
    generator = np.random.default_rng(4)
    floats = generator.standard_normal(_POOL_BYTES) * np.exp2(generator.integers(-5, 6, _POOL_BYTES))
    integers = generator.integers(-(1 << 62), 1 << 62, _POOL_BYTES)
    return {
        dtype: (floats if dtype.is_floating else integers).astype(dtype.name.lower()).view(np.uint8)
        for dtype in (*dict.fromkeys(DTYPES), DType.UINT8)
    }


_POOL = _make_pool()


def values(dtype: DType, start: int, nbytes: int) -> Bytes:
    """Some of the pool, the same for the same ``start``."""
    start = start % (_POOL_BYTES // 2) // 8 * 8
    return _POOL[dtype][start : start + nbytes]


def are_on_one_machine(ranks: Sequence[int], local_sizes: list[int]) -> bool:
    ends = list(itertools.accumulate(local_sizes))
    return len({bisect.bisect(ends, rank) for rank in ranks}) == 1


def _coded_sum(spec: TensorSpec, machines: list[list[Bytes]], divisor: int, members: int) -> Bytes:
    """Each machine codes the sum of its ranks; a server codes the sum of these, unless there is only one. Pieces are
    coded one by one, and their sums are not."""
    if spec.scatters:
        parts = [[to_floats(spec.dtype, each) for each in here] for here in machines]
        return np.concatenate([_coded_piece(spec, parts, divisor, at, members) for at in range(members)])
    given = [coded([to_floats(spec.dtype, each) for each in here]) for here in machines]
    answer = coded([decoded(each) for each in given]) if len(given) > 1 else given[0]
    return from_floats(spec.dtype, decoded(answer)[: spec.count], divisor)


def _coded_piece(spec: TensorSpec, machines: list[list[Floats]], divisor: int, position: int, members: int) -> Bytes:
    first, count = spec.piece(position, members)
    if not count:
        return np.empty(0, np.uint8)
    codes = [decoded(coded([each[first : first + count] for each in here]))[:count] for here in machines]
    total = codes[0].copy()
    for each in codes[1:]:
        total += each
    return from_floats(spec.dtype, total, divisor)


@dataclass(frozen=True, slots=True)
class Use:
    """``specs``: what each rank says it is; None if it does not take part. ``first``: what each says before that,
    without using it; None if it does not. They disagree if ``is_mismatch``. ``pieces``: of a gather or an exchange."""

    id: int
    name: str
    specs: tuple[TensorSpec | None, ...]
    first: TensorSpec | None = None
    is_mismatch: bool = False
    is_unsupported: bool = False  # it can't do without ranks that have joined
    pieces: Pieces | None = None

    def spec(self, rank: int) -> TensorSpec:
        spec = self.specs[rank]
        if spec is None:
            raise AssertionError(f"rank {rank} takes no part in use {self.id}")
        return spec

    def position(self, rank: int) -> int:
        return self.spec(rank).members(len(self.specs)).index(rank)

    def contribution(self, rank: int) -> Bytes:
        spec = self.spec(rank)
        return values(spec.dtype, self.id * 1136 + rank * 392, spec.nbytes)

    def combined(self, local_sizes: list[int]) -> bytes:
        """In two stages, as the contract says: over each machine's ranks, then over the machines."""
        spec = next(spec for spec in self.specs if spec is not None)
        if spec.op is Op.BROADCAST:
            return self.contribution(spec.root).tobytes()
        machines = []
        rank = 0
        for size in local_sizes:
            here = [r for r in range(rank, rank + size) if self.specs[r] is not None]
            if here:
                machines.append([self.contribution(r) for r in here])
            rank += size
        # An average divides by the number of all ranks of its group (none named: of the job), those that have joined
        # included, as if they had given zeros (docs/internals/protocol.md, Uneven data). The spec is not asked: its
        # answer is under test.
        divisor = (len(spec.group) if spec.group else rank) if spec.average else 1
        # A machine whose ranks are the whole group sends nothing, so nothing is coded.
        if spec.codec is not None and not are_on_one_machine(spec.group or range(rank), local_sizes):
            return _coded_sum(spec, machines, divisor, len(spec.members(rank))).tobytes()
        sums = [combine(spec.op, spec.dtype, here) for here in machines]
        return combine(spec.op, spec.dtype, sums, divisor).tobytes()

    def share(self, rank: int, combined: bytes) -> bytes:
        """What ``rank`` gets of a reduction's result."""
        spec = self.spec(rank)
        if not spec.scatters:
            return combined
        members = len(spec.members(len(self.specs)))
        first, count = spec.piece(self.position(rank), members)
        return combined[first * spec.dtype.itemsize : (first + count) * spec.dtype.itemsize]

    def gathered(self, rank: int) -> list[tuple[int, bytes]]:
        """(offset, bytes) that ``rank`` gets of a gather or an exchange."""
        if self.pieces is None:
            raise AssertionError(f"use {self.id} combines")
        members = self.spec(rank).members(len(self.specs))
        given = [self.contribution(r).tobytes() if self.specs[r] is not None else b"" for r in members]
        return self.pieces.result(self.position(rank), given)
