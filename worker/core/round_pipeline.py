"""The rounds of all tensors on one machine: what is due when. Pure; time is an argument.

    ready ─► [sum local ranks] ─► queue ─► push ─► answered ─► [deliver to local ranks] ─► done
             Compute               PushQueue       the server   Compute

Where the ranks of one machine are alone the sum goes straight to their results and the round is done.
The first Compute is left out when one rank's input, or another machine's, already is the contribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from byteps_py.errors import ProtocolError
from byteps_py.tensors import Op, TensorSpec
from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.events import (
    Action,
    Answered,
    BytesReady,
    ClockTold,
    Computed,
    CopyWanted,
    MessagesLost,
    Push,
    Release,
    ResultWanted,
    RoundDone,
    RoundEvent,
    RoundsAwaited,
    ServersChanged,
    Show,
    SlotJoined,
    StepArmed,
    StepEnded,
    StepSkipped,
    SumsAwaited,
    SumTaken,
    Supply,
    TellClock,
    TensorAgreed,
    TensorForgotten,
    TensorVoid,
    TimePassed,
    Withdraw,
)
from byteps_py.worker.core.hosted_steps import Forget, HostedAction, HostedSteps, MakeStep, OwnedPart, SumForOwner
from byteps_py.worker.core.owners import OwnedPiece
from byteps_py.worker.core.scatter import Scatter
from byteps_py.worker.core.tensor import (
    DELIVERING,
    DONE,
    IN_FLIGHT,
    QUEUED,
    REDUCING,
    WAITING,
    AccumulatedPart,
    Compute,
    Part,
    ScatterPart,
    SlotState,
    Tensor,
    TensorState,
)


class RoundPipeline:
    """``size``: number of ranks (an average's divisor). ``handle`` is the only method that changes anything."""

    def __init__(
        self, size: int, queue: PushQueue[Part], scatter: Scatter | None = None, hosted: HostedSteps | None = None
    ) -> None:
        self._scatter = scatter
        self._hosted_steps = hosted or HostedSteps(0, 0, ())
        self.size = size
        self._queue = queue
        self._undelivered_bytes = 0  # of answers that kernels have yet to read, or are reading
        handlers: Mapping[type, Callable[[Any, float], list[Action]]] = {
            TensorAgreed: self._start,
            BytesReady: self._ready,
            SlotJoined: self._leave_out,
            StepArmed: self._arm,
            StepSkipped: self._skip,
            SumsAwaited: self._watch,
            TensorVoid: self._retire,
            TensorForgotten: self._forget,
            Computed: self._computed,
            StepEnded: self._stepped,
            Answered: self._answered,
            RoundsAwaited: self._hasten,
            ResultWanted: self._supply,
            ClockTold: self._clock_told,
            CopyWanted: self._show_copy,
            SumTaken: self._lent,
            ServersChanged: self._move,
            MessagesLost: self._send_again,
            TimePassed: self._time_passed,
        }
        self._handlers = handlers

    def handle(self, event: RoundEvent, now: float) -> list[Action]:
        """Return the actions that ``event`` requires. Raises ProtocolError for what a rank can't do."""
        return self._handlers[type(event)](event, now)

    def _start(self, event: TensorAgreed, now: float) -> list[Action]:
        tensor, pieces = event.tensor, event.pieces
        if tensor.spec.ownership:
            self.hosted.start(tensor, [piece for piece in pieces if isinstance(piece, OwnedPiece)])
        elif tensor.spec.scatters:
            tensor.parts = [ScatterPart(tensor, i, o, n, -1, owner=owner) for i, (o, n, owner) in enumerate(pieces)]
            self._scatterer.start(tensor)
        else:
            kind = AccumulatedPart if tensor.spec.op is Op.ACCUMULATE else Part
            tensor.parts = [kind(tensor, i, o, n, server) for i, (o, n, server, *_) in enumerate(pieces)]
        for slot in tensor.slots:
            if slot.arriving is not None:
                slot.arriving.begin()
        return self._advance(tensor, now)

    def divisor(self, spec: TensorSpec) -> int:
        """By what its sums are divided."""
        return spec.divisor(self.size)

    def _ready(self, event: BytesReady, now: float) -> list[Action]:
        slot, round_, nbytes = event.slot, event.round, event.nbytes
        if slot.is_void:
            return []  # the news of it crosses this message
        begins = slot.ready_bytes < 0
        expected = slot.round + 1 if begins else slot.round
        if round_ != expected or not max(slot.ready_bytes, 0) <= nbytes <= slot.spec.nbytes:
            raise ProtocolError(
                f"tensor {slot.spec.name!r}: local rank {slot.local_rank} handed over {nbytes} of "
                f"{slot.spec.nbytes} bytes of round {round_}, round {expected} is due"
            )
        if begins:
            slot.round, slot.ready_since = round_, now
            if slot.arriving is not None:
                slot.arriving.begin()
        slot.ready_bytes = nbytes
        return self._advance(slot.tensor, now) if slot.tensor is not None else []

    def _leave_out(self, event: SlotJoined, now: float) -> list[Action]:
        slot = event.slot
        tensor = slot.tensor
        if tensor is None or tensor.state.is_void:
            return []
        slot.rank_joined()
        if slot.ready_bytes >= 0:
            tensor.has_last_rounds = True
            return []
        self._drop_joined(tensor)
        return self._advance(tensor, now)

    def _drop_joined(self, tensor: Tensor) -> None:
        gone = tuple(slot for slot in tensor.slots if slot.state is SlotState.JOINED)
        tensor.joined += gone
        tensor.slots = tuple(slot for slot in tensor.slots if slot not in gone)
        if not tensor.slots:
            tensor.passes_from = tensor.round
        for part in tensor.parts:
            part.local_sum = None

    def _pass(self, tensor: Tensor) -> list[Action]:
        """All local ranks have joined: tell the servers that this machine contributes nothing to the round."""
        if tensor.is_alone:
            return []
        for part in tensor.parts:
            part.move_to(IN_FLIGHT)
        return [Push(part, tensor.round) for part in tensor.parts]

    def _advance(self, tensor: Tensor, now: float) -> list[Action]:
        if not tensor.slots:
            return self._pass(tensor)
        ready = tensor.ready_bytes
        if ready < 0:
            return []
        actions: list[Action] = []
        queued = False
        round_ = tensor.round
        while tensor.begun < len(tensor.parts) and tensor.parts[tensor.begun].written_bytes <= ready:
            part = tensor.parts[tensor.begun]
            tensor.begun += 1
            if isinstance(part, OwnedPart) and (tensor.is_alone or not part.is_sum):
                actions += self._begin_owned(part)
                queued |= part.stage is QUEUED
                if tensor.round != round_:
                    return actions  # it is over
                continue
            compute = self._local_sum(part)
            if compute is not None:
                part.move_to(REDUCING)
                tensor.running += 1
                actions.append(compute)
            elif isinstance(part, ScatterPart):
                actions += self._scatterer.offer(part, now)
            else:
                self._enqueue(part)
                queued = True
        if not tensor.parts and ready == tensor.spec.nbytes:
            actions.append(self._complete(tensor))
        if queued:
            actions += self._pump(now)
        return actions

    def _local_sum(self, part: Part) -> Compute | None:
        """The sum that this machine computes before it sends anything; None if there is none."""
        tensor, offset = part.tensor, part.dense_offset
        spec = tensor.spec
        if part.local_sum is not None:
            return part.local_sum
        if not tensor.contributes:
            return None
        if not tensor.is_alone and not tensor.contributions:
            return None
        sources = tensor.slots if tensor.root_slot is None else (tensor.root_slot,)
        inputs = tuple(slot.input.address + offset for slot in sources)
        if tensor.is_alone:  # each rank's input and result stay where they are: the addresses never change
            part.local_sum = Compute(part, spec.op, inputs, part.outputs, self.divisor(spec))
            return part.local_sum
        op, sent_from = spec.op.kernel, part.offset
        if isinstance(part, AccumulatedPart):
            _, sent_from = part.contribution
            if tensor.round == 1:
                op, inputs = Op.BROADCAST, inputs[:1]  # the first value, which all ranks have
        return Compute(part, op, inputs, (tensor.contribution.address + sent_from,), 1)

    # ---- partitions with owners, see hosted_steps.py -----------------------------------------------------------

    def _begin_owned(self, part: OwnedPart) -> list[Action]:
        """All local ranks have come to a partition of parameters, or, on a machine alone, of gradients."""
        tensor = part.tensor
        if part.is_sum and tensor.spec.is_shadowed:
            part.move_to(REDUCING)
            tensor.running += 1
            return [SumForOwner(part, tuple(slot.input.address + part.offset for slot in tensor.slots))]
        if part.is_sum:
            part.move_to(DELIVERING)
            return self._summed(part, tuple(slot.input.address + part.offset for slot in tensor.slots))
        if part.is_own and part.stepped_round != tensor.round:
            return []  # ``stepped`` goes on
        if tensor.is_alone:
            part.move_to(DELIVERING)
            return self._finish(part)
        if part.is_pulled:
            return [] if self.hosted.is_being_summed(part) else self._pull(part)
        part.awaited_round = tensor.round  # all others wait for it
        self._enqueue(part)
        return []

    def _pull(self, part: OwnedPart) -> list[Action]:
        part.move_to(IN_FLIGHT)
        return [Push(part, part.tensor.round)]

    def _pull_waiting(self, part: OwnedPart) -> list[Action]:
        """A sum has come to its owner on another machine: get the parameters."""
        return [action for each in self.hosted.waiting_for(part) for action in self._pull(each)]

    def _summed(self, part: OwnedPart, inputs: tuple[int, ...]) -> list[Action]:
        actions = self._run_hosted(self.hosted.summed(part, inputs, self.divisor(part.tensor.spec)))
        return [*actions, *(self._give_up(part) if self.hosted.is_skipped(part) else ())]

    def _run_hosted(self, actions: Iterable[HostedAction]) -> list[Action]:
        due: list[Action] = []
        for action in actions:
            if isinstance(action, MakeStep):  # its memory, and that of the parameters, is in use
                action.part.tensor.running += 1
                action.parameters.running += 1
            due.append(action)
        return due

    def _arm(self, event: StepArmed, now: float) -> list[Action]:
        divisor = self.divisor(event.slot.spec)
        return self._run_hosted(self.hosted.arm(event.slot, event.round, event.is_last, divisor))

    def _skip(self, event: StepSkipped, now: float) -> list[Action]:
        return [action for part in self.hosted.skip(event.slot, event.round) for action in self._give_up(part)]

    def _watch(self, event: SumsAwaited, now: float) -> list[Action]:
        return [*self.hosted.watch(event.slot)]

    def _give_up(self, part: OwnedPart) -> list[Action]:
        self.hosted.on_over(part)
        return [Forget(part), *self._finish(part)]

    def _stepped(self, event: StepEnded, now: float) -> list[Action]:
        step = event.step
        part, parameters = step.part, step.parameters
        part.tensor.running -= 1
        parameters.running -= 1
        void = [each for each in (part.tensor, parameters) if each.state.is_void]
        actions = [action for each in void for action in self._release(each)]
        if part.tensor.state.is_void:
            return actions
        if not step.is_last:
            return [*actions, *self.hosted.on_kept(part)]
        self.hosted.on_over(part)
        for target in () if parameters.state.is_void else step.targets:
            target.stepped_round = parameters.round
            if target.index < parameters.begun:
                actions += self._begin_owned(target)
        return [*actions, *self._finish(part), *self._pump(now)]

    @property
    def hosted(self) -> HostedSteps:
        """The partitions with owners."""
        return self._hosted_steps

    def _enqueue(self, part: Part) -> None:
        part.move_to(QUEUED)
        self._queue.add(part, part.priority, part.awaited_round == part.tensor.round)

    def _hasten(self, event: RoundsAwaited, now: float) -> list[Action]:
        late = set()
        for part, round_ in event.rounds:
            part.awaited_round = round_
            if part.stage is QUEUED and not part.tensor.state.is_void and round_ == part.tensor.round:
                late.add(part)
        self._queue.hasten(late)
        return self._pump(now)

    def _time_passed(self, event: TimePassed, now: float) -> list[Action]:
        return self._pump(now)

    def _pump(self, now: float) -> list[Action]:
        """Push what the credit allows.

        Not while answers wait for kernels, that is for the processor: they would only wait there, in memory.
        """
        actions: list[Action] = []
        limit = self._queue.credit_bytes
        while not limit or self._undelivered_bytes <= limit:
            part = self._queue.take(now)
            if part is None:
                break
            part.move_to(IN_FLIGHT)
            actions.append(Push(part, part.tensor.round))
        return actions

    def _computed(self, event: Computed, now: float) -> list[Action]:
        part = event.part
        tensor = part.tensor
        tensor.running -= 1
        actions: list[Action] = []
        if part.stage is DELIVERING and not isinstance(part, ScatterPart):
            was_full = self._undelivered_bytes > self._queue.credit_bytes
            self._undelivered_bytes -= part.length
            actions += self._pump(now) if was_full else ()
        if tensor.state.is_void:
            return [*actions, *self._release(tensor)]
        if part.stage is REDUCING and not tensor.is_alone:
            if isinstance(part, ScatterPart):
                return self._scatterer.offer(part, now)
            self._enqueue(part)
            return self._pump(now)
        if part.stage is REDUCING and isinstance(part, OwnedPart) and part.answer is not None:
            part.move_to(DELIVERING)
            return self._summed(part, (part.answer.address,))
        if isinstance(part, OwnedPart) and part.is_sum:
            return [*actions, *self._summed(part, (part.own_result,))]
        if isinstance(part, ScatterPart):
            part.frames.clear()
        elif isinstance(part, AccumulatedPart):
            part.copied_round, part.clock, part.added_at = part.told
            part.copied_epoch = part.told_epoch
        return [*actions, *self._finish(part)]

    def awaits(self, part: Part, round_: int) -> bool:
        """True if an answer to, or a refusal of, this round's push still matters; else it is of a void tensor,
        or says again what an earlier one has said."""
        is_due = part.stage is IN_FLIGHT or (part.stage is QUEUED and part.is_resent)
        return not part.tensor.state.is_void and is_due and round_ == part.tensor.round

    def _answered(self, event: Answered, now: float) -> list[Action]:
        part, round_, source = event.part, event.round, event.source
        if not self.awaits(part, round_):
            return []
        tensor = part.tensor
        if part.stage is QUEUED:  # the server before has answered after all
            self._queue.drop({part})
        self._queue.give_back(part)
        if isinstance(part, OwnedPart) and (part.is_sum or part.is_own):
            if not part.wants_result:
                pulls = self._pull_waiting(part) if part.is_sum else []
                return pulls + self._pump(now) + self._finish(part)
            part.move_to(DELIVERING)
            if tensor.codec is not None:  # ``computed`` goes on; the step divides
                self._undelivered_bytes += part.length
                tensor.running += 1
                return [*self._pump(now), Compute(part, Op.BROADCAST, (source,), (part.own_result,), 1)]
            return self._pump(now) + self._summed(part, (source,))
        if tensor.root_slot is not None:
            source = tensor.contribution.address + part.offset
        outputs = tensor.results(part.dense_offset)
        if not outputs:
            return self._pump(now) + self._finish(part)
        if isinstance(part, AccumulatedPart):
            if part.told[0] != round_:
                raise ProtocolError(f"tensor {tensor.name!r}: a copy of its values came without a clock")
            outputs = part.outputs
        part.move_to(DELIVERING)
        self._undelivered_bytes += part.length
        tensor.running += 1
        actions = self._pump(now)
        divisor = self.divisor(tensor.spec)
        op = Op.SUM if divisor > 1 else Op.BROADCAST  # of one input: a division, or a copy
        return [*actions, Compute(part, op, (source,), outputs, divisor)]

    def _move(self, event: ServersChanged, now: float) -> list[Action]:
        actions: list[Action] = []
        for part, server in event.moves:
            before, part.server = part.server, server
            if part.stage is QUEUED and server != before:
                self._queue.move(part, before)
            if part.stage is IN_FLIGHT:
                actions += [Withdraw(part, part.tensor.round, before), *self._again(part)]
            elif isinstance(part, AccumulatedPart) and server != before and part.stage is not DELIVERING:
                actions.append(Withdraw(part, part.tensor.round, before))  # it need not keep the values
        return actions + self._pump(now)

    def _send_again(self, event: MessagesLost, now: float) -> list[Action]:
        actions = [action for part in event.parts if part.stage is IN_FLIGHT for action in self._again(part)]
        return actions + self._pump(now)

    def _again(self, part: Part) -> list[Action]:
        part.is_resent = True
        if not part.tensor.slots or part.is_pulled:  # nothing was queued
            return [Push(part, part.tensor.round)]
        self._queue.give_back(part)
        self._enqueue(part)
        return []

    def _supply(self, event: ResultWanted, now: float) -> list[Action]:
        tensor = event.part.tensor
        is_there = tensor.state is not TensorState.RETIRED and tensor.has_result(event.part, event.round)
        return [Supply(event.part, event.round, event.server)] if is_there else []

    def _clock_told(self, event: ClockTold, now: float) -> list[Action]:
        if self.awaits(event.part, event.round):
            event.part.told = event.round, event.clock, event.added_at
        return []

    def _show_copy(self, event: CopyWanted, now: float) -> list[Action]:
        part = event.part
        if part.tensor.state.is_void or part.stage is DELIVERING or not part.copied_round:
            return []  # the server asks again
        if event.is_whole:
            return [Supply(part, part.copied_round, part.server)]
        return [TellClock(part)]

    def _lent(self, event: SumTaken, now: float) -> list[Action]:
        part = event.part
        if part.tensor.state.is_void or part.stage is not IN_FLIGHT or event.round != part.tensor.round:
            return []
        return self._finish(part)

    @property
    def _scatterer(self) -> Scatter:
        if self._scatter is None:
            raise ProtocolError("a tensor is to be scattered by a pipeline without a Scatter")
        return self._scatter

    def _finish(self, part: Part) -> list[Action]:
        tensor = part.tensor
        part.move_to(DONE)
        tensor.finished += 1
        if tensor.finished < len(tensor.parts):
            return [
                Show(slot, chunks)
                for slot in part.takers
                if slot.arriving is not None and (chunks := slot.arriving.add(part.result_offset, part.dense_length))
            ]
        done = self._complete(tensor)
        return [done] if tensor.slots else [done, *self._pass(tensor)]

    def _complete(self, tensor: Tensor) -> RoundDone:
        done = RoundDone(tensor, tuple((slot.local_rank, slot.id, slot.round) for slot in tensor.slots))
        tensor.round += 1
        tensor.begun = tensor.finished = 0
        for slot in tensor.slots:
            slot.ready_bytes = -1
        for part in tensor.parts:
            part.move_to(WAITING)
            part.is_resent = False
        if tensor.has_last_rounds:
            tensor.has_last_rounds = False
            for slot in tensor.slots:
                if slot.state.has_joined:
                    slot.rank_joined()
            self._drop_joined(tensor)
        return done

    def _retire(self, event: TensorVoid, now: float) -> list[Action]:
        tensor = event.tensor
        tensor.move_to(TensorState.KEPT if event.is_kept else TensorState.RETIRED)
        self._queue.drop(set(tensor.parts))
        for part in tensor.parts:
            if part.stage is IN_FLIGHT:
                self._queue.give_back(part)
        if tensor.spec.scatters:
            self._scatterer.retire(tensor)
        forgotten = self._retire_owned(tensor) if tensor.spec.ownership else []
        return [*forgotten, *self._release(tensor), *self._pump(now)]

    def _retire_owned(self, tensor: Tensor) -> list[Action]:
        forgotten: list[Action] = [*self.hosted.retire(tensor)]
        sums = [part for part in tensor.parts if isinstance(part, OwnedPart) and part.is_sum]
        return forgotten + [action for part in sums for action in self._pull_waiting(part)]

    def _forget(self, event: TensorForgotten, now: float) -> list[Action]:
        tensor = event.tensor
        tensor.move_to(TensorState.RETIRED)
        if tensor.spec.scatters:
            self._scatterer.forget(tensor)
        return self._release(tensor)

    def _release(self, tensor: Tensor) -> list[Action]:
        if tensor.is_used:
            return []
        # A slot that lives on in the tensor's next generation stays.
        slots = (slot for slot in (*tensor.slots, *tensor.joined) if slot.tensor is tensor)
        return [Release(tuple(slot for slot in slots if slot.state is not SlotState.VOID), tensor)]
