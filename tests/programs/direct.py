"""Gathers and exchanges of random sizes among random groups, many in flight; each rank knows what must come out."""

from __future__ import annotations

import random
import sys

import numpy as np

from byteps_py.session import Session, Slot, open_session
from byteps_py.tensors import DType, Layout, Op, TensorSpec

WAIT_S = 60.0
SIZES = (0, 0, 1, 7, 100, 5000, 70_000, 300_000)


def piece(source: int, target: int, index: int, nbytes: int) -> bytes:
    """What ``source`` has for ``target`` (for all: -1) in operation ``index``."""
    return np.random.default_rng((source, target + 1, index)).bytes(nbytes)


def lay(sizes: list[int]) -> tuple[tuple[int, int], ...]:
    offsets = np.cumsum([0, *sizes[:-1]]).tolist()
    return tuple(zip(offsets, sizes, strict=True))


class Operation:
    """One round of one name, as every rank draws it from the same random numbers."""

    def __init__(self, index: int, size: int, draw: random.Random) -> None:
        self.index = index
        members = sorted(draw.sample(range(size), draw.randint(1, size)))
        self.group = members
        self.op = draw.choice((Op.GATHER, Op.EXCHANGE))
        sends = 1 if self.op is Op.GATHER else len(members)
        self.matrix = [[draw.choice(SIZES) for _ in range(sends)] for _ in members]
        self.name = f"{self.op.name}.{members}.{draw.randint(0, 1)}"

    def start(self, session: Session) -> Slot:
        me = self.group.index(session.rank)
        sends = self.matrix[me]
        receives = [row[0 if self.op is Op.GATHER else me] for row in self.matrix]
        spec = TensorSpec(self.name, DType.UINT8, (sum(sends), sum(receives)), self.op, group=tuple(self.group))
        (slot,) = session.declare([spec])
        targets = [-1] if self.op is Op.GATHER else self.group
        data = b"".join(piece(session.rank, t, self.index, n) for t, n in zip(targets, sends, strict=True))
        slot.input[: len(data)] = data
        session.hand_over(slot, layout=Layout(lay(sends), lay(receives)))
        return slot

    def check(self, session: Session, slot: Slot) -> None:
        session.wait(slot, WAIT_S)
        me = self.group.index(session.rank)
        target = -1 if self.op is Op.GATHER else session.rank
        column = 0 if self.op is Op.GATHER else me
        expected = b"".join(
            piece(s, target, self.index, row[column]) for s, row in zip(self.group, self.matrix, strict=True)
        )
        if bytes(slot.result[: len(expected)]) != expected:
            raise SystemExit(f"rank {session.rank}: wrong result of {self.name}, operation {self.index}")


def main(count: int, seed: int) -> None:
    session = open_session()
    draw = random.Random(seed)
    mine = random.Random(session.rank)  # how far ahead this rank goes
    pending: dict[str, tuple[Operation, Slot]] = {}
    done = 0
    for index in range(count):
        operation = Operation(index, session.size, draw)
        if session.rank not in operation.group:
            continue
        if (earlier := pending.pop(operation.name, None)) is not None:
            earlier[0].check(session, earlier[1])
        pending[operation.name] = (operation, operation.start(session))
        done += 1
        while len(pending) > mine.randint(0, 6):
            name = next(iter(pending))
            first, slot = pending.pop(name)
            first.check(session, slot)
    for first, slot in pending.values():
        first.check(session, slot)
    session.barrier(WAIT_S)
    session.close()
    print(f"rank {session.rank}: {done} operations")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
