"""A rank (without torch) that gives NaN and infinity to guarded reductions. Run by tests/jobs/test_nonfinite.py."""

from __future__ import annotations

import os

import numpy as np

from byteps_py import rank_bits
from byteps_py.session import open_session
from byteps_py.tensors import DType, NonFinite, Op, TensorSpec

COUNT = 50_000  # several partitions
session = open_session()
last = session.size - 1
#: What each of these ranks gives somewhere, in each round, and who is to rank_bits.
ROUNDS: list[tuple[dict[int, float], list[int]]] = [
    ({}, []),
    ({last: np.nan}, [last]),
    ({0: np.inf, last: -np.inf}, [0, last]),
    ({}, []),
    (dict.fromkeys(range(session.size), np.nan), list(range(session.size))),
]


def check(name: str, dtype: DType, op: Op, nonfinite: NonFinite = NonFinite.RAISE, average: bool = False) -> None:
    spec = TensorSpec(name, dtype, (COUNT,), op, average=average, nonfinite=nonfinite)
    (slot,) = session.declare([spec])
    for number, (given, guilty) in enumerate(ROUNDS):
        # Seen as bits: numpy does not know bfloat16. Zeros are zeros in every type.
        memory = np.frombuffer(slot.input, np.uint16 if dtype.itemsize == 2 else np.float32)
        memory[:] = 0
        if session.rank in given:
            value = given[session.rank]
            at = (7 + session.rank * COUNT // session.size) % COUNT
            if dtype is DType.BFLOAT16:
                memory[at] = np.float32(value).view(np.uint32) >> 16
            elif dtype is DType.FLOAT16:
                memory[at] = np.float16(value).view(np.uint16)
            else:
                memory[at] = value
        session.hand_over(slot)
        session.wait(slot)
        found = rank_bits.ranks_of(slot.nonfinite_ranks, session.size)
        assert found == (guilty if nonfinite else []), (name, number, found)
        assert not slot.nonfinite_ranks & rank_bits.OVERFLOW, (name, number)


for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16):
    check(f"sum of {dtype.name}", dtype, Op.SUM, average=True)
check("not guarded", DType.FLOAT32, Op.SUM, NonFinite.ALLOW)
(slot,) = session.declare([TensorSpec("overflow", DType.FLOAT32, (4,), nonfinite=NonFinite.SKIP)])
np.frombuffer(slot.input, np.float32)[:] = 3e38
session.hand_over(slot)
session.wait(slot)
assert slot.nonfinite_ranks == rank_bits.OVERFLOW
session.close()
os.write(1, b"all is well\n")
