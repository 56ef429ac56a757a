"""Cores that are broken on purpose, as in mutations.py, where partitions pass through a communication service."""

from __future__ import annotations

from typing import Any

from byteps_py.worker.core.events import Action, BytesReady, Push, RoundEvent, RoundsAwaited
from byteps_py.worker.core.round_pipeline import RoundPipeline
from byteps_py.worker.core.tensor import Part, SlotState, Tensor, TensorState

from .ledger import Queue
from .mutations import Mutation
from .parts import Parts


class IgnoreCredit(Mutation):
    class queue(Queue):
        def take(self, now: float) -> Part | None:
            self.in_flight_bytes = 0
            return super().take(now)


class WaitForOtherMachines(Mutation):
    """Without the rules, machines that filled their credit with different partitions wait for each other."""

    class queue(Queue):
        def _write_off(self, pushed_before: Any) -> None:
            pass

        def hasten(self, parts: set[Part]) -> None:
            self._awaited |= parts


class LocalRanksBackwards(Mutation):
    class pipeline(RoundPipeline):
        def _local_sum(self, part: Part) -> Any:
            compute = super()._local_sum(part)
            if compute is not None:
                compute.inputs = compute.inputs[::-1]
            return compute


class ReleaseUnderAKernel(Mutation):
    class pipeline(RoundPipeline):
        def _release(self, tensor: Tensor) -> Any:
            running, tensor.running = tensor.running, 0
            try:
                return super()._release(tensor)
            finally:
                tensor.running = running


class AcceptRepeatedAnswers(Mutation):
    class pipeline(RoundPipeline):
        def awaits(self, part: Part, round_: int) -> bool:
            return not part.tensor.state.is_void


class HandOverVoidTensors(Mutation):
    """What was handed over before the rank knew of the mismatch takes credit, for ever."""

    class pipeline(RoundPipeline):
        def handle(self, event: RoundEvent, now: float) -> list[Action]:
            if not isinstance(event, BytesReady) or (tensor := event.slot.tensor) is None:
                return super().handle(event, now)
            slot = event.slot
            states = slot.state, tensor.state
            slot.state, tensor.state = SlotState.ACTIVE, TensorState.ACTIVE
            try:
                return super().handle(event, now)
            finally:
                slot.state, tensor.state = states


class KeepTheCreditOfWhatMoves(Mutation):
    class pipeline(RoundPipeline):
        def _again(self, part: Part) -> list[Action]:
            part.is_resent = True
            if not part.tensor.slots:
                return [Push(part, part.tensor.round)]
            self._enqueue(part)
            return []


class HastenWhatIsVoid(Mutation):
    """Though it has left the queue."""

    class pipeline(RoundPipeline):
        def handle(self, event: RoundEvent, now: float) -> list[Action]:
            known = [*event.rounds] if isinstance(event, RoundsAwaited) else []
            void = {part.tensor: part.tensor.state for part, _ in known if part.tensor.state.is_void}
            for tensor in void:
                tensor.state = TensorState.ACTIVE
            try:
                return super().handle(event, now)
            finally:
                for tensor, state in void.items():
                    tensor.state = state


PIPELINE_MUTATIONS: dict[type[Parts], int] = {
    IgnoreCredit: 5,
    WaitForOtherMachines: 7,
    LocalRanksBackwards: 3,
    ReleaseUnderAKernel: 916,
    AcceptRepeatedAnswers: 3,
    HandOverVoidTensors: 72,
    KeepTheCreditOfWhatMoves: 18,
    HastenWhatIsVoid: 10157,
}
