"""A whole job in one process: N ranks, a thread and a Session each, summing as the contract says.

For tests of what is written against Session. The sum is written down here a second time, in plain torch, on
purpose: two stages, each accumulated in order in float32 (float64 for float64) and rounded once.
Memory is as hostile as the contract allows: two inputs used in turn and a separate result (or, with
``shared_memory``, one block for everything), both overwritten with 0xFF the moment a round is handed over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, MismatchError, NotInitializedError, PeerLostError, StallError, UsageError
from byteps_py.session import Session, Slot
from byteps_py.tensors import Layout, Op, TensorSpec
from byteps_py.torch.collectives.context import Context, use
from byteps_py.torch.collectives.dtypes import WIRE

from .coded_sums import CodedPieces, CodedSums

T = TypeVar("T")
TORCH = {wire: dtype for dtype, wire in WIRE.items()}
WAIT_S = 40.0


def one_thread() -> None:
    """Compute with one thread per rank: more would only fight for the cores. Part of what makes sums equal."""
    torch.set_num_threads(1)


one_thread()  # the setting is each thread's own; references are computed by the main one


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a sum of ``dtype`` is accumulated in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def combine(op: Op, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One stage: left to right, rounded once."""
    total = parts[0].to(wide(parts[0].dtype))
    for part in parts[1:]:
        part = part.to(total.dtype)
        if op is Op.SUM:
            total = total + part
        elif op is Op.PRODUCT:
            total = total * part
        else:
            total = torch.minimum(total, part) if op is Op.MIN else torch.maximum(total, part)
    return total.to(parts[0].dtype)


def contract(
    parts: Sequence[torch.Tensor],
    machines: Sequence[int],
    op: Op = Op.SUM,
    average: bool = False,
    rounding: str = "floor",
) -> torch.Tensor:
    """The result of reducing ``parts`` (by rank) in a cluster with so many ranks on each machine.

    rounding: of averages of integers, whose sums do not wrap around; "trunc" in Horovod's operations.
    """
    if average and not parts[0].dtype.is_floating_point:
        exact = sum(part.numpy().astype(object) for part in parts)  # Python's integers
        cut = rounding == "trunc"
        mean = np.vectorize(lambda n: -(-n // len(parts)) if cut and n < 0 else n // len(parts), otypes=[object])(exact)
        return torch.tensor(mean.tolist(), dtype=parts[0].dtype).view(parts[0].shape)
    starts = [sum(machines[:i]) for i in range(len(machines))]
    total = combine(op, [combine(op, parts[s : s + n]) for s, n in zip(starts, machines, strict=True)])
    if not average:
        return total
    return (total.to(wide(total.dtype)) / len(parts)).to(total.dtype)


@dataclass
class _Contribution:
    slot: Slot
    data: bytes
    layout: Layout | None = None


class ThreadedCluster:
    """``machines``: ranks on each machine. ``run`` executes a function once per rank."""

    def __init__(self, machines: Sequence[int] = (1, 1), shared_memory: bool = False, **settings: Any) -> None:
        self.machines = tuple(machines)
        self.size = sum(machines)
        self.shared_memory = shared_memory
        self.settings = settings
        self.state = threading.Condition()
        self.waiting: dict[str, dict[int, _Contribution]] = {}  # by name, by rank: the round that is not complete
        self.rounds: list[tuple[str, int]] = []  # (name, priority) of every completed round, in order
        self.plans: list[str] = []  # names under which plans of optimizers were compared
        self.fatal: BytePSError | None = None
        self.arrived = 0
        self.coded: dict[str, CodedSums | CodedPieces] = {}  # by the name of a tensor with a codec
        self.joined: list[int] = []  # ranks, in the order in which they came, of all joins

    def settings_of(self, rank: int) -> Settings:
        machine, local = self.place(rank)
        return Settings(
            num_workers=len(self.machines),
            worker_id=machine,
            local_rank=local,
            local_size=self.machines[machine],
            **self.settings,
        )

    def place(self, rank: int) -> tuple[int, int]:
        """(machine, local rank)"""
        for machine, count in enumerate(self.machines):
            if rank < count:
                return machine, rank
            rank -= count
        raise IndexError(rank)

    def context(self, rank: int) -> Context:
        """A context whose ``open`` joins this cluster as ``rank``."""
        context = Context(lambda settings: ThreadedSession(self, rank))
        context.open(self.settings_of(rank))
        return context

    def run(self, function: Callable[[int], T]) -> list[T]:
        """``function(rank)`` on a thread per rank, each with its context open; their results by rank.

        Raises the first error that a rank raised; it ends the others' waits.
        """
        errors: list[BaseException] = []

        def main(rank: int) -> T:
            one_thread()
            with use(self.context(rank)) as context:
                try:
                    return function(rank)
                except BaseException as error:
                    errors.append(error)
                    self.fail(PeerLostError(f"rank {rank} raised {error!r}"))
                    raise
                finally:
                    context.close()

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(main, rank) for rank in range(self.size)]
            wait(futures, 2 * WAIT_S)
        if errors:
            raise errors[0]
        return [future.result(0) for future in futures]

    def fail(self, error: BytePSError) -> None:
        """Every wait raises ``error`` from now on."""
        with self.state:
            self.fatal = error
            self.state.notify_all()

    def contribute(self, rank: int, slot: Slot, data: bytes, layout: Layout | None = None) -> None:
        """Called with ``state`` held. The last rank's contribution completes the round."""
        name = slot.spec.name
        ready = self.waiting.setdefault(name, {})
        ready[rank] = _Contribution(slot, data, layout)
        members = slot.spec.members(self.size)
        if len(ready) == len(members):
            del self.waiting[name]
            if slot.spec.op.bypasses_servers:
                self._exchange(name, [ready[rank] for rank in members])
            else:
                self._complete(name, members, [ready[rank] for rank in members])
            self.state.notify_all()

    def _exchange(self, name: str, contributions: list[_Contribution]) -> None:
        """A round of a GATHER or an EXCHANGE."""
        for receiver, taker in enumerate(contributions):
            for giver, (start, due) in zip(contributions, taker.layout.receives, strict=True):
                sends = giver.layout.sends
                offset, nbytes = sends[0] if len(sends) == 1 else sends[receiver]
                if giver is taker and not due:  # it copies its own part itself
                    continue
                if nbytes != due:
                    taker.slot.error = MismatchError(f"tensor {name!r}: {nbytes} bytes for {due}")
                    break
                taker.slot.result[start : start + due] = giver.data[offset : offset + nbytes]
            taker.slot.done_round = taker.slot.round
        self.rounds.append((name, 0))

    def _complete(self, name: str, members: Sequence[int], contributions: list[_Contribution]) -> None:
        specs = [contribution.slot.spec for contribution in contributions]
        if not all(specs[0].agrees_with(spec) for spec in specs):
            said = "; ".join(f"rank {rank} gave {spec.describe()}" for rank, spec in zip(members, specs, strict=True))
            for contribution in contributions:
                contribution.slot.error = MismatchError(f"tensor {name!r}: {said}")
            return
        spec = specs[0]
        answer = b""
        if spec.nbytes:
            parts = [torch.frombuffer(bytearray(c.data), dtype=TORCH[spec.dtype]) for c in contributions]
            if spec.op is Op.BROADCAST:
                result = parts[members.index(spec.root)]
            else:
                hosts = [self.place(rank)[0] for rank in members]
                machines = [hosts.count(machine) for machine in sorted(set(hosts))]
                result = contract(parts, machines, spec.op, spec.average)
                if spec.codec is not None and len(machines) > 1:
                    coded = self.coded.get(name)
                    if coded is None or coded.codec != spec.codec:
                        coded = self.coded[name] = (
                            CodedPieces(spec.codec, machines, name, len(members))
                            if spec.scatters
                            else CodedSums(spec.codec, machines, name)
                        )
                    shaped = [part.view(spec.shape) for part in parts]
                    result = coded(shaped, len(parts) if spec.average else 1).flatten()
            answer = result.view(torch.uint8).numpy().tobytes()
        for position, contribution in enumerate(contributions):
            mine = answer
            if spec.scatters:
                first, count = (n * spec.dtype.itemsize for n in spec.piece(position, len(members)))
                mine = answer[first : first + count]
            contribution.slot.result[:] = mine
            contribution.slot.done_round = contribution.slot.round
        if not name.endswith(".plan"):  # optimizers compare theirs: torch/collectives/plan_comparison.py
            self.rounds.append((name, spec.priority))
        else:
            self.plans.append(name)


class ThreadedSession(Session):
    """See Session."""

    def __init__(self, cluster: ThreadedCluster, rank: int) -> None:
        self.cluster = cluster
        self.rank = rank
        self.size = cluster.size
        self.num_machines = len(cluster.machines)
        self.machine_index, self.local_rank = cluster.place(rank)
        self.local_size = cluster.machines[self.machine_index]
        self.is_homogeneous = len(set(cluster.machines)) == 1
        self.declarations = 0  # calls of declare that had something new
        self._slots: dict[str, Slot] = {}
        self._layouts: dict[Slot, Layout] = {}
        self._closed = False

    def declare(self, specs: Sequence[TensorSpec]) -> list[Slot]:
        with self.cluster.state:
            self._check()
            new = [spec for spec in specs if self._is_new(spec)]
            self.declarations += bool(new)
            for spec in new:
                self._declare(spec)
            return [self._slots[spec.name] for spec in specs]

    def _is_new(self, spec: TensorSpec) -> bool:
        if spec.root >= self.size:
            raise UsageError(f"tensor {spec.name!r}: root rank {spec.root} does not exist")
        slot = self._slots.get(spec.name)
        if slot is None or slot.error is not None:
            return True
        if slot.pending and not slot.spec.agrees_with(spec):
            raise UsageError(f"tensor {spec.name!r} is pending as {slot.spec.describe()}")
        return not slot.spec.agrees_with(spec) or not spec.fits_in(slot.spec)

    def _declare(self, spec: TensorSpec) -> None:
        if self.rank not in spec.members(self.size):
            raise UsageError(f"tensor {spec.name!r}: rank {self.rank} is not in its group {spec.group}")
        lengths = [spec.nbytes, spec.nbytes, spec.result_nbytes(self.rank, self.size)]
        if self.cluster.shared_memory and lengths[0] == lengths[2] and not spec.op.bypasses_servers:
            lengths = lengths[:1]
        blocks = [memoryview(bytearray(b"\xff" * length)) for length in lengths]
        self._slots[spec.name] = Slot(spec, tuple(blocks[:2]), blocks[-1])

    def hand_over(self, slot: Slot, nbytes: int | None = None, layout: Layout | None = None) -> None:
        with self.cluster.state:
            self._check()
            if slot.pending:
                raise UsageError(f"tensor {slot.spec.name!r} is pending")
            if nbytes is not None and nbytes < slot.spec.nbytes:
                return
            if slot.spec.op.bypasses_servers:
                layout = self._layouts[slot] = layout or self._layouts[slot]
                layout.check(slot.spec, len(slot.spec.members(self.size)))
            data, memory = bytes(slot.input), slot.input
            for block in (memory, slot.result):
                block[:] = b"\xff" * len(block)
            slot.round += 1
            self.cluster.contribute(self.rank, slot, data, layout)

    def is_done(self, slot: Slot) -> bool:
        self._check()
        return not slot.pending or self.cluster.fatal is not None

    def wait(self, slot: Slot, timeout_s: float | None = None) -> None:
        name, round_ = slot.spec.name, slot.round
        self._wait_until(lambda: not slot.pending, timeout_s, f"tensor {name!r}, round {round_}: no result")
        self._check()
        if slot.error is not None:
            raise slot.error

    def barrier(self, timeout_s: float | None = None) -> None:
        with self.cluster.state:
            self.cluster.arrived += 1
            target = -(-self.cluster.arrived // self.size) * self.size
            self.cluster.state.notify_all()
        self._wait_until(lambda: self.cluster.arrived >= target, timeout_s, "a barrier")

    def join(self, timeout_s: float | None = None) -> int:
        """Of ranks that all have the same data: here nothing goes on without a rank that has joined."""
        with self.cluster.state:
            self.cluster.joined.append(self.rank)
            target = -(-len(self.cluster.joined) // self.size) * self.size
            self.cluster.state.notify_all()
        self._wait_until(lambda: len(self.cluster.joined) >= target, timeout_s, "join")
        with self.cluster.state:
            for slot in self._slots.values():
                slot.error = UsageError(f"tensor {slot.spec.name!r} was declared before join(): declare it again")
            return self.cluster.joined[target - 1]

    def close(self) -> None:
        with self.cluster.state:
            self._closed = True
            self.cluster.state.notify_all()

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        deadline = time.monotonic() + (WAIT_S if timeout_s is None else timeout_s)
        with self.cluster.state:
            while not condition():
                self._check()
                if not self.cluster.state.wait(deadline - time.monotonic()):
                    raise StallError(f"{what} within the limit")

    def _check(self) -> None:
        if self._closed:
            raise NotInitializedError("the session is closed; call byteps_py.init() first")
        if self.cluster.fatal is not None:
            raise type(self.cluster.fatal)(*self.cluster.fatal.args)


__all__ = ["ThreadedCluster", "ThreadedSession", "combine", "contract", "wide"]
