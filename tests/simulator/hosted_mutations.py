"""Cores that are broken on purpose, as in mutations.py, where communication services make optimizers' steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from byteps_py.tensors import TensorSpec
from byteps_py.worker.core.events import Action, Answered, ResultWanted, RoundEvent, StepArmed, StepEnded, StepSkipped
from byteps_py.worker.core.hosted_steps import (
    AllSummed,
    Forget,
    HostedAction,
    HostedSteps,
    MakeStep,
    OwnedPart,
    StepState,
)
from byteps_py.worker.core.owners import OwnedPiece, Owners
from byteps_py.worker.core.placement_view import PlacementView
from byteps_py.worker.core.round_pipeline import RoundPipeline
from byteps_py.worker.core.tensor import Compute, Part, RankSlot, Stage, Tensor
from byteps_py.worker.io.coded_parts import CodedParts, ParameterChange
from byteps_py.worker.io.executor import Executor

from .mutations import Mutation
from .parts import Parts


def _is_owned_sum(part: Part) -> bool:
    return isinstance(part, OwnedPart) and part.is_sum and part.is_own


class StepAgainForASecondAnswer(Mutation):
    class pipeline(RoundPipeline):
        def awaits(self, part: Part, round_: int) -> bool:
            is_second = _is_owned_sum(part) and part.stage is Stage.DELIVERING and round_ == part.tensor.round
            return super().awaits(part, round_) or (is_second and not part.tensor.state.is_void)

        def handle(self, event: RoundEvent, now: float) -> list[Action]:
            part = event.part if isinstance(event, Answered) and isinstance(event.part, OwnedPart) else None
            if part is not None and _is_owned_sum(part) and part.stage is Stage.DELIVERING:
                part.state = StepState.SUMMING
                return self._summed(part, (event.source,))
            return super().handle(event, now)


class StepWithTheRoundBefore(Mutation):
    """A sum that has come lies elsewhere than where the step looks for it."""

    class hosted_steps(HostedSteps):
        def summed(self, part: OwnedPart, inputs: tuple[int, ...], divisor: int) -> list[HostedAction]:
            latest = vars(self).setdefault("latest", {})
            before, latest[part] = latest.get(part, inputs), inputs
            return super().summed(part, before, divisor)


class ForgetWhatIsAcknowledged(Mutation):
    """Though the owner's answer may be lost with its server."""

    class pipeline(RoundPipeline):
        def handle(self, event: RoundEvent, now: float) -> list[Action]:
            is_owned = isinstance(event, ResultWanted) and isinstance(event.part, OwnedPart)
            return [] if is_owned and event.part.is_acknowledged else super().handle(event, now)


class SendParametersBeforeTheStep(Mutation):
    class pipeline(RoundPipeline):
        def _begin_owned(self, part: OwnedPart) -> list[Action]:
            if not part.is_sum and part.is_own:
                part.stepped_round = part.tensor.round
            return super()._begin_owned(part) if part.stage is Stage.WAITING else []


class StepInsteadOfASkip(Mutation):
    class pipeline(RoundPipeline):
        def handle(self, event: RoundEvent, now: float) -> list[Action]:
            is_skip = isinstance(event, StepSkipped)
            return super().handle(StepArmed(event.slot, event.round) if is_skip else event, now)


class MoveTheOwner(Mutation):
    """With its partition, to the machine of the server that adds it from now on."""

    class placing(PlacementView):
        def server_of(self, part: Part) -> int:
            server = super().server_of(part)
            if isinstance(part, OwnedPart) and server != part.server:
                machine_id = next((s.machine_id for s in self._topology.servers if s.member_id == server), "")
                for index, worker in enumerate(self._topology.workers):
                    if worker.machine_id == machine_id:
                        ranks = self._topology.ranks_of(index)
                        part.machine, part.owner = index, ranks[0]
                        part.is_own = ranks[0] in self._topology.ranks_of(self._topology.machine_index)
            return server


class DivideReplicatedSumsAsEachMachineLikes(Mutation):
    """Ranks give norms and states of the first machine's parts to all."""

    class placing(PlacementView):
        class owners_class(Owners):
            def _local_owner(self, spec: TensorSpec) -> int:
                owned, ranks = self._replicated_of(spec), self._members_here(spec)
                takes_last = self._topology.machine_index % 2 == 1 and len(ranks) > 0
                last = len(owned) - 1 - owned[::-1].index(min(owned))
                return ranks[last] if takes_last else super()._local_owner(spec)


class OwnAmongAllRanks(Mutation):
    """A rank outside of a sum's group may own a partition of it."""

    class placing(PlacementView):
        class owners_class(Owners):
            def _owner(self, spec: TensorSpec, machine_id: str | None) -> int:
                return super()._owner(replace(spec, group=()), machine_id)


class LeaveOutSumsOfOtherMachines(Mutation):
    """A machine counts what its ranks' groups own, and so chooses other owners than a machine in more groups."""

    class placing(PlacementView):
        class owners_class(Owners):
            def _count(self, spec: TensorSpec, owner: int, nbytes: int) -> None:
                if self._topology.machine_index in self._topology.machines_of(spec):
                    super()._count(spec, owner, nbytes)


class StepInEveryRound(Mutation):
    """An owner that has said once with which numbers its partitions step, has said so for good."""

    class hosted_steps(HostedSteps):
        def summed(self, part: OwnedPart, inputs: tuple[int, ...], divisor: int) -> list[HostedAction]:
            slot = self._slot_of(part)
            if slot.id in self._armed:
                self._armed[slot.id] = slot.round
            return super().summed(part, inputs, divisor)


class DivideAStepByAllMachines(Mutation):
    class pipeline(RoundPipeline):
        def handle(self, event: RoundEvent, now: float) -> list[Action]:
            if not isinstance(event, StepArmed):
                return super().handle(event, now)
            divisor = self.divisor(event.slot.spec) + event.slot.spec.average
            return self._run_hosted(self.hosted.arm(event.slot, event.round, event.is_last, divisor))


class KeepSumsThatAreGivenUp(Mutation):
    class pipeline(RoundPipeline):
        def _give_up(self, part: OwnedPart) -> list[Action]:
            return [action for action in super()._give_up(part) if not isinstance(action, Forget)]


class OneBlockOfParameters(Mutation):
    """A machine writes new parameters where the last ones lie, which others may lack."""

    class pipeline(RoundPipeline):
        def _run_hosted(self, actions: Iterable[HostedAction]) -> list[Action]:
            due = super()._run_hosted(actions)
            for action in due:
                if isinstance(action, MakeStep) and action.parameters.contributions:
                    action.parameters.contributions = action.parameters.contributions[:1] * 2
            return due


class LeaveParametersWithTheirFirstServers(Mutation):
    """Of the time when their sum was agreed."""

    class placing(PlacementView):
        def pieces(self, spec: TensorSpec) -> Sequence[Any]:
            if spec.ownership:
                return self._owners.pieces(spec, self._topology.partition_bytes)
            return super().pieces(spec)


class FreeSumsBetweenPhases(Mutation):
    class executor(Executor):
        def _stepped(self, step: MakeStep, error: BaseException | None) -> None:
            self._forget_sum(step.part)
            super()._stepped(step, error)


class SendParametersAfterTheFirstPhase(Mutation):
    class pipeline(RoundPipeline):
        def handle(self, event: RoundEvent, now: float) -> list[Action]:
            actions = super().handle(event, now)
            if not isinstance(event, StepEnded):
                return actions
            step = event.step
            if not (step.is_last or step.part.tensor.state.is_void or step.parameters.state.is_void):
                for target in step.targets:
                    target.stepped_round = step.parameters.round
            return actions


class TellOfUpdatesWhileTheyAreMade(Mutation):
    """To ranks that wait for them, once they have been begun."""

    class hosted_steps(HostedSteps):
        def _poll(self, slot: RankSlot) -> Iterable[HostedAction]:
            if slot.id in self._watching and self._open.get(slot.id):
                yield AllSummed(self._watching.pop(slot.id))
            yield from super()._poll(slot)


class EndAPhaseWithItsFirstPartition(Mutation):
    class hosted_steps(HostedSteps):
        def on_kept(self, part: OwnedPart) -> Iterable[HostedAction]:
            self._open[self._slot_of(part).id] = 1
            return super().on_kept(part)


class GoOnWithAnEndedGroup(Mutation):
    """Its steps, and its rounds."""

    class executor(Executor):
        def abandon(self) -> None:
            """Nothing ends."""


class StepBeforeTheSumIsDecoded(Mutation):
    class pipeline(RoundPipeline):
        def _answered(self, event: Answered, now: float) -> list[Action]:
            actions, part = super()._answered(event, now), event.part
            if not _is_owned_sum(part) or not any(isinstance(action, Compute) for action in actions):
                return actions
            assert isinstance(part, OwnedPart)
            part.tensor.running -= 1
            self._undelivered_bytes -= part.length
            others = [action for action in actions if not isinstance(action, Compute)]
            return [*others, *self._summed(part, (part.own_result,))]


class CountElementsByCodedBytes(Mutation):
    """Of a sum's partitions, so that owners step others than they have the sums of."""

    class hosted_steps(HostedSteps):
        def start(self, tensor: Tensor, pieces: Sequence[OwnedPiece]) -> None:
            super().start(tensor, pieces)
            for part in tensor.parts:
                if isinstance(part, OwnedPart):
                    part.first = part.offset // tensor.spec.dtype.itemsize


class GiveOwnRanksTheMasters(Mutation):
    """Instead of what ranks of other machines get."""

    class executor(Executor):
        class coded_parts_class(CodedParts):
            def change_of(self, step: MakeStep, results: Sequence[int]) -> ParameterChange | None:
                change = super().change_of(step, results)
                if change is None:
                    return None
                nbytes = 4 * change.coding.count

                class Changed(ParameterChange):
                    def finish(self) -> None:
                        memory: Any = self.codecs._memory  # type: ignore[attr-defined]
                        masters = memory.at(self.values, nbytes).copy()
                        super().finish()
                        for result in self.results:
                            memory.at(result, nbytes)[:] = masters

                return Changed(change.codecs, change.coding, change.memory, change.results, change.code)


#: With a seed that shows it.
HOSTED_MUTATIONS: dict[type[Parts], int] = {
    StepAgainForASecondAnswer: 9,
    StepWithTheRoundBefore: 5,
    ForgetWhatIsAcknowledged: 189,
    SendParametersBeforeTheStep: 5,
    StepInsteadOfASkip: 2,
    MoveTheOwner: 17,
    DivideReplicatedSumsAsEachMachineLikes: 25,
    OwnAmongAllRanks: 2,
    LeaveOutSumsOfOtherMachines: 48,
    StepInEveryRound: 1,
    DivideAStepByAllMachines: 1,
    KeepSumsThatAreGivenUp: 6,
    OneBlockOfParameters: 5,
    LeaveParametersWithTheirFirstServers: 770,
    EndAPhaseWithItsFirstPartition: 6,
    TellOfUpdatesWhileTheyAreMade: 0,
    SendParametersAfterTheFirstPhase: 5,
    FreeSumsBetweenPhases: 5,
}

HOSTED_CODED_MUTATIONS: dict[type[Parts], int] = {
    StepBeforeTheSumIsDecoded: 3,
    CountElementsByCodedBytes: 5,
    GiveOwnRanksTheMasters: 5,
}

HOSTED_ELASTIC_MUTATIONS: dict[type[Parts], int] = {
    GoOnWithAnEndedGroup: 61,
}
