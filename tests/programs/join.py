"""A rank (without torch) with uneven data: two epochs, each ended by join(). Run by test_join.py under bpslaunch.

Every result is compared, bit for bit, with the one that this process computes by itself.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from byteps_py.errors import BytePSError, UsageError
from byteps_py.session import Session, Slot, open_session
from byteps_py.tensors import DType, Layout, Op, TensorSpec

LOCAL_SIZE = int(os.environ["BYTEPS_LOCAL_SIZE"])
COUNT = 40_000
#: Steps of each rank, by epoch; who joins last is known, for it alone has data for so long.
EPOCHS = ({0: 2, 1: 5, 2: 0, 3: 1}, {0: 4, 1: 0, 2: 1, 3: 6})
_COMBINE = {Op.SUM: np.add, Op.MIN: np.minimum, Op.MAX: np.maximum, Op.PRODUCT: np.multiply}


def given(rank: int, salt: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(1000 * salt + rank).standard_normal(COUNT).astype(np.float32)


def expected(spec: TensorSpec, salt: int, there: list[int], size: int) -> npt.NDArray[np.float32]:
    """Over those who are there, in two stages; an average is over all, as if the others had given zeros."""
    sums: dict[int, npt.NDArray[np.float32]] = {}
    for rank in there:
        machine, values = rank // LOCAL_SIZE, given(rank, salt)
        sums[machine] = _COMBINE[spec.op](sums[machine], values) if machine in sums else values
    first, *rest = sums.values()
    for each in rest:
        first = _COMBINE[spec.op](first, each)
    return first / np.float32(len(spec.members(size))) if spec.average else first


def specs(size: int) -> list[TensorSpec]:
    groups: list[tuple[int, ...]] = [(), (0, 1), (1, 3) if size > 2 else (0,), (0, 1, 3) if size > 2 else (1,)]
    made = []
    for group in groups:
        made += [TensorSpec(f"{op.name} of {group}", DType.FLOAT32, (COUNT,), op, group=group) for op in _COMBINE]
        made.append(TensorSpec(f"average of {group}", DType.FLOAT32, (COUNT,), average=True, group=group))
    return made


def step(session: Session, number: int, there: list[int], names: list[TensorSpec]) -> None:
    mine = [(i, spec) for i, spec in enumerate(names) if session.rank in spec.members(session.size)]
    slots = session.declare([spec for _, spec in mine])
    for (i, _), slot in zip(mine, slots, strict=True):
        np.frombuffer(slot.input, np.float32)[:] = given(session.rank, 100 * number + i)
        session.hand_over(slot)
    for (i, spec), slot in zip(mine, slots, strict=True):
        session.wait(slot, 60)
        members = [rank for rank in there if rank in spec.members(session.size)]
        wanted = expected(spec, 100 * number + i, members, session.size)
        np.testing.assert_array_equal(np.frombuffer(slot.result, np.float32), wanted, f"{spec.name}, step {number}")


def error_of(session: Session, slot: Slot, layout: Layout | None = None) -> str:
    try:
        session.hand_over(slot, layout=layout)
        session.wait(slot, 60)
    except UsageError as error:
        return str(error)
    return ""


def can_not_go_on(session: Session, *known: Slot) -> None:
    """What needs every rank fails for those who still have data, whether it was agreed before or not."""
    gather = TensorSpec("late gather", DType.UINT8, (8, 8 * session.size), Op.GATHER)
    layout = Layout(((0, 8),), tuple((8 * i, 8) for i in range(session.size)))
    new = TensorSpec("late broadcast", DType.FLOAT32, (COUNT,), Op.BROADCAST, root=session.rank)
    scattered = TensorSpec("late scattered sum", DType.FLOAT32, (COUNT,), scatters=True)
    for spec in (*(slot.spec for slot in known), new, gather, scattered):
        error = error_of(session, session.declare([spec])[0], layout if spec is gather else None)
        assert error.startswith(f"tensor {spec.name!r}: {spec.describe()} is not supported while rank"), error


def everybody(session: Session, salt: int) -> tuple[Slot, Slot]:
    """All ranks are there: a broadcast, a gather, a scattered sum work. Returns the slots of the first and the last."""
    spec = TensorSpec("weights", DType.FLOAT32, (COUNT,), Op.BROADCAST, root=0)
    gather = TensorSpec("words", DType.UINT8, (8, 8 * session.size), Op.GATHER)
    scattered = TensorSpec("shares", DType.FLOAT32, (COUNT,), scatters=True)
    slot, words, shares = session.declare([spec, gather, scattered])
    np.frombuffer(shares.input, np.float32)[:] = given(session.rank, salt)
    session.hand_over(shares)
    np.frombuffer(slot.input, np.float32)[:] = given(session.rank, salt)
    session.hand_over(slot)
    words.input[:] = bytes([session.rank]) * 8
    session.hand_over(words, layout=Layout(((0, 8),), tuple((8 * i, 8) for i in range(session.size))))
    session.wait(slot, 60)
    session.wait(words, 60)
    np.testing.assert_array_equal(np.frombuffer(slot.result, np.float32), given(0, salt))
    assert bytes(words.result) == b"".join(bytes([rank]) * 8 for rank in range(session.size))
    session.wait(shares, 60)
    first, count = scattered.piece(session.rank, session.size)
    whole = expected(scattered, salt, list(range(session.size)), session.size)
    np.testing.assert_array_equal(np.frombuffer(shares.result, np.float32), whole[first : first + count])
    return slot, shares


def main() -> None:
    session = open_session()
    try:
        for epoch, steps in enumerate(EPOCHS):
            counts = [steps[rank] for rank in range(session.size)]
            known = everybody(session, 7 + epoch)
            names = specs(session.size)
            for number in range(counts[session.rank]):
                there = [rank for rank in range(session.size) if counts[rank] > number]
                step(session, 100 * epoch + number, there, names)
                if len(there) == 1:
                    session.barrier(60)  # of those who are left
                    can_not_go_on(session, *known)
            last = session.join(60)
            assert last == counts.index(max(counts)), last
        everybody(session, 9)
        step(session, 999, list(range(session.size)), specs(session.size))
        session.barrier(60)
    except (AssertionError, BytePSError) as error:
        os.write(1, f"rank {session.rank} failed: {error!r}\n".encode())
        raise
    os.write(1, f"rank {session.rank} is done\n".encode())
    session.close()


if __name__ == "__main__":
    main()
