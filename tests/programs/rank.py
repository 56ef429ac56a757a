"""A rank without torch that does what one word says, for tests of failures: ``python rank.py WORD [ODD]``.

It says where it stands, so that a test can act at that moment; every line begins with the rank. An error of ours
is said with its type and ends the program with status 3. ODD: the rank that does something else than the others,
by default the last.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import sys
from collections.abc import Callable

from byteps_py.errors import BytePSError, MismatchError
from byteps_py.session import Session, Slot, open_session
from byteps_py.tensors import DType, Op, TensorSpec

ERROR_STATUS = 3


class Rank:
    """A session, and the steps that scenarios are made of."""

    def __init__(self) -> None:
        self.label = f"{os.environ.get('DMLC_WORKER_ID', '0')}.{os.environ.get('BYTEPS_LOCAL_RANK', '0')}"
        self.session: Session

    def open(self) -> None:
        self.session = open_session()
        self.number, self.size = self.session.rank, self.session.size
        self.label = str(self.number)
        self.odd = int(sys.argv[2]) if len(sys.argv) > 2 else self.size - 1
        self.is_odd = self.number == self.odd

    def say(self, text: str) -> None:
        os.write(1, f"{self.label}: {text}\n".encode())  # in one piece: others write, too

    def begin(self, name: str, count: int = 4, dtype: DType = DType.INT64, **how: object) -> Slot:
        """Hand over ``count`` times the rank's number, counted from 1."""
        slot = self.session.declare([TensorSpec(name, dtype, (count,), **how)])[0]  # type: ignore[arg-type]
        if dtype is DType.INT64:
            slot.input[:] = struct.pack("q", self.number + 1) * count
        self.session.hand_over(slot)
        return slot

    def finish(self, slot: Slot) -> None:
        """Wait for a sum, and check it."""
        self.session.wait(slot)
        expected = struct.pack("q", self.size * (self.size + 1) // 2) * slot.spec.shape[0]
        if bytes(slot.result) != expected:
            sys.exit(f"{self.label}: wrong sum of {slot.spec.name!r}")

    def reduce(self, name: str = "gradient", count: int = 4) -> None:
        self.finish(self.begin(name, count))


def train(rank: Rank) -> None:
    """Reduce for ever."""
    rank.open()
    rank.reduce()
    rank.say("training")
    while True:
        rank.reduce()


def stubborn(rank: Rank) -> None:
    """The same, and only an error ends it: the launcher's request to stop does not."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    train(rank)


def told(rank: Rank) -> None:
    """Reduce until the end of rank 0's input tells all to stop."""
    rank.open()
    slot = rank.session.declare([TensorSpec("stop", DType.INT64, (1,))])[0]
    is_over = False
    while not is_over:
        is_told = rank.number == 0 and slot.round and select.select([0], [], [], 0)[0]
        slot.input[:] = struct.pack("q", bool(is_told))
        rank.session.hand_over(slot)
        rank.session.wait(slot)
        is_over = bytes(slot.result) != bytes(8)
        rank.reduce()
        if slot.round == 1:
            rank.say("training")
    rank.session.close()
    rank.say("closed")


def declares(rank: Rank) -> None:
    """In every step a new tensor, one that all know, and a barrier, until the end of rank 0's input."""
    rank.open()
    stop = rank.session.declare([TensorSpec("stop", DType.INT64, (1,))])[0]
    is_over = False
    while not is_over:
        is_told = rank.number == 0 and stop.round and select.select([0], [], [], 0)[0]
        stop.input[:] = struct.pack("q", bool(is_told))
        rank.session.hand_over(stop)
        rank.reduce(f"new in step {stop.round}")
        rank.reduce()
        rank.session.barrier()
        rank.session.wait(stop)
        is_over = bytes(stop.result) != bytes(8)
        rank.say(f"step {stop.round}")
    rank.session.close()
    rank.say("closed")


def short(rank: Rank) -> None:
    rank.open()
    rank.reduce()
    rank.say("reduced")
    rank.session.close()


def disagree(rank: Rank) -> None:
    """The odd rank differs in one thing at a time; each name is used again at once, and others are in flight."""
    rank.open()
    base = {"count": 4, "dtype": DType.INT64}
    cases: dict[str, dict[str, object]] = {
        "shape": {"count": 5},
        "dtype": {"dtype": DType.FLOAT64},
        "op": {"op": Op.MAX},
        "average": {"average": True},
        "root": {"op": Op.BROADCAST, "root": 1},
    }
    rank.reduce("known")
    for what, change in cases.items():
        common = {**base, "op": Op.BROADCAST, "root": 0} if what == "root" else base
        before, steady = rank.begin(f"before {what}", 1 << 18), rank.begin("known")
        bad = rank.begin("w", **{**common, **(change if rank.is_odd else {})})  # type: ignore[arg-type]
        after = rank.begin(f"after {what}", 1 << 18)
        try:
            rank.session.wait(bad)
            rank.say(f"{what}: no error")
        except MismatchError as error:
            rank.say(f"{what}: {error}")
        for slot in (before, steady, after):
            rank.finish(slot)
        rank.reduce("w")  # the name is usable, with a spec all agree on
    for change in ({}, {"count": 5}):  # an agreed tensor, declared anew by one rank only
        with contextlib.suppress(MismatchError):
            rank.session.wait(rank.begin("w", **(change if rank.is_odd else {})))  # type: ignore[arg-type]
            continue
        rank.say("again: MismatchError")
    rank.reduce("w")
    rank.say("all sums are right")
    rank.session.close()


def dies(rank: Rank) -> None:
    """The odd rank is killed after it has handed over a part of a tensor."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank.open()
    rank.reduce("big", 1 << 20)
    if rank.is_odd:
        slot = rank.session.declare([TensorSpec("big", DType.INT64, (1 << 20,))])[0]
        rank.session.hand_over(slot, 4 << 20)
        os.kill(os.getpid(), signal.SIGKILL)
    rank.reduce("big", 1 << 20)


def dies_once(rank: Rank) -> None:
    """The odd rank is killed, unless torchrun has started it again."""
    rank.open()
    rank.reduce()
    if rank.is_odd and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    rank.reduce()
    rank.say("reduced")
    rank.session.close()


def leaves(rank: Rank) -> None:
    """The odd rank is done earlier than the others."""
    rank.open()
    rank.reduce()
    if rank.is_odd:
        rank.session.close()
    else:
        rank.reduce()


def skips(rank: Rank) -> None:
    """The same, with a barrier."""
    rank.open()
    rank.reduce()
    if rank.is_odd:
        rank.session.close()
    else:
        rank.session.barrier()


def absent(rank: Rank) -> None:
    """The odd rank comes to a tensor only when the end of its input tells it to."""
    rank.open()
    rank.reduce()
    rank.say("reduced")
    if rank.is_odd:
        sys.stdin.read()
    rank.reduce("late")
    rank.say("late is reduced")
    rank.session.close()


def repeat(rank: Rank) -> None:
    """Come and go so many times."""
    for turn in range(int(sys.argv[2])):
        rank.open()
        rank.reduce(f"turn {turn}")
        rank.reduce("every turn", 2 + turn)
        rank.session.close()
    rank.say(f"{turn + 1} turns")


SCENARIOS: dict[str, Callable[[Rank], None]] = {
    scenario.__name__: scenario
    for scenario in (train, stubborn, told, declares, short, disagree, dies, dies_once, leaves, skips, absent, repeat)
}


def main() -> None:
    rank = Rank()
    try:
        SCENARIOS[sys.argv[1]](rank)
    except BytePSError as error:
        rank.say(f"{type(error).__name__}: {error}")
        sys.exit(ERROR_STATUS)


if __name__ == "__main__":
    main()
