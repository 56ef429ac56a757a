"""A rank without torch that does what one word says, for tests of failures: ``python rank.py WORD [ODD]``.

It says where it stands, so that a test can act at that moment; every line begins with the rank. An error of ours
is said with its type and ends the program with status 3. ODD: the rank that does something else than the others,
by default the last.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

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


def straggles(rank: Rank) -> None:
    """The same, but the odd rank takes ten times as long from step to step."""
    told(rank, count=1 << 18, usual_s=0.08, odd_s=0.8)


def straggles_shortly(rank: Rank) -> None:
    """Steps that are far shorter than a heartbeat's interval."""
    told(rank, usual_s=0.002, odd_s=0.04)


def told(rank: Rank, count: int = 4, usual_s: float = 0.0, odd_s: float = 0.0) -> None:
    """Reduce until the end of rank 0's input tells all to stop."""
    rank.open()
    never = threading.Event()
    slot = rank.session.declare([TensorSpec("stop", DType.INT64, (1,))])[0]
    is_over = False
    while not is_over:
        is_told = rank.number == 0 and slot.round and select.select([0], [], [], 0)[0]
        slot.input[:] = struct.pack("q", bool(is_told))
        rank.session.hand_over(slot)
        rank.session.wait(slot)
        is_over = bytes(slot.result) != bytes(8)
        if usual_s:
            never.wait(odd_s if rank.is_odd else usual_s)
        rank.reduce(count=count)
        if slot.round == 1:
            rank.say("training")
    rank.session.close()
    rank.say("closed")


def stretches(rank: Rank) -> None:
    """Reduce so many numbers ten times, again and again until the end of rank 0's input; it waits for a line before
    each stretch, and then nothing is on its way."""
    rank.open()
    stop = rank.session.declare([TensorSpec("stop", DType.INT64, (1,))])[0]
    while True:
        is_over = False
        if rank.is_odd:
            rank.say(f"stretch {stop.round}")
            is_over = not sys.stdin.readline()
        stop.input[:] = struct.pack("q", is_over)
        rank.session.barrier()
        rank.session.hand_over(stop)
        rank.session.wait(stop)
        if bytes(stop.result) != bytes(8):
            break
        for _ in range(10):
            rank.reduce(count=int(sys.argv[3]))
    rank.session.close()


def declares(rank: Rank) -> None:
    """Train: in every step a new tensor, one that all know, and a barrier, until the end of rank 0's input."""
    rank.open()
    stop, gradients = rank.session.declare(
        [TensorSpec("stop", DType.INT64, (1,)), TensorSpec("gradients", DType.FLOAT32, (64,))]
    )
    weights = first_weights()
    is_over = False
    while not is_over:
        is_told = rank.number == 0 and stop.round and select.select([0], [], [], 0)[0]
        stop.input[:] = struct.pack("q", bool(is_told))
        gradients.input[:] = gradients_of(weights, rank.number).tobytes()
        for slot in (stop, gradients):
            rank.session.hand_over(slot)
        rank.reduce(f"new in step {stop.round}")
        rank.session.barrier()
        for slot in (stop, gradients):
            rank.session.wait(slot)
        weights -= np.frombuffer(gradients.result, np.float32)
        is_over = bytes(stop.result) != bytes(8)
        rank.say(f"step {stop.round}")
    rank.session.close()
    rank.say(f"weights {weights.tobytes().hex()}")


def first_weights() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.linspace(-1, 1, 64, dtype=np.float32)


def gradients_of(weights: np.ndarray[Any, np.dtype[np.float32]], number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Whatever: other bits in every step, and on every rank."""
    return (np.sin(weights * np.float32(3 + number)) * np.float32(0.03)).astype(np.float32)


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
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        # torchrun ends all ranks as soon as it sees a dead one: this one tells its error before.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank.is_odd:
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


def crashes(rank: Rank) -> None:
    """First a thread of the odd rank fails, and it keeps the others waiting; then, at the end of its input, its main
    thread does, while another thread keeps its process from ending."""
    rank.open()
    rank.reduce()
    if not rank.is_odd:
        try:
            rank.reduce("late")
        finally:
            rank.say(f"heard of it at {time.monotonic():.3f}")
        return

    def feed() -> None:
        raise KeyError("no such batch")

    thread = threading.Thread(target=feed, name="feeder")
    thread.start()
    thread.join()
    rank.say("thread is gone")
    sys.stdin.read()
    threading.Thread(target=threading.Event().wait, args=(90,)).start()

    def load(batch: int) -> None:
        rank.say(f"raised at {time.monotonic():.3f}")
        raise ValueError(f"the data of batch {batch} is bad")

    load(7)


def exits(rank: Rank) -> None:
    """The odd rank ends in an orderly way, but not well; rank 0 at the end of its input."""
    rank.open()
    rank.reduce()
    if rank.is_odd:
        sys.exit(5)
    sys.stdin.read()


def repeat(rank: Rank) -> None:
    """Come and go so many times, and leave nothing behind, neither here nor in the communication service."""
    turns, at_first = int(sys.argv[2]), Held(0, 0, 0)
    for turn in range(turns):
        rank.open()
        rank.reduce(f"turn {turn}")
        if turn == 1:
            fork_and_fail()
        if turn >= 20 and turn in (20, turns - 1):
            held = held_by(rank)
            at_first = at_first if any(at_first) else held
            if held.descriptors > at_first.descriptors or held.threads > at_first.threads:
                rank.say(f"{at_first} at first, {held} in the end")
            # Each turn's names are remembered: 4 pages a turn were measured, in all processes of two machines and a
            # server. Twice that, and 1 MB.
            if held.pages > at_first.pages + 8 * (turns - 20) + 256:
                rank.say(f"{at_first} at first, {held} in the end")
        rank.reduce("every turn", 2 + turn)  # until then nobody leaves
        rank.session.close()
    rank.say(f"{turns} turns")


def forks(rank: Rank) -> None:
    """Its child goes on until the end of its input, while the rank itself ends: killed, if it is the odd one."""
    rank.open()
    rank.reduce()
    if os.fork() == 0:
        try:
            rank.reduce()
        except BytePSError as error:
            rank.say(f"child: {type(error).__name__}: {error}")
        sys.stdin.read()
        os._exit(0)
    if rank.is_odd:
        os.kill(os.getpid(), signal.SIGKILL)
    rank.session.close()


class Held(NamedTuple):
    descriptors: int
    threads: int
    pages: int


def held_by(rank: Rank) -> Held:
    """What this process holds, and its communication service; under a launcher all other services, too."""
    here = {os.getpid(), rank.session._channel.peer_pid}  # type: ignore[attr-defined]
    if "BYTEPS_LAUNCH_TOKEN" in os.environ:
        here |= {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_service(pid)}
    return Held(
        sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in here),
        sum(map(count_threads, here)),
        sum(int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in here),
    )


def count_threads(pid: int) -> int:
    """Without those of gRPC's pool, of which there are four, and for a moment five, if all were busy for long."""
    names = []
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names.append((task / "comm").read_text().strip())
    return len(names) - names.count("event_engine")


def is_service(pid: int) -> bool:
    """It is a service process of this job."""
    with contextlib.suppress(OSError):
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if any(word.startswith(b"byteps_py.") for word in words):
            mine = f"BYTEPS_LAUNCH_TOKEN={os.environ['BYTEPS_LAUNCH_TOKEN']}".encode()
            return mine in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def fork_and_fail() -> None:
    """A child whose Python fails, and ends in the usual way, does not speak for the rank."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        raise ValueError("in a child")
    os.waitpid(child, 0)


SCENARIOS: dict[str, Callable[[Rank], None]] = {
    scenario.__name__: scenario
    for scenario in (
        train, told, stretches, declares, straggles, straggles_shortly, short, disagree, dies, dies_once, leaves, skips,
        absent, repeat, crashes, exits, forks,
    )
}  # fmt: skip


def main() -> None:
    rank = Rank()
    try:
        SCENARIOS[sys.argv[1]](rank)
    except BytePSError as error:
        rank.say(f"{type(error).__name__}: {error}")
        sys.exit(ERROR_STATUS)


if __name__ == "__main__":
    main()
