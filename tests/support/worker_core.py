"""Slots and tensors for tests of the communication service's pure core. Addresses are numbers, never touched."""

from __future__ import annotations

import itertools

from byteps_py.system.shm import Block
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.worker.core.tensor import RankSlot, Tensor

_ids = itertools.count(1)


def spec(count: int = 4, name: str = "w", op: Op = Op.SUM, average: bool = False, root: int = -1) -> TensorSpec:
    return TensorSpec(name, DType.FLOAT32, (count,), op, average, root)


def block(address: int, nbytes: int = 4096) -> Block:
    return Block(0, address, nbytes, address)


def slot(local_rank: int, what: TensorSpec | None = None, inputs: int = 1) -> RankSlot:
    """Its inputs lie at 1000, 2000, … times the rank + 1; its result where its input does, if it has one only."""
    bases = tuple(block((local_rank + 1) * 10_000 + i * 1_000) for i in range(inputs))
    result = bases[0] if inputs == 1 else block((local_rank + 1) * 10_000 + 5_000)
    return RankSlot(next(_ids), local_rank, what or spec(), bases, result)


def tensor(slots: list[RankSlot], contributions: bool = False, generation: int = 1) -> Tensor:
    """An agreed one. With ``contributions`` the machine's sums lie at 100_000 (even rounds) and 200_000 (odd ones)."""
    made = Tensor(slots[0].spec.name, generation, slots[0].spec, tuple(slots))
    if contributions:
        made.contributions = (block(100_000), block(200_000))
    for each in slots:
        each.tensor = made
    return made
