"""The states of hosted optimizers that a summation server keeps in step with their owners. Pure: no sockets, threads or
clocks; time is an argument.

A server on a spare machine sees, or is sent, every sum of a partition. Its owner sends the states once, and then of
each step the numbers: the server makes the same step with the same sum. Of a sum with a codec it has the code, and
decodes it as the owner does. So the states outlive their owner. Decides
what is kept, applied and dropped; must not know where bytes lie. One thread.

A *run* is one optimizer in one incarnation of a job. A part of a run is a partition of gradients; of its states there
is a copy, or two while the owner sends them anew:

    FILLING   ──all bytes have come────────────► READY     its owner hears HELD, also of steps that came meanwhile
    READY     ──its next step may be applied───► STEPPING  the thread pool writes the states
    STEPPING  ──applied────────────────────────► READY
    STEPPING  ──the kernel failed──────────────► BROKEN    half a step was made: the owner has to send the states again
    FILLING, READY, BROKEN ──forgotten, or replaced──► DROPPED   (STEPPING too: the memory lives until the pool's end)

A step is *held* once it can be applied: its sum is kept with it. It may be applied once the run is *durable* with it:
once all parts of the run, wherever they are, hold it. Until then the states after the durable step before can still be
read, so at any time there is one step for which all states are somewhere. A copy that replaces another one takes over
only when the run is durable with it; until then both are kept.

Repeated messages change nothing but what is answered. A message that does not fit gets SHADOW_LACKS, and the owner
begins anew with SHADOW_BEGIN.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from byteps_py.errors import ProtocolError, UsageError
from byteps_py.kernels.optimizer_steps import StepSegment
from byteps_py.kernels.update_rules import SCALARS, StepKind
from byteps_py.server.admission import codec_of
from byteps_py.server.shadow_records import AttachedPieces, SizedMemory, StepRecord
from byteps_py.server.shadow_state import (
    AllocateStates,
    ApplyStep,
    CopyState,
    DeliverStates,
    FillStates,
    HeldStep,
    HoldAsked,
    HoldOver,
    JobReplaced,
    NoMemory,
    OwnerMessage,
    PartFacts,
    Place,
    PoolStarted,
    ReadAsked,
    RefuseRead,
    RefuseShadow,
    ReplacedRun,
    RoundSummed,
    ShadowAction,
    ShadowedPart,
    ShadowEvent,
    ShadowReply,
    ShadowRun,
    StatesCopy,
    StepApplied,
    StepNotBegun,
)
from byteps_py.tensors import DType
from byteps_py.wire.data_link import (
    MAX_ATTACHED_BYTES,
    Header,
    HeldPartition,
    HeldRun,
    Kind,
    ShadowDescription,
    ShadowPartition,
    ShadowRecord,
    ShadowStep,
)

#: The longest time for which steps are held back for a reader.
LONGEST_HOLD_S = 60.0
_MOST_SUMS = 2
_MOST_DIVISOR = 1 << 31


class ShadowStore:
    """All runs of one server. ``handle`` is the only method that changes anything.

    ``partition_bytes``: the most bytes of a partition of gradients. ``most_waiting_bytes``: limit for sums that wait to
    be applied, and for records that wait to be dropped: a step or a record beyond it is not held. A rank's first record
    after the durable step may take as much again, since without it no record is dropped. Beyond half of the limit no
    reader holds steps back.

    Attributes:
        applied_steps: the number of steps that were applied.
        waiting_bytes: the bytes of sums that wait to be applied.
        record_bytes: the bytes of records, including attachments that have yet to come.
    """

    def __init__(self, partition_bytes: int, most_waiting_bytes: float = math.inf) -> None:
        self.applied_steps = 0
        self.waiting_bytes = self.record_bytes = 0
        self._partition_bytes = partition_bytes
        self._most_waiting_bytes = most_waiting_bytes
        self._runs: dict[int, ShadowRun] = {}
        self._places: dict[Place, ShadowedPart] = {}  # the part that was begun last
        self._orders = itertools.count()
        self._job = 0
        self._hold_until_s = -math.inf
        self._is_holding = False
        self._handlers: Mapping[type, Callable[[Any, float], list[ShadowAction]]] = {
            OwnerMessage: self._on_message,
            RoundSummed: lambda event, now: self._summed(event.header, None, event.total, now),
            NoMemory: lambda event, now: self._refuse(event.copy, event.reason),
            StepApplied: self._applied,
            StepNotBegun: self._not_applied,
            PoolStarted: lambda event, now: self._go_on(),
            JobReplaced: self._replace_job,
            HoldAsked: self._hold,
            HoldOver: self._end_of_hold,
            ReadAsked: lambda event, now: self._read(event),
        }
        self._messages: Mapping[Kind, Callable[[Header, Any, Any, float], list[ShadowAction]]] = {
            Kind.SHADOW_BEGIN: self._begin,
            Kind.SHADOW_STATE: self._state,
            Kind.SHADOW_SUM: self._summed,
            Kind.SHADOW_STEP: self._step,
            Kind.SHADOW_RECORD: self._record,
            Kind.SHADOW_ATTACHED: self._attached,
            Kind.SHADOW_END: self._end,
        }

    def handle(self, event: ShadowEvent, now: float) -> list[ShadowAction]:
        """Return the actions that ``event`` requires, in order. Raises ProtocolError for a message of another kind."""
        return self._handlers[type(event)](event, now)

    def _on_message(self, event: OwnerMessage, now: float) -> list[ShadowAction]:
        header = event.header
        if header.kind not in self._messages:
            raise ProtocolError(f"{header.kind.name} is no message to a server")
        return self._messages[header.kind](header, event.origin, event.said, now)

    # ---- from the owners -----------------------------------------------------------------------------------

    def _begin(self, header: Header, origin: object, said: ShadowPartition, now: float) -> list[ShadowAction]:
        """SHADOW_BEGIN: the states of a partition follow."""
        try:
            facts = self._facts(header, said)
        except (UsageError, ValueError) as error:
            return [RefuseShadow(origin, header, str(error))]
        run = self._run(said.run, now)
        place = (header.key, header.index)
        part = run.parts.get(place)
        if part is None:
            part = run.parts[place] = ShadowedPart(facts)
        known = part.latest
        if known is not None and known.is_of(facts, header.generation, said.step) and part.job == self._job:
            known.origin, known.header = origin, header  # repeated: the owner has not heard that it is there
            is_filling = known.state is CopyState.FILLING
            return [] if is_filling else [ShadowReply(origin, _reply(header, said.step))]
        part.facts, part.job = facts, self._job
        self._places[place] = part
        for name in [name for name in part.sums if name[0] < header.generation]:
            del part.sums[name]
        spare = self._make_room(run, part)
        copy = StatesCopy(facts, header.generation, said.step, origin, header, base=said.step)
        copy.filled = [0] * facts.kind.states
        part.latest = copy
        return [AllocateStates(copy, spare)]

    def _refuse(self, copy: StatesCopy, reason: str) -> list[ShadowAction]:
        part = self._part_of(copy)
        self._drop(copy)
        if part is not None and part.latest is copy:
            part.latest = None
            self._tidy(copy.facts)
        return [_lacks(copy.origin, copy.header, reason)]

    def _state(self, header: Header, origin: object, data: SizedMemory, now: float) -> list[ShadowAction]:
        """SHADOW_STATE: bytes of a state."""
        part = self._places.get((header.key, header.index))
        copy = part.latest if part is not None else None
        if copy is None or copy.state is not CopyState.FILLING:
            return []  # of a copy that was refused, ended or completed: the owner has heard, or will hear, of that
        if (copy.generation, copy.seeded) != (header.generation, header.round):
            return []
        run = self._run(copy.facts.run, now)
        number, end = header.segment, header.offset + data.nbytes
        if number >= len(copy.filled) or end > copy.facts.state_nbytes or header.length != data.nbytes:
            text = f"{data.nbytes} bytes at {header.offset} of state {number} of {copy.facts}, which has "
            text += f"{len(copy.filled)} states of {copy.facts.state_nbytes} bytes"
            return [RefuseShadow(origin, header, text)]
        if header.offset > copy.filled[number]:
            text = f"state {number} of {copy.facts}: bytes {copy.filled[number]} to {header.offset} did not come"
            return self._refuse(copy, text)
        copy.filled[number] = max(copy.filled[number], end)
        copy.origin = origin
        actions: list[ShadowAction] = [FillStates(copy, number, header.offset, data)]
        if copy.is_filled and part is not None:
            actions += self._complete(run, part, copy)
        return actions

    def is_awaited(self, header: Header) -> bool:
        """The sum of this round is to be kept: see RoundSummed."""
        return (header.key, header.index) in self._places

    def _summed(self, header: Header, origin: object, total: SizedMemory, now: float) -> list[ShadowAction]:
        """SHADOW_SUM, or a sum that this server has taken itself."""
        part = self._places.get((header.key, header.index))
        if part is None or header.dtype is not part.facts.kind.gradient or total.nbytes != part.facts.sum_nbytes:
            return []  # a step that needs it will be told that it is missing
        newest = max(part.sums, default=(0, 0))
        name = (header.generation, header.round)
        if name[0] < newest[0]:
            return []
        if name[0] > newest[0]:
            part.sums.clear()
        part.sums.pop(name, None)
        part.sums[name] = total
        while len(part.sums) > _MOST_SUMS:
            del part.sums[next(iter(part.sums))]  # that came first: sums that are sent again are older than others
        return []

    def _step(self, header: Header, origin: object, said: ShadowStep, now: float) -> list[ShadowAction]:
        """SHADOW_STEP: the owner makes a step."""
        run = self._runs.get(said.run)
        part = run.parts.get((header.key, header.index)) if run is not None else None
        reply = _reply(header, said.step)
        if run is None or part is None or part.latest is None:
            lacks = _lacks(origin, reply, f"there are no states of partition {header.index} here")
            return [lacks] if run is None else [lacks, *self._heard(run, said, now)]
        copy = part.latest
        segments = _segments(said, copy.facts)
        if isinstance(segments, str):
            return [RefuseShadow(origin, header, segments)]
        answer = self._hold_step(part, header, origin, said, segments)
        self._drop_kept(run, part)
        return [*answer, *self._heard(run, said, now), *self._advance(run, copy)]

    def _hold_step(
        self,
        part: ShadowedPart,
        header: Header,
        origin: object,
        said: ShadowStep,
        segments: tuple[StepSegment, ...],
    ) -> list[ShadowAction]:
        copy, reply = part.latest, _reply(header, said.step)
        if copy is None or copy.state is CopyState.BROKEN:
            return [_lacks(origin, reply, copy.reason if copy is not None else "there are no states")]
        what, name = f"step {said.step} of {copy.facts}", (header.generation, header.round)
        if header.generation != copy.generation:
            text = f"{what} is of generation {header.generation} of the tensor, the states are of {copy.generation}"
            return [_lacks(origin, reply, text)]
        if said.step <= copy.last:
            if copy.state is not CopyState.FILLING:
                return [ShadowReply(origin, reply)]
            for held in copy.steps:  # answered once the states are there
                if held.number == said.step:
                    held.origin, held.header = origin, reply
            return []
        if said.before != copy.last:
            return [_lacks(origin, reply, f"{what} follows step {said.before}, but {copy.last} is the last one here")]
        total = part.sums.get(name)
        if total is None:
            return [_lacks(origin, reply, f"{what}: the sum of round {header.round} is not here")]
        if self.waiting_bytes + total.nbytes > self._most_waiting_bytes:
            return [_lacks(origin, reply, f"{what}: {self.waiting_bytes} bytes of earlier steps wait here already")]
        copy.steps.append(HeldStep(said.step, said.before, header.round, total, said.divisor, segments, origin, reply))
        self.waiting_bytes += total.nbytes
        self._end_hold()
        for older in [each for each in part.sums if each < name]:
            del part.sums[older]
        return [] if copy.state is CopyState.FILLING else [ShadowReply(origin, reply)]

    def _record(self, header: Header, origin: object, said: ShadowRecord, now: float) -> list[ShadowAction]:
        """SHADOW_RECORD: what a rank knows beside the states."""
        if (header.key, header.index, header.round) != (said.run, said.rank, said.step) or said.rank >= said.size:
            text = f"a record of rank {said.rank} of {said.size} as message {header.index} of step {header.round}"
            return [RefuseShadow(origin, header, text)]
        if said.attached_bytes > MAX_ATTACHED_BYTES:
            text = f"{said.attached_bytes} bytes are attached to a record of rank {said.rank}, which may have "
            return [RefuseShadow(origin, header, f"{text}{MAX_ATTACHED_BYTES}")]
        known = self._runs.get(said.run)
        # What it says of the durable step makes room, perhaps.
        actions = self._heard(known, said, now) if known is not None else []
        found = self._arriving(header, origin, said.attached_bytes, said.nbytes, now)
        if not isinstance(found, StepRecord):
            return [*actions, *found]
        self.record_bytes += said.nbytes - found.said_bytes
        found.said, found.said_bytes = said, said.nbytes
        run = self._runs[said.run]
        return [*actions, *self._hold_record(run, found), *self._heard(run, said, now)]

    def _attached(self, header: Header, origin: object, data: SizedMemory, now: float) -> list[ShadowAction]:
        """SHADOW_ATTACHED: a piece of what is attached to a record, which may come later."""
        total, end = header.segment_offset, header.offset + data.nbytes
        if not data.nbytes or not end <= total <= MAX_ATTACHED_BYTES:
            text = f"bytes {header.offset} to {end} of {total} that are attached to a record, of at most "
            return [RefuseShadow(origin, header, f"{text}{MAX_ATTACHED_BYTES}")]
        found = self._arriving(header, origin, total, 0, now)
        if not isinstance(found, StepRecord):
            return found
        if found.is_held:
            return []  # it came twice
        found.pieces.add(header.offset, data)
        return self._hold_record(self._runs[header.key], found)

    def _arriving(
        self, header: Header, origin: object, attached_bytes: int, said_bytes: int, now: float
    ) -> StepRecord | list[ShadowAction]:
        """The record of which something comes; or what is answered because it is not kept."""
        rank, step = header.index, header.round
        known = self._runs[header.key].records.find(rank, step) if header.key in self._runs else None
        if known is not None and known.pieces.nbytes != attached_bytes:
            self._drop_record(self._runs[header.key], known)
            known = None
        if known is None and header.key in self._runs:
            run = self._runs[header.key]
            if step < run.records.newest_held(rank, run.durable):
                return [ShadowReply(origin, _reply(header, step))]  # a later one is there, and durable
        needed = attached_bytes + said_bytes if known is None else max(0, said_bytes - known.said_bytes)
        if not self._has_room(header, needed):
            if known is not None:
                self._drop_record(self._runs[header.key], known)
            text = f"the record of step {step}, with {attached_bytes} bytes attached: {self.record_bytes} bytes wait "
            return [_lacks(origin, header, text + "here already")]
        run = self._run(header.key, now)
        if known is None:
            known = StepRecord(rank, step, AttachedPieces(attached_bytes), origin, header)
            run.records.add(known)
            self.record_bytes += attached_bytes
            self._end_hold()
        known.origin = origin
        return known

    def _hold_record(self, run: ShadowRun, record: StepRecord) -> list[ShadowAction]:
        """Something of it has come: its owner hears that it is held, if that was the rest of it."""
        if not record.is_held:
            return []
        actions: list[ShadowAction] = [ShadowReply(record.origin, _reply(record.header, record.step))]
        for older in run.records.arriving_before(record):
            self._drop_record(run, older)
            actions.append(
                _lacks(older.origin, older.header, f"a part of the record of step {older.step} did not come")
            )
        return actions

    def _has_room(self, header: Header, needed: int) -> bool:
        """True if there is memory for ``needed`` bytes of a record. One that is held already needs none when it comes
        again."""
        if not needed:
            return True
        run = self._runs.get(header.key)
        is_first = run is None or run.records.newest_held(header.index) <= run.durable
        return self.record_bytes + needed <= self._most_waiting_bytes * (2 if is_first else 1)

    def _end_hold(self) -> None:
        """There is little memory left: readers hold no more steps back."""
        if max(self.waiting_bytes, self.record_bytes) > self._most_waiting_bytes / 2:
            self._is_holding = False

    def _drop_record(self, run: ShadowRun, record: StepRecord) -> None:
        run.records.drop(record)
        self.record_bytes -= record.nbytes
        if not run.parts and not run.records:
            self._runs.pop(run.number, None)

    def read_attached(self, run: int, rank: int, step: int) -> AttachedPieces | None:
        """The attachment of a record that is held; None: there is no such record here."""
        found = self._runs[run].records.find(rank, step) if run in self._runs else None
        return found.pieces if found is not None and found.is_held else None

    def _end(self, header: Header, origin: object, said: object, now: float) -> list[ShadowAction]:
        """SHADOW_END: another server keeps the partition."""
        place = (header.key, header.index)
        part = self._places.get(place)
        if part is None or part.job != self._job:
            return []  # of an earlier job, which did not say this
        newest = part.latest or part.kept
        if newest is None or newest.generation <= header.generation:
            self._forget(self._runs[part.facts.run], place)
        return []

    # ---- from the shell --------------------------------------------------------------------------------------

    def _applied(self, event: StepApplied, now: float) -> list[ShadowAction]:
        copy, error = event.copy, event.error
        if copy.state is CopyState.DROPPED:
            return self._refuse_reads(copy)
        run = self._runs[copy.facts.run]
        if error is not None:
            copy.reason = f"the step {copy.base} of {copy.facts} could not be applied: {error}"
            copy.step_to(CopyState.BROKEN)
            self._release_steps(copy)
            return self._refuse_reads(copy)
        self.applied_steps += 1
        copy.step_to(CopyState.READY)
        return [*self._serve_reads(copy), *self._advance(run, copy)]

    def _not_applied(self, event: StepNotBegun, now: float) -> list[ShadowAction]:
        copy, step = event.copy, event.step
        if copy.state is CopyState.STEPPING:
            copy.step_to(CopyState.READY)
            copy.base = step.before
            copy.steps.appendleft(step)
            self.waiting_bytes += step.total.nbytes
        return []

    def _go_on(self) -> list[ShadowAction]:
        """Apply what may be applied."""
        return [action for run in list(self._runs.values()) for action in self._settle(run)]

    def _replace_job(self, event: JobReplaced, now: float) -> list[ShadowAction]:
        self._job += 1
        self._places.clear()
        for run in list(self._runs.values()):
            for record in [record for record in run.records if not record.is_held]:
                self._drop_record(run, record)
            for place, part in list(run.parts.items()):
                part.sums.clear()
                for copy in part.copies:
                    copy.reads.clear()  # their connections are gone
                    copy.wanted = -1
                if part.latest is not None and part.latest.state in (CopyState.FILLING, CopyState.BROKEN):
                    self._drop(part.latest)
                    part.latest, part.kept = part.kept, None
                if part.latest is None:
                    del run.parts[place]
        return []

    # ---- readers -----------------------------------------------------------------------------------------------

    def _hold(self, event: HoldAsked, now: float) -> list[ShadowAction]:
        until_s = now + min(event.hold_s, LONGEST_HOLD_S)
        if event.hold_s > 0 and until_s > self._hold_until_s:
            self._hold_until_s, self._is_holding = until_s, True
            self._end_hold()
        return []

    def _end_of_hold(self, event: HoldOver, now: float) -> list[ShadowAction]:
        if not self._is_holding or now < self._hold_until_s:
            return []
        self._is_holding = False
        return self._go_on()

    def describe(self, now: float) -> ShadowDescription:
        """All that can be read."""
        return ShadowDescription(tuple(self._described(run, now) for run in self._runs.values()))

    @staticmethod
    def _described(run: ShadowRun, now: float) -> HeldRun:
        parts = [
            HeldPartition(
                key,
                index,
                ShadowPartition(
                    run=copy.facts.run, name=copy.facts.name, first=copy.facts.first, count=copy.facts.count,
                    step_kind=copy.facts.kind.code, step=copy.base,
                ),
                tuple(step.number for step in copy.steps),
            )
            for (key, index), part in run.parts.items()
            for copy in part.copies
        ]  # fmt: skip
        records = tuple(record.said for record in run.records if record.said is not None and record.is_held)
        return HeldRun(run.number, run.durable, max(0.0, now - run.heard_s), tuple(parts), records)

    def _read(self, read: ReadAsked) -> list[ShadowAction]:
        wanted = read.wanted
        run = self._runs.get(wanted.run)
        part = run.parts.get((wanted.key, wanted.index)) if run is not None else None
        if run is None or part is None or not part.copies:
            return [RefuseRead(read, f"partition {wanted.index} of run {wanted.run:#x} is not kept here")]
        copy = next((copy for copy in part.copies if copy.delivers(wanted.step)), None)
        if copy is None:
            copy = part.copies[-1]
            text = f"{copy.facts} can't be read as of step {wanted.step}: it is at step {copy.base}"
            text += f", and {copy.last} is the last one that is held" if copy.steps else ""
            return [RefuseRead(read, text)]
        if copy.state is CopyState.READY and copy.base == wanted.step:
            return [DeliverStates(read, copy)]
        copy.reads.append(read)
        copy.wanted = max(copy.wanted, wanted.step)
        return self._advance(run, copy)

    @property
    def copies_bytes(self) -> tuple[int, int]:
        """Bytes of all states, and how many of them have not come yet."""
        all_, missing = 0, 0
        for part in self._parts():
            for copy in (part.kept, part.latest):
                if copy is not None and copy.memory is not None:
                    all_ += copy.facts.nbytes
                    if copy.state is CopyState.FILLING:
                        missing += copy.facts.nbytes - sum(copy.filled)
        return all_, missing

    def durable(self) -> tuple[int, int] | None:
        """(partitions, step) of the newest run that is durable here; None if nothing is."""
        runs = [run for run in self._runs.values() if run.durable and (run.parts or run.records)]
        newest = max(runs, key=lambda run: run.order, default=None)
        return None if newest is None else (len(newest.parts), newest.durable)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _facts(self, header: Header, said: ShadowPartition) -> PartFacts:
        """Raises UsageError for what no correct peer sends."""
        kind = StepKind.from_code(said.step_kind)
        codec = codec_of(header.codec)
        codec = dataclasses.replace(codec, drawn=header.drawn) if codec is not None else None
        facts = PartFacts(said.run, said.name, header.key, header.index, said.first, said.count, kind, codec)
        is_wide = kind.parameter is DType.FLOAT64 and kind.gradient is not DType.FLOAT64
        is_wrong = codec is not None and (codec.is_thc or codec.error_feedback or said.first % codec.block)
        if is_wrong or (codec is not None and kind.gradient is DType.FLOAT64):
            raise UsageError(f"states of {facts}, whose sums of {kind.gradient.name.lower()} are coded as {codec}")
        most = max(self._partition_bytes, 0 if codec is None else codec.item_bytes)  # a block is not cut
        if not 0 < facts.sum_nbytes <= most or header.round != said.step or is_wide:
            raise UsageError(
                f"states of {facts}, with {facts.sum_nbytes} bytes of gradients in message {header.round} of step "
                f"{said.step}: a partition has at most {self._partition_bytes} bytes"
            )
        return facts

    def _run(self, number: int, now: float) -> ShadowRun:
        run = self._runs.get(number)
        if run is None:
            run = self._runs[number] = ShadowRun(number, self._job, next(self._orders))
        run.heard_s, run.job = now, self._job
        return run

    def _parts(self) -> Iterator[ShadowedPart]:
        return (part for run in self._runs.values() for part in run.parts.values())

    def _part_of(self, copy: StatesCopy) -> ShadowedPart | None:
        run = self._runs.get(copy.facts.run)
        return run.parts.get((copy.facts.key, copy.facts.index)) if run is not None else None

    def _make_room(self, run: ShadowRun, part: ShadowedPart) -> Any:
        """A new copy begins: at most one of those before is kept, the one that the durable step can be read from.
        Returns memory that can be used again."""
        latest, kept = part.latest, part.kept
        needed = latest if latest is not None and latest.state.is_whole else None
        if kept is not None and (needed is None or not needed.delivers(run.durable)):
            needed = kept
        spare = None
        for copy in (kept, latest):
            if copy is not None and copy is not needed:
                if copy.state is not CopyState.STEPPING:
                    spare = copy.memory
                self._drop(copy)
        part.kept, part.latest = needed, None
        return spare

    def _complete(self, run: ShadowRun, part: ShadowedPart, copy: StatesCopy) -> list[ShadowAction]:
        """All states are there."""
        copy.step_to(CopyState.READY)
        newest = run.generations.get(copy.facts.key)
        if newest is None or newest[0] < copy.generation:
            run.generations[copy.facts.key] = (copy.generation, copy.seeded)
        actions: list[ShadowAction] = [ShadowReply(copy.origin, _reply(copy.header, copy.seeded))]
        actions += [ShadowReply(step.origin, step.header) for step in copy.steps]
        self._drop_kept(run, part)
        return [*actions, *self._advance(run, copy)]

    def _heard(self, run: ShadowRun, said: ShadowStep | ShadowRecord, now: float) -> list[ShadowAction]:
        """A message of a run has come. It says which step all parts of the run hold."""
        run.heard_s = now
        actions: list[ShadowAction] = []
        if said.whole and not run.is_whole:
            run.is_whole = True
            actions += self._replace_runs(run)
        if said.durable <= run.durable:
            return actions
        run.durable = said.durable
        return [*actions, *self._settle(run)]

    def _settle(self, run: ShadowRun) -> list[ShadowAction]:
        """Do what its durable step allows."""
        actions: list[ShadowAction] = []
        for place, part in list(run.parts.items()):
            generation, seeded = run.generations.get(place[0], (0, 0))
            newest = part.latest or part.kept
            is_outdated = newest is not None and newest.generation < generation and seeded <= run.durable
            if is_outdated and not self._is_holding:
                self._forget(run, place)  # the tensor was declared again, and is cut in other partitions
                continue
            self._drop_kept(run, part)
            for copy in part.copies:
                actions += self._advance(run, copy)
        for record in run.records.outdated(run.durable) if not self._is_holding else ():
            self._drop_record(run, record)
        return actions

    def _drop_kept(self, run: ShadowRun, part: ShadowedPart) -> None:
        latest = part.latest
        if part.kept is None or latest is None or self._is_holding:
            return
        # A copy that was sent again, as of an older step, has to catch up first.
        has_caught_up = latest.last >= min(run.durable, part.kept.last)
        if latest.state.is_whole and run.durable >= latest.seeded and has_caught_up:
            self._drop(part.kept)
            part.kept = None

    def _replace_runs(self, run: ShadowRun) -> list[ShadowAction]:
        """All states of ``run`` are held. Forget runs of jobs before, and those of this job with the same tensors."""
        keys = {key for key, _ in run.parts}
        old = [
            other
            for other in self._runs.values()
            if other.order < run.order and (other.job < run.job or keys & {key for key, _ in other.parts})
        ]
        for other in old:
            for place in list(other.parts):
                self._forget(other, place)
            self.record_bytes -= other.records.nbytes
            self._runs.pop(other.number, None)
        return [ReplacedRun(other, run) for other in old]

    def _advance(self, run: ShadowRun, copy: StatesCopy) -> list[ShadowAction]:
        """Apply the next step of a copy, if it may be."""
        if copy.state is not CopyState.READY or not copy.steps:
            return []
        following = copy.steps[0].number
        if following > copy.wanted and (self._is_holding or following > run.durable):
            return []
        step = copy.steps.popleft()
        self.waiting_bytes -= step.total.nbytes
        copy.step_to(CopyState.STEPPING)
        copy.base = step.number
        return [ApplyStep(copy, step)]

    def _serve_reads(self, copy: StatesCopy) -> list[ShadowAction]:
        """The states are those after another step."""
        ready = [read for read in copy.reads if read.wanted.step == copy.base]
        copy.reads = [read for read in copy.reads if read.wanted.step > copy.base]
        return [DeliverStates(read, copy) for read in ready]

    @staticmethod
    def _refuse_reads(copy: StatesCopy) -> list[ShadowAction]:
        reads, copy.reads = copy.reads, []
        text = copy.reason or f"{copy.facts} is not kept here any more"
        return [RefuseRead(read, text) for read in reads]

    def _release_steps(self, copy: StatesCopy) -> None:
        self.waiting_bytes -= sum(step.total.nbytes for step in copy.steps)
        copy.steps.clear()

    def _drop(self, copy: StatesCopy) -> None:
        """Its memory is released with the last reference to it. A reader that waits hears of it when the step that is
        being applied has been."""
        copy.step_to(CopyState.DROPPED)
        self._release_steps(copy)

    def _forget(self, run: ShadowRun, place: Place) -> None:
        part = run.parts.pop(place)
        if not run.parts and not run.records:
            self._runs.pop(run.number, None)
        for copy in (part.kept, part.latest):
            if copy is not None:
                self._drop(copy)
        if self._places.get(place) is part:
            del self._places[place]

    def _tidy(self, facts: PartFacts) -> None:
        """Forget a part of which there is nothing."""
        place = (facts.key, facts.index)
        run = self._runs[facts.run]
        part = run.parts[place]
        if part.latest is None and part.kept is None:
            self._forget(run, place)


def _reply(header: Header, step: int, kind: Kind = Kind.SHADOW_HELD) -> Header:
    return Header(
        kind, header.sender, header.epoch, key=header.key, generation=header.generation, index=header.index, round=step
    )


def _lacks(origin: object, header: Header, text: str) -> ShadowReply:
    return ShadowReply(origin, _reply(header, header.round, Kind.SHADOW_LACKS), text)


def _segments(said: ShadowStep, facts: PartFacts) -> tuple[StepSegment, ...] | str:
    """The segments of a step; or why no correct peer sends them."""
    if not 0 <= said.divisor <= _MOST_DIVISOR:
        return f"step {said.step} of {facts} has the divisor {said.divisor}"
    found = []
    for each in said.segments:
        if not each.start <= each.stop <= facts.count or len(each.scalars) != SCALARS:
            return (
                f"step {said.step} of {facts} has a segment from {each.start} to {each.stop} of {facts.count} elements,"
                f" with {len(each.scalars)} numbers"
            )
        found.append(StepSegment(range(each.start, each.stop), tuple(each.scalars)))
    return tuple(found)
