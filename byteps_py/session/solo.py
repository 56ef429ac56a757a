"""The session of a job of one rank. It starts no service and sends nothing; it behaves as other sessions do. Any thread
may call."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import replace

from byteps_py.errors import MismatchError, NotInitializedError, UnsupportedError, UsageError
from byteps_py.kernels.optimizer_steps import StepSegment, prepare_step, run_segments
from byteps_py.kernels.reduction import square_sum
from byteps_py.kernels.update_rules import StepKind
from byteps_py.session import base
from byteps_py.session.base import HostedShard, Session, ShadowedStep, Slot, StateHost
from byteps_py.session.progress import Progress
from byteps_py.tensors import Layout, Op, TensorSpec, differing


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if len(memory) else 0


class SoloSession(Session):
    """Size 1: the result of every reduction is its only contribution. Any thread."""

    rank = machine_index = local_rank = 0
    size = num_machines = local_size = 1

    def __init__(self) -> None:
        self.progress = Progress()
        self._slots: dict[str, Slot] = {}
        self._ids = itertools.count()
        self._layouts: dict[int, Layout] = {}  # by id of the slot
        self._closed = False
        self._forks = base.fork_count
        self._state_host = SoloStateHost(self)

    def declare(self, specs: Sequence[TensorSpec]) -> list[Slot]:
        self.check_open()
        return [self._declare(spec) for spec in specs]

    def _declare(self, spec: TensorSpec) -> Slot:
        if spec.root > 0:
            raise UsageError(f"tensor {spec.name!r}: root rank {spec.root} does not exist, the job has 1 rank")
        if spec.group not in ((), (0,)):
            raise UsageError(f"tensor {spec.name!r}: rank 0 is not in its group, or others are: the job has 1 rank")
        slot = self._slots.get(spec.name)
        if slot is None or not slot.spec.agrees_with(spec) or not spec.fits_in(slot.spec):
            memory = memoryview(bytearray(spec.nbytes))
            result = memoryview(bytearray(spec.result_nbytes(0, 1))) if spec.op.bypasses_servers else memory
            slot = self._slots[spec.name] = Slot(spec, (memory,), result, id=next(self._ids))
        return slot

    def hand_over(self, slot: Slot, nbytes: int | None = None, layout: Layout | None = None) -> None:
        self.check_open()
        if slot.spec.op.bypasses_servers:
            layout = layout or self._layouts[slot.id]
            layout.check(slot.spec, 1)
            self._layouts[slot.id] = layout
            (source, nbytes_sent), (target, nbytes_due) = layout.sends[0], layout.receives[0]
            if nbytes_sent != nbytes_due and not (slot.spec.op is Op.GATHER and not nbytes_due):
                raise MismatchError(differing(slot.spec.name, 0, nbytes_sent, 0, nbytes_due))
            slot.result[target : target + nbytes_due] = slot.input[source : source + nbytes_due]
        elif nbytes is not None and nbytes != slot.spec.nbytes:
            return
        slot.round += 1
        if self.observer is not None:
            self.observer.begun(slot)
        slot.done_round = slot.round
        if self.observer is not None:
            self.observer.delivered(slot)

    def is_done(self, slot: Slot) -> bool:
        self.check_open()
        return not slot.pending

    def wait(self, slot: Slot, timeout_s: float | None = None) -> None:
        self.check_open()

    @property
    def state_host(self) -> StateHost:
        return self._state_host

    def barrier(self, timeout_s: float | None = None) -> None:
        self.check_open()

    def join(self, timeout_s: float | None = None) -> int:
        self.check_open()
        return 0

    def close(self) -> None:
        self._closed = True
        self._slots.clear()

    def check_open(self) -> None:
        if self._closed:
            raise NotInitializedError("the session is closed; call byteps_py.init() first")
        if self._forks != base.fork_count:  # as in a job of several ranks
            raise base.forked_error(self.rank)


class SoloStateHost(StateHost):
    """Makes the steps of the only rank, at once."""

    def __init__(self, session: SoloSession) -> None:
        self._session = session

    def host(
        self, kind: StepKind, source: Slot, target: Slot, before: HostedShard | None = None, run: int = 0
    ) -> HostedShard:
        self._session.check_open()
        if before is not None:
            return replace(before, source=source, target=target)
        prepare_step(kind)
        nbytes = source.spec.count * kind.state_itemsize
        states = tuple(memoryview(bytearray(nbytes)) for _ in range(kind.states))
        return HostedShard(kind, source, target, states, ((0, source.spec.count, 0),))

    def begin_step(
        self,
        shard: HostedShard,
        segments: Sequence[StepSegment],
        is_last: bool = True,
        shadowed: ShadowedStep | None = None,
    ) -> None:
        self._session.check_open()
        states = [_address(state) for state in shard.states]
        run_segments(shard.kind, states, _address(shard.source.input), _address(shard.target.result), segments)

    def skip_step(self, source: Slot) -> None:
        self._session.check_open()

    def square_sum(self, shard: HostedShard, ranges: Sequence[range], timeout_s: float | None = None) -> float:
        self._session.check_open()
        return sum(square_sum(shard.kind.gradient, [_address(shard.source.input)], each) for each in ranges)

    def record_step(self, shadowed: ShadowedStep, common: bytes, attached: bytes) -> None:
        raise UnsupportedError("a job of one rank has no machine that keeps copies of an optimizer's states")

    @property
    def held(self) -> tuple[int, bool]:
        return 0, False

    def wait_until_held(self, step: int) -> None:
        raise UnsupportedError("a rank that is alone has no other machines that hold its steps")

    @property
    def refused_step(self) -> int:
        return 0

    def wait_for_step(self, shard: HostedShard) -> None:
        self._session.check_open()  # it is made already

    def server_addresses(self) -> tuple[str, ...]:
        return ()

    def release_shard(self, shard: HostedShard) -> None:
        """Does nothing: the memory of the shard is freed with it."""
