"""Scattered reductions beside whole ones of the same values: each rank's piece must have the same bits."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np

from byteps_py.session import Session, open_session
from byteps_py.tensors import DType, Op, TensorSpec

WAIT_S = 60.0
SHAPES = [(1,), (2,), (5, 3), (7,), (0, 4), (1001, 70)]
OPS = [(Op.SUM, False), (Op.SUM, True), (Op.MIN, False), (Op.MAX, False), (Op.PRODUCT, False)]
DTYPES = [DType.FLOAT32, DType.FLOAT64, DType.INT32]


def specs() -> list[TensorSpec]:
    return [
        TensorSpec(f"{op.name}{average}.{dtype.name}.{shape}", dtype, shape, op, average)
        for shape in SHAPES
        for op, average in OPS
        for dtype in DTYPES
    ]


def check(session: Session, spec: TensorSpec, round_: int) -> None:
    part = dataclasses.replace(spec, name=f"{spec.name}.scattered", scatters=True)
    slots = session.declare([spec, part])
    generator = np.random.default_rng((session.rank, round_, len(spec.name)))
    values = (generator.standard_normal(spec.count) * 3).astype(spec.dtype.name.lower())
    for slot in slots:
        np.frombuffer(slot.input, values.dtype)[:] = values
        session.hand_over(slot)
    for slot in slots:
        session.wait(slot, WAIT_S)
    first, count = spec.piece(session.rank, session.size)
    itemsize = spec.dtype.itemsize
    whole = bytes(slots[0].result[first * itemsize : (first + count) * itemsize])
    if bytes(slots[1].result) != whole:
        raise SystemExit(f"rank {session.rank}: another piece of {spec.describe()}, round {round_}")


def main() -> None:
    session = open_session()
    for round_ in range(int(sys.argv[1])):
        for spec in specs():
            check(session, spec, round_)
    session.barrier(WAIT_S)
    session.close()
    print(f"rank {session.rank}: all equal")


if __name__ == "__main__":
    main()
