"""The states of optimizers that a service keeps for its ranks, and the steps that it makes with them.

    rank                                                 service
      KeepStates(gradients, parameters, kind of steps) ─► once both tensors are agreed: memory in the rank's arena for
      ◄── StatesKept(states, owners of all elements) ───  the states of the elements that the rank owns
      MeasureNorm(ranges) ──────────────────────────────► once the rank's sums are there: their squares' sum
      ◄───────────────────────────── NormMeasured(sum)
      BeginStep(round, segments) ───────────────────────► each sum of the round, once it is there: see hosted_steps.py
      SkipStep(round) ──────────────────────────────────► no step is made with the sums of this round
      BeginRecord(step, sizes), RecordData(bytes) … ────► what the rank knows beside the states, for their copies
      ◄─────────────────────────────── StepsHeld(step)    all of that is held by other machines, see shadows.py
      ◄────────────────────────── RecordTaken(run, step)  a server has a large record: the next one may come

States lie in memory that the rank maps too: between steps it reads and writes them itself. Owned by the loop's thread;
kernels run on the pool's threads.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from byteps_py.errors import BytePSError, PeerLostError, ProtocolError, UsageError
from byteps_py.kernels.optimizer_steps import StepSegment, bind_segments, check_order
from byteps_py.kernels.update_rules import SCALARS, StepKind
from byteps_py.system.shm import Block
from byteps_py.wire import rank_link as protocol
from byteps_py.wire.data_link import MAX_ATTACHED_BYTES, MAX_PIECES_BYTES, Header, ShadowRecord
from byteps_py.worker.core.events import StepArmed, StepSkipped, SumsAwaited
from byteps_py.worker.core.hosted_steps import MakeStep, OwnedPart
from byteps_py.worker.core.owners import machine_that_copies
from byteps_py.worker.core.round_pipeline import RoundPipeline
from byteps_py.worker.core.shadow_copies import StepNumbers
from byteps_py.worker.core.tensor import RankSlot
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.io.coded_parts import ParameterChange
from byteps_py.worker.io.executor import Executor
from byteps_py.worker.io.rank_connection import RankConnection
from byteps_py.worker.io.slot_memory import SlotMemory
from byteps_py.worker.ranks.shadows import Shadows

_NO_NUMBERS = StepNumbers(0, 0)


@dataclass(slots=True, eq=False)
class _HostRequest:
    """A KeepStates that waits until its tensors are agreed."""

    rank: RankConnection
    number: int
    kind: StepKind
    source: RankSlot
    target: RankSlot
    before: _KeptStates | None
    run: int


@dataclass(slots=True, eq=False)
class _KeptStates:
    """``segments``: of the latest step; ``norms``: requests that wait for sums, and the ranges of elements that each is
    about; ``running``: kernels at work on the states. ``run``: see ShadowPartition, 0 if no other machine keeps copies;
    ``shadowed``: the partitions whose copies this machine keeps in step; ``numbers``: of the latest step."""

    id: int
    local_rank: int
    kind: StepKind
    source: RankSlot
    count: int
    states: tuple[Block, ...]
    segments: list[StepSegment] = field(default_factory=list)
    norms: list[tuple[int, list[range]]] = field(default_factory=list)
    running: int = 0
    is_void: bool = False
    run: int = 0
    shadowed: list[OwnedPart] = field(default_factory=list)
    numbers: StepNumbers = _NO_NUMBERS


@dataclass(slots=True)
class _StepUnderWay:
    """``segments``: of the partition; ``copy``: where its states are copied to."""

    kept: _KeptStates
    segments: list[StepSegment]
    copy: Block | None


@dataclass(slots=True)
class _ArrivingRecord:
    """A rank's record and its attachment, as far as they have arrived."""

    begin: protocol.BeginRecord
    common: bytearray = field(default_factory=bytearray)
    attached: bytearray = field(default_factory=bytearray)

    @property
    def is_complete(self) -> bool:
        return len(self.common) == self.begin.common_bytes and len(self.attached) == self.begin.attached_bytes

    def add(self, data: bytes) -> None:
        """Raises ProtocolError for more than was announced. A message never has the end of one and the beginning of the
        other."""
        is_common = len(self.common) < self.begin.common_bytes
        target, most = (
            (self.common, self.begin.common_bytes) if is_common else (self.attached, self.begin.attached_bytes)
        )
        if len(target) + len(data) > most:
            raise ProtocolError(f"a rank's record has more than the {most} bytes that were announced")
        target += data


class Hosting:
    """Of the ranks of one group."""

    shadows_class: type[Shadows] = Shadows

    def __init__(self, topology: Topology, memory: SlotMemory, executor: Executor, pipeline: RoundPipeline) -> None:
        self._topology = topology
        self._first_rank, self._size = topology.first_rank, topology.size
        self._memory = memory
        self._executor = executor
        self._kernels = executor.kernels
        self._pipeline = pipeline
        self._steps = pipeline.hosted
        self.shadows = self.shadows_class(topology, memory, executor)
        self.has_shadows = False  # until states are kept of which other machines keep copies
        self._records: dict[int, _ArrivingRecord] = {}  # by local rank: what has come of a record so far
        self._earlier: dict[OwnedPart, list[StepSegment]] = {}  # of steps of the round before its last one
        self._requests: list[_HostRequest] = []
        self._parts: dict[int, _KeptStates] = {}
        self._of_slot: dict[int, _KeptStates] = {}  # by id of the gradients' slot
        self._stepping: dict[OwnedPart, _StepUnderWay] = {}
        self._next_id = 1
        executor.steps = self

    # ---- states ------------------------------------------------------------------------------------------------

    def host(self, rank: RankConnection, message: protocol.KeepStates) -> None:
        """A rank wants states kept: tell it where they lie, once it is known who owns what. Raises ProtocolError, and
        OSError if there is no memory."""
        source, target = self._slot(rank, message.source), self._slot(rank, message.target)
        kind = _kind_of(message.step_kind)
        if (
            source.spec.ownership != source.spec.name
            or target.spec.ownership != source.spec.name
            or (kind.gradient, kind.parameter) != (source.spec.dtype, target.spec.dtype)
        ):
            raise ProtocolError(f"steps of {kind} with {source.spec.describe()} to {target.spec.describe()}")
        before = self._part(rank, message.before) if message.before else None
        if before is not None and before.kind != kind:
            raise ProtocolError(f"steps of {kind} with states for {before.kind}")
        self._requests.append(_HostRequest(rank, message.request, kind, source, target, before, message.run))
        self.agreed()

    def agreed(self) -> None:
        """Tensors with owners are agreed."""
        waiting, self._requests = self._requests, []
        for request in waiting:
            if request.source.is_void or request.target.is_void:
                continue  # the rank has been told, or will be, why its tensor is void
            if request.source.tensor is None or request.target.tensor is None:
                self._requests.append(request)
            else:
                self._keep(request)

    def _keep(self, request: _HostRequest) -> None:
        rank, kind, source = request.rank, request.kind, request.source
        parts = [part for part in (source.tensor.parts if source.tensor else ()) if isinstance(part, OwnedPart)]
        own = self._steps.own_parts(source)
        count = sum(part.count for part in own)
        kept = request.before
        if kept is None:
            states = tuple(rank.allocate(count * kind.state_itemsize) for _ in range(kind.states if count else 0))
            kept = _KeptStates(self._next_id, rank.local_rank, kind, source, count, states)
            self._parts[kept.id], self._next_id = kept, self._next_id + 1
        elif kept.count != count:
            raise ProtocolError(f"states of {kept.count} elements go on for {count}")
        self._of_slot.pop(kept.source.id, None)
        kept.source = source
        self._of_slot[source.id] = kept
        kept.run, kept.shadowed = request.run, [part for part in own if self._keeps_copy_of(part)]
        if kept.run:
            self.has_shadows = True
            self.shadows.watch(self._first_rank + rank.local_rank, kept.run, kind, kept.shadowed)
        places = tuple((block.segment, block.offset) for block in kept.states)
        owners = tuple((part.first, part.count, part.owner) for part in parts)
        answer = protocol.StatesKept(request.number, kept.id, count, places, owners)

        def prepared(error: BaseException | None) -> None:
            told = answer if error is None else replace(answer, error=_name_of(error), message=str(error))
            with contextlib.suppress(PeerLostError):  # it is found out by its own connection
                rank.send(told)

        self._executor.run_kernel(functools.partial(self._kernels.prepare_step, kind), prepared)

    def release(self, rank: RankConnection, message: protocol.DropStates) -> None:
        """A rank needs its states no more. Raises ProtocolError."""
        part = self._part(rank, message.shard)
        self.shadows.end(part.shadowed)
        self._end(part)

    def forget(self, local_rank: int) -> None:
        """The rank has left."""
        self._requests = [each for each in self._requests if each.rank.local_rank != local_rank]
        self._records.pop(local_rank, None)
        for part in [each for each in self._parts.values() if each.local_rank == local_rank]:
            self._steps.disarm(part.source)
            self.shadows.abandon(part.shadowed)
            self._end(part)

    def _end(self, part: _KeptStates) -> None:
        part.is_void = True
        if self._of_slot.get(part.source.id) is part:
            del self._of_slot[part.source.id]
        self._free(part)

    def _free(self, part: _KeptStates) -> None:
        if part.is_void and not part.running and self._parts.pop(part.id, None) is not None:
            self._memory.free_states(part.local_rank, part.states)

    # ---- rounds ------------------------------------------------------------------------------------------------

    def step(self, rank: RankConnection, message: protocol.BeginStep) -> None:
        """A rank wants the steps of a round made. Raises ProtocolError."""
        part = self._part(rank, message.shard)
        segments = [StepSegment(range(each.start, each.stop), each.scalars) for each in message.segments]
        check_order(segments, SCALARS)
        if segments and segments[-1].elements.stop > part.count:
            raise ProtocolError(f"a step of {segments[-1].elements.stop} elements with states of {part.count}")
        part.segments = segments
        if part.run and message.is_last:
            part.numbers = StepNumbers(message.step, message.durable, message.is_whole)
            self.shadows.begin(self._first_rank + rank.local_rank, part.numbers.step, part.shadowed)
        self._executor.handle(StepArmed(part.source, message.round, message.is_last))

    def begin_record(self, rank: RankConnection, message: protocol.BeginRecord) -> None:
        """A rank says what it knows after a step; its data may follow. Raises ProtocolError."""
        if message.common_bytes > MAX_PIECES_BYTES or message.attached_bytes > MAX_ATTACHED_BYTES:
            raise ProtocolError(
                f"a rank's record has {message.common_bytes} bytes and {message.attached_bytes} attached ones, more "
                f"than {MAX_PIECES_BYTES} and {MAX_ATTACHED_BYTES}"
            )
        self._records[rank.local_rank] = _ArrivingRecord(message)
        self._pass_record(rank)

    def add_to_record(self, rank: RankConnection, message: protocol.RecordData) -> None:
        """The next bytes of a rank's record. Raises ProtocolError."""
        record = self._records.get(rank.local_rank)
        if record is None:
            raise ProtocolError(f"local rank {rank.local_rank} sends data of no record")
        record.add(message.data)
        self._pass_record(rank)

    def _pass_record(self, rank: RankConnection) -> None:
        """If a record is complete, give it to the servers."""
        record = self._records[rank.local_rank]
        if not record.is_complete:
            return
        del self._records[rank.local_rank]
        begin, number = record.begin, self._first_rank + rank.local_rank
        packed = ShadowRecord(
            run=begin.run, step=begin.step, durable=begin.durable, rank=number, size=self._size,
            common=bytes(record.common), attached_bytes=begin.attached_bytes, whole=begin.is_whole,
        )  # fmt: skip
        self.shadows.record(number, packed, record.attached)

    def is_behind(self, part: OwnedPart) -> bool:
        return self.has_shadows and self.shadows.is_behind(part)

    def on_shadow_message(self, header: Header, text: str, server: int) -> None:
        self.shadows.answered(header, text, server)

    def on_reconnected(self, server: int) -> None:
        self.shadows.on_reconnected(server)

    def skip(self, rank: RankConnection, message: protocol.SkipStep) -> None:
        """A rank gives the sums of a round up. Raises ProtocolError."""
        slot = self._slot(rank, message.slot)
        if not slot.is_void:
            self._executor.handle(StepSkipped(slot, message.round))

    def norm(self, rank: RankConnection, message: protocol.MeasureNorm) -> None:
        """A rank wants to know the squares' sum of the averages that it owns. Raises ProtocolError."""
        part = self._part(rank, message.shard)
        ranges = [range(start, stop) for start, stop in message.ranges]
        if any(not 0 <= each.start <= each.stop <= part.count for each in ranges):
            raise ProtocolError(f"a norm of other elements than the {part.count} of a rank")
        part.norms.append((message.request, ranges))
        self._executor.handle(SumsAwaited(part.source))

    def summed(self, slot: RankSlot) -> None:
        """All sums of the slot's rank are there, which has asked for their norm."""
        kept = self._of_slot.get(slot.id)
        rank = self._executor.ranks.get(slot.local_rank)
        if kept is None or rank is None:
            return
        norms, kept.norms = kept.norms, []
        divisor = self._pipeline.divisor(slot.spec)
        parts = [(part.own_first, part.count, part.inputs) for part in self._steps.own_parts(slot)]
        for request, ranges in norms:
            self._measure(rank, kept, request, ranges, divisor, parts)

    def _measure(
        self,
        rank: RankConnection,
        kept: _KeptStates,
        request: int,
        ranges: Sequence[range],
        divisor: int,
        parts: Sequence[tuple[int, int, tuple[int, ...]]],
    ) -> None:
        total = 0.0

        def work() -> None:
            nonlocal total
            for first, count, inputs in parts:
                for each in ranges:
                    inside = range(max(each.start - first, 0), min(each.stop - first, count))
                    total += self._kernels.square_sum(kept.kind.gradient, inputs, inside, divisor)

        def done(error: BaseException | None) -> None:
            if error is not None:
                raise error
            with contextlib.suppress(PeerLostError):  # it is found out by its own connection
                rank.send(protocol.NormMeasured(request, total))

        self._executor.run_kernel(work, done)

    def bind(self, step: MakeStep) -> Callable[[], None]:
        """The work of a step, for any thread. Raises ProtocolError if the rank keeps no states for it."""
        part = step.part
        slot = next((each for each in part.tensor.slots if each.local_rank == self._local_rank_of(part)), None)
        kept = self._of_slot.get(slot.id) if slot is not None else None
        if kept is None:
            raise ProtocolError(f"a step with {part.tensor.name!r}, for which no states are kept")
        kind, offset = kept.kind, part.own_first
        states = [block.address + offset * kind.state_itemsize for block in kept.states]
        parameters = step.parameters
        start = part.first * kind.parameter.itemsize
        outputs = [each.result.address + start for each in parameters.slots]
        change = self._executor.coded_parts.change_of(step, outputs)
        if change is not None:
            outputs = [change.values]
        elif not parameters.is_alone and parameters.codec is None:
            block, sent_from = step.targets[0].contribution
            outputs.append(block.address + sent_from)
        run = bind_segments(kind, states, step.inputs, outputs, step.divisor, self._kernels.bind_step)
        kept.running += 1
        segments = []
        for segment in kept.segments:
            begin = max(segment.elements.start - offset, 0)
            end = min(segment.elements.stop - offset, part.count)
            if begin < end:
                segments.append(StepSegment(range(begin, end), segment.scalars))
        is_shadowed = kept.run > 0 and self._keeps_copy_of(part)
        copy = self.shadows.copy_states(step, states) if is_shadowed else None
        self._stepping[part] = _StepUnderWay(kept, segments, copy[0] if copy is not None else None)
        work = functools.partial(_make_step, self._memory, run, segments, copy[1] if copy is not None else None)
        return work if change is None else functools.partial(_make_change, work, change, self._executor.runtime.move)

    def stepped(self, step: MakeStep) -> None:
        """The work of a step is done."""
        done = self._stepping.pop(step.part)
        kept = done.kept
        kept.running -= 1
        if kept.run and self._keeps_copy_of(step.part):
            segments = [*self._earlier.pop(step.part, ()), *done.segments]
            if step.is_last:
                self.shadows.stepped(step, kept.numbers, segments, done.copy)
            else:
                self._earlier[step.part] = segments
        self._free(kept)

    def _keeps_copy_of(self, part: OwnedPart) -> bool:
        """True if this machine tells servers of a partition's steps, for their copies. One machine does."""
        if not part.tensor.spec.is_replicated:
            return True
        machines = self._topology.machines_of(part.tensor.spec)
        return machine_that_copies(part.tensor.key, part.index, machines) == self._topology.machine_index

    def _local_rank_of(self, part: OwnedPart) -> int:
        return part.owner - part.tensor.first_rank

    # ---- checks: a rank may be of another version, or damaged --------------------------------------------------

    def _part(self, rank: RankConnection, part_id: int) -> _KeptStates:
        part = self._parts.get(part_id)
        if part is None or part.local_rank != rank.local_rank or part.is_void:
            raise ProtocolError(f"local rank {rank.local_rank} has no states {part_id}")
        return part

    def _slot(self, rank: RankConnection, slot_id: int) -> RankSlot:
        slot = self._memory.slots.get(slot_id)
        if slot is None or slot.local_rank != rank.local_rank:
            raise ProtocolError(f"local rank {rank.local_rank} has no slot {slot_id}")
        return slot


def _make_step(
    memory: SlotMemory,
    run: Callable[[Sequence[StepSegment]], None],
    segments: Sequence[StepSegment],
    copy_states: Callable[[], None] | None,
) -> None:
    """``memory``: what keeps the addresses mapped until the step is made, even if the group is over meanwhile."""
    run(segments)
    if copy_states is not None:
        copy_states()


def _make_change(step: Callable[[], None], change: ParameterChange, move: Callable[[int, int, int], object]) -> None:
    change.begin(move)
    step()
    change.finish()


def _kind_of(code: int) -> StepKind:
    try:
        return StepKind.from_code(code)
    except UsageError as error:
        raise ProtocolError(f"malformed kind of a step: {error}") from None


def _name_of(error: BaseException) -> str:
    return type(error).__name__ if isinstance(error, BytePSError) else "CommunicationError"
