"""A rank of 2 machines with 2 ranks each (without torch) that reduces and broadcasts among groups.

Run by test_groups.py under bpslaunch. Every result is compared, bit for bit, with the one that this process
computes by itself.
"""

from __future__ import annotations

import os
import random

import numpy as np
import numpy.typing as npt

from byteps_py.errors import BytePSError, MismatchError, UsageError
from byteps_py.session import Session, Slot, open_session
from byteps_py.tensors import DType, Op, TensorSpec

GROUPS = [(0, 1), (1, 2), (0, 3), (0, 1, 3), (2,), (0, 1, 2, 3), ()]
LOCAL_SIZE = 2
COUNT = 50_000  # several partitions
ROUNDS = 3
OPS = (Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT)
Values = npt.NDArray[np.float32]
_COMBINE = {Op.SUM: np.add, Op.MIN: np.minimum, Op.MAX: np.maximum, Op.PRODUCT: np.multiply}


def given(rank: int, salt: int, count: int = COUNT) -> Values:
    return np.random.default_rng(1000 * salt + rank).standard_normal(count).astype(np.float32)


def expected(spec: TensorSpec, salt: int, size: int) -> Values:
    """In two stages, as the contract says: over each machine's ranks of the group, then over the machines."""
    members = spec.members(size)
    if spec.op is Op.BROADCAST:
        return given(spec.root, salt, spec.count)
    sums: dict[int, Values] = {}
    for rank in members:
        machine, values = rank // LOCAL_SIZE, given(rank, salt, spec.count)
        sums[machine] = _COMBINE[spec.op](sums[machine], values) if machine in sums else values
    first, *rest = sums.values()
    for each in rest:
        first = _COMBINE[spec.op](first, each)
    return first / np.float32(len(members)) if spec.average else first


def specs() -> list[TensorSpec]:
    made = []
    for group in GROUPS:
        name = "-".join(map(str, group)) or "all"
        made += [TensorSpec(f"{op.name} {name}", DType.FLOAT32, (COUNT,), op, group=group) for op in OPS]
        made.append(TensorSpec(f"average {name}", DType.FLOAT32, (COUNT,), average=True, group=group))
        root = (group or (0, 3))[-1]
        made.append(TensorSpec(f"from {root} {name}", DType.FLOAT32, (COUNT,), Op.BROADCAST, root=root, group=group))
        made.append(TensorSpec(f"nothing {name}", DType.FLOAT32, (0,), group=group))
    return made


def give(session: Session, slot: Slot, salt: int) -> None:
    if slot.spec.nbytes:
        np.frombuffer(slot.input, np.float32)[:] = given(session.rank, salt, slot.spec.count)
    session.hand_over(slot)


def check(session: Session, slot: Slot, salt: int) -> None:
    session.wait(slot, 60)
    if slot.spec.nbytes:
        result = np.frombuffer(slot.result, np.float32)
        np.testing.assert_array_equal(result, expected(slot.spec, salt, session.size), slot.spec.name, strict=True)


def reduce_among_groups(session: Session) -> None:
    """All groups at the same time, each rank in an order of its own."""
    order = random.Random(session.rank)
    numbered = [each for each in enumerate(specs()) if session.rank in each[1].members(session.size)]
    for round_ in range(ROUNDS):
        order.shuffle(numbered)
        slots = session.declare([spec for _, spec in numbered])
        for (salt, _), slot in zip(numbered, slots, strict=True):
            give(session, slot, 100 * round_ + salt)
        for (salt, _), slot in zip(numbered, slots, strict=True):
            check(session, slot, 100 * round_ + salt)


def error_of(session: Session, group: tuple[int, ...], name: str, count: int = 4) -> str:
    """What comes of a sum that this rank believes to be ``group``'s."""
    try:
        (slot,) = session.declare([TensorSpec(name, DType.FLOAT32, (count,), group=group)])
        session.hand_over(slot)
        session.wait(slot, 60)
    except (MismatchError, UsageError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def disagree(session: Session) -> None:
    """Each ends in an error, on every rank that is named, and the name can be used again."""
    for number, views in enumerate(
        [
            {0: (0, 1, 2), 1: (0, 1), 2: (0, 1, 2)},
            {0: (), 1: (0, 1), 2: (), 3: ()},  # on one machine
            {0: (), 1: (), 2: (), 3: (1, 2, 3)},
        ]
    ):
        name = f"disputed {number}"
        for _ in range(2):
            if session.rank in views:
                error = error_of(session, views[session.rank], name)
                assert error.startswith(f"MismatchError: tensor '{name}': "), error
                assert "gave sum of float32[4]" in error, error
                assert "name the same group" in error, error
        session.barrier(60)
        if session.rank in views:
            (slot,) = session.declare([TensorSpec(name, DType.FLOAT32, (COUNT,), group=tuple(views))])
            give(session, slot, number)
            check(session, slot, number)
    outsider = {0: (1, 2), 1: (0,), 2: (3,), 3: (0, 1, 2)}[session.rank]
    error = error_of(session, outsider, "not mine")
    assert error.startswith("UsageError: tensor 'not mine': "), error
    assert f"rank {session.rank} is not in its group {list(outsider)}" in error, error
    error = error_of(session, (session.rank, 4), "of nobody")
    assert "rank 4 does not exist, ranks go from 0 to 3" in error, error


def main() -> None:
    session = open_session()
    try:
        reduce_among_groups(session)
        disagree(session)
        reduce_among_groups(session)
        session.barrier(60)
    except (AssertionError, BytePSError) as error:
        os.write(1, f"rank {session.rank} failed: {error!r}\n".encode())
        raise
    os.write(1, f"rank {session.rank} is done\n".encode())
    session.close()


if __name__ == "__main__":
    main()
