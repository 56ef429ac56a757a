"""Who is to blame, as one machine's communication service sees it. Pure but for the kernels."""

from __future__ import annotations

import numpy as np
import pytest

from byteps_py import kernels
from byteps_py.rank_bits import OVERFLOW, of_rank
from byteps_py.system.shm import Block
from byteps_py.tensors import DType, NonFinite, Op, TensorSpec
from byteps_py.worker.core.tensor import Compute, Part, RankSlot, Tensor
from byteps_py.worker.io.nonfinite_guard import NonFiniteGuard

FIRST, SIZE, COUNT = 4, 8, 1000  # this machine has ranks 4, 5 and 6
SPEC = TensorSpec("w", DType.FLOAT32, (COUNT,), nonfinite=NonFinite.RAISE)
BLOCK = Block(0, 0, 0, SPEC.nbytes)


def tensor(machines: int, contributions: tuple[Block, ...]) -> Tensor:
    slots = tuple(RankSlot(i + 1, i, SPEC, (BLOCK,), BLOCK) for i in range(3))
    made = Tensor("w", 1, SPEC, slots, contributions, machines=machines)
    made.parts = [Part(made, 0, 0, SPEC.nbytes, 7)]
    return made


def give(guard: NonFiniteGuard, part: Part, *values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Each local rank has its value somewhere, and ones elsewhere. The machine's sum."""
    arrays = [np.ones(COUNT, np.float32) for _ in values]
    for i, value in enumerate(values):
        arrays[i][300 * i] = value
    total = np.empty(COUNT, np.float32)
    inputs = tuple(array.ctypes.data for array in arrays)
    compute = Compute(part, Op.SUM, inputs, (total.ctypes.data,), 1)
    guard.reduce(kernels, compute)
    guard.note(compute)
    assert compute.report is None
    return total


def test_alone_the_round_knows_who_it_was() -> None:
    guard, alone = NonFiniteGuard(FIRST, SIZE), tensor(1, ())
    assert give(guard, alone.parts[0], 1.0, 2.0, 3.0).sum() == pytest.approx(3 * COUNT + 3)
    assert alone.blame == 0
    give(guard, alone.parts[0], np.nan, 2.0, np.inf)
    assert alone.blame == of_rank(4, SIZE) | of_rank(6, SIZE)
    give(guard, alone.parts[0], 1.0, -np.inf, 1.0)  # another partition of the same round, say
    assert alone.blame == of_rank(4, SIZE) | of_rank(5, SIZE) | of_rank(6, SIZE)


def test_a_contribution_keeps_its_blame_until_the_next_round_is_complete() -> None:
    """It may have to be given once more, while the next round's is under way."""
    guard, shared = NonFiniteGuard(FIRST, SIZE), tensor(0, (BLOCK, BLOCK))
    part = shared.parts[0]
    give(guard, part, 1.0, np.nan, 1.0)
    shared.round = 2
    give(guard, part, 1.0, 1.0, 1.0)
    assert guard.of_push(part, 1) == of_rank(5, SIZE)
    assert guard.of_push(part, 2) == OVERFLOW  # finite here, so what it becomes there is nobody's
    shared.round = 3
    give(guard, part, 1.0, 1.0, np.inf)
    assert (guard.of_push(part, 2), guard.of_push(part, 3)) == (OVERFLOW, of_rank(6, SIZE))
    assert shared.blame == 0  # the server says


def test_one_rank_here_can_only_be_itself() -> None:
    single = tensor(0, ())
    assert NonFiniteGuard(FIRST, SIZE).of_push(single.parts[0], 1) == of_rank(4, SIZE)
