"""Optimizer steps in the middle of rounds: sums go to their owners' services, and parameters come back. Pure.

Two tensors belong together (see TensorSpec.ownership): a SUM, the gradients, and a BROADCAST, the parameters.

    gradients   ready ─► [sum local ranks] ─► push ─► answered ┬─ not owned here ─────────────────────────► done
                                                               │   └──────────────┐
                                                               └─ owned: summed ─► MakeStep ─► stepped ──► done
    parameters  ready ┬─ not owned here ◄─────────────────────────────────────────┘                    │
                      │    └─► pull ─► answered ─► [deliver] ─► done                                     │
                      └─ owned ◄─────────────────────────────────────────────────────────────────────────┘
                           └─► push ─► acknowledged ─► done        (the step has written the local ranks' results)

Parameters don't wait behind gradients. Of a server's link, gradients fill the way in, and parameters the way out: one
after the other, they would take twice as long. So an owner's parameters are pushed before gradients, whatever is in
flight, because all others wait for them. A pull sends nothing, and takes no turn and no credit from gradients.

On a machine alone nothing is pushed: the step adds the local ranks' gradients itself. Only if they are shadowed, they
are added before the step, because the sum is sent to the server that keeps the copy.

A partition's step is made when its sum is there and its owner has said with which numbers (``arm``), whatever of the
tensor is still on its way. It is made once: a round leaves SUMMING when its sum is there, and later answers to the same
push concern nothing. An owner may also give a sum up (``skip``).

    SUMMING ─its sum is there─► SUMMED ─its owner is armed─► STEPPING ─the last of the round─► SUMMING, of the next one
                                 ▲ └────its owner skips──────────│───────────────────────────► SUMMING, of the next one
                                 └──another step follows─────────┘
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from byteps_py.errors import ProtocolError
from byteps_py.system.shm import Block
from byteps_py.tensors import Op
from byteps_py.worker.core import IllegalTransitionError
from byteps_py.worker.core.owners import OwnedPiece
from byteps_py.worker.core.tensor import IN_FLIGHT, QUEUED, REDUCING, WAITING, Part, RankSlot, Tensor


class StepState(enum.Enum):
    """Where a partition of gradients stands at its owner's service."""

    SUMMING = "waiting for its sum"
    SUMMED = "summed, and waiting for its owner"
    STEPPING = "being stepped"

    after: tuple[StepState, ...]


SUMMING, SUMMED, STEPPING = StepState
STEP_STATES: dict[StepState, tuple[StepState, ...]] = {
    SUMMING: (SUMMED,),
    SUMMED: (STEPPING, SUMMING),
    STEPPING: (SUMMING, SUMMED),  # LAMB's updates come before its step, which needs their norms
}
for _state, _states in STEP_STATES.items():
    _state.after = _states


@dataclass(slots=True, eq=False)
class OwnedPart(Part):
    """A partition with an owner.

    Attributes:
        owner: its global rank; ``is_own``: it is one of this machine; ``machine``: its machine's index.
        source: index of the gradients' partition with the same elements.
        first: its first element in the tensor; ``own_first``: among all elements of its owner.
        machine_offset: of parameters, where they lie in their machine's contribution, in bytes.
        inputs: addresses of the sum, or on a machine alone of the ranks' gradients.
        stepped_round: of parameters, the last round that was stepped.
    """

    owner: int = -1
    is_own: bool = False
    source: int = 0
    first: int = 0
    own_first: int = 0
    machine_offset: int = 0
    machine: int = 0xFFFF
    state: StepState = SUMMING
    inputs: tuple[int, ...] = ()
    stepped_round: int = 0

    def step_to(self, state: StepState) -> None:
        """Raises IllegalTransitionError."""
        if state not in self.state.after:
            raise IllegalTransitionError.of(f"partition {self.index} of {self.tensor.name!r}", self.state, state)
        self.state = state

    @property
    def own_result(self) -> int:
        """The address of its elements in the owner's result, where a sum with a codec is decoded to."""
        own = next(slot for slot in self.tensor.slots if self.tensor.first_rank + slot.local_rank == self.owner)
        return own.result.address + self.dense_offset

    @property
    def is_sum(self) -> bool:
        """It is one of gradients, not of parameters."""
        return self.tensor.spec.op is Op.SUM

    @property
    def contributes(self) -> bool:
        return bool(self.tensor.slots) and (self.is_sum or self.is_own)

    @property
    def wants_result(self) -> bool:
        return bool(self.tensor.slots) and self.is_own is self.is_sum

    @property
    def is_acknowledged(self) -> bool:
        return self.is_sum and not self.is_own

    @property
    def is_pulled(self) -> bool:
        return not self.is_sum and not self.is_own

    @property
    def root_machine(self) -> int:
        return 0xFFFF if self.is_sum else self.machine

    def given(self, round_: int) -> tuple[Block, int] | None:
        if self.is_sum:
            return Part.given(self, round_)
        return (self.tensor.contributions[round_ % 2], self.machine_offset) if self.is_own else None

    @property
    def contribution(self) -> tuple[Block, int]:
        if self.is_sum:
            return self.tensor.contribution, self.offset
        return self.tensor.contributions[self.tensor.round % 2], self.machine_offset


@dataclass(slots=True)
class _Parameters:
    """Agreed parameters. ``by_source``: their partitions, by index of the gradients' partition with the same elements;
    many small partitions would take long to search."""

    tensor: Tensor
    by_source: dict[int, list[OwnedPart]]

    @classmethod
    def of(cls, tensor: Tensor) -> _Parameters:
        by_source: dict[int, list[OwnedPart]] = {}
        for part in tensor.parts:
            if isinstance(part, OwnedPart):
                by_source.setdefault(part.source, []).append(part)
        return cls(tensor, by_source)


@dataclass(slots=True)
class SumForOwner:
    """Add the inputs, of local ranks, in memory of the partition (``answer``), then call ``RoundPipeline.computed``."""

    part: OwnedPart
    inputs: tuple[int, ...]


@dataclass(slots=True)
class MakeStep:
    """Step the owner's states with the sum of ``inputs``, divided, then call ``RoundPipeline.stepped``.

    ``targets``: the partitions of ``parameters`` with the same elements. ``is_last``: the sum is not kept for more."""

    part: OwnedPart
    inputs: tuple[int, ...]
    divisor: int
    parameters: Tensor
    targets: list[OwnedPart]
    is_last: bool


@dataclass(slots=True)
class Forget:
    """Give back the memory of a sum."""

    part: OwnedPart


@dataclass(slots=True)
class AllSummed:
    """All partitions of a rank are SUMMED, which has asked for that: see ``HostedSteps.watch``."""

    slot: RankSlot


HostedAction = SumForOwner | MakeStep | Forget | AllSummed


class HostedSteps:
    """``first_rank``, ``local_size``: of this machine; ``machine_of``: of each rank.

    A part of RoundPipeline, which calls a method for each event that is about partitions with owners.
    """

    def __init__(self, first_rank: int, local_size: int, machine_of: Sequence[int]) -> None:
        self._first_rank = first_rank
        self._machine_of = machine_of
        self._local_ranks = range(first_rank, first_rank + local_size)
        self._sums: dict[str, Tensor] = {}  # by name
        self._parameters: dict[str, _Parameters] = {}  # by name of the sum
        self._own: dict[int, tuple[Tensor, list[OwnedPart]]] = {}  # by id of the owner's slot, as all below
        self._summed: dict[int, int] = {}  # partitions that are SUMMED
        self._armed: dict[int, int] = {}  # the round in which its partitions step
        self._is_last: dict[int, bool] = {}  # whether that step is the last of its round
        self._open: dict[int, int] = {}  # partitions that a step which is not the last has yet to make
        self._skipped: dict[int, int] = {}  # the round that is given up
        self._watching: dict[int, RankSlot] = {}

    # ---- tensors -----------------------------------------------------------------------------------------------

    def start(self, tensor: Tensor, pieces: Sequence[OwnedPiece]) -> None:
        """A tensor is agreed: make its parts."""
        itemsize = tensor.spec.dtype.itemsize
        own: dict[int, int] = {}  # elements by owner
        sent: dict[int, int] = {}  # bytes by machine
        for index, piece in enumerate(pieces):
            machine = self._machine_of[piece.owner]
            part = OwnedPart(
                tensor, index, piece.offset, piece.length, piece.server,
                owner=piece.owner, is_own=piece.owner in self._local_ranks, source=piece.source,
                own_first=own.get(piece.owner, 0), machine_offset=sent.get(machine, 0), machine=machine,
            )  # fmt: skip
            part.first = part.dense_offset // itemsize
            own[piece.owner] = part.own_first + part.count
            sent[machine] = part.machine_offset + part.length
            tensor.parts.append(part)
        if tensor.spec.op is Op.SUM:
            self._sums[tensor.name] = tensor
        else:
            self._parameters[tensor.spec.ownership] = _Parameters.of(tensor)

    def retire(self, tensor: Tensor) -> list[HostedAction]:
        """It is void: sums that wait for their owners are needed no more."""
        held = [part for part in tensor.parts if isinstance(part, OwnedPart) and part.state is SUMMED]
        for part in held:
            part.step_to(SUMMING)
            part.inputs = ()
        if self._sums.get(tensor.name) is tensor:
            del self._sums[tensor.name]
        parameters = self._parameters.get(tensor.spec.ownership)
        if parameters is not None and parameters.tensor is tensor:
            del self._parameters[tensor.spec.ownership]
        for slot in (*tensor.slots, *tensor.joined):
            for known in (self._own, self._summed, self._armed, self._is_last, self._open, self._skipped):
                known.pop(slot.id, None)
            self._watching.pop(slot.id, None)
        return [Forget(part) for part in held]

    def own_parts(self, slot: RankSlot) -> list[OwnedPart]:
        """The partitions of a rank, of gradients or of parameters."""
        tensor, found = self._own.get(slot.id, (None, []))
        if slot.tensor is not None and tensor is not slot.tensor:
            rank = self._first_rank + slot.local_rank
            found = [part for part in slot.tensor.parts if isinstance(part, OwnedPart) and part.owner == rank]
            self._own[slot.id] = slot.tensor, found
        return found

    # ---- a round -----------------------------------------------------------------------------------------------

    def is_being_summed(self, part: OwnedPart) -> bool:
        """The sum that makes a partition of parameters is not at its owner yet."""
        sums = self._sums.get(part.tensor.spec.ownership)
        return sums is not None and sums.parts[part.source].stage in (REDUCING, QUEUED, IN_FLIGHT)

    def waiting_for(self, part: OwnedPart) -> list[OwnedPart]:
        """The partitions of parameters that local ranks have come to, and that wait for this sum at another machine."""
        parameters = self._parameters.get(part.tensor.name)
        if parameters is None:
            return []
        begun = parameters.tensor.begun
        targets = parameters.by_source[part.index]
        return [each for each in targets if each.is_pulled and each.index < begun and each.stage is WAITING]

    def summed(self, part: OwnedPart, inputs: tuple[int, ...], divisor: int) -> list[HostedAction]:
        """The sum of a partition is there. Returns what follows; the caller asks ``is_skipped`` first."""
        slot = self._move(part, SUMMED)
        part.inputs = inputs
        if self._armed.get(slot.id) == slot.round:
            return [self._step(part, divisor, self._is_last[slot.id])]
        return [*self._poll(slot)]

    def is_skipped(self, part: OwnedPart) -> bool:
        """Its owner has given the current round up."""
        slot = self._slot_of(part)
        return self._skipped.get(slot.id) == slot.round

    def arm(self, slot: RankSlot, round_: int, is_last: bool, divisor: int) -> list[HostedAction]:
        """A rank has said with which numbers its partitions step in its round number ``round_``. After the last step of
        a round, it changes nothing to say so again. Raises ProtocolError for another round than the rank's latest, one
        that it has given up, or before an earlier step of it is made."""
        if self._armed.get(slot.id) == round_ and self._is_last[slot.id]:
            return []
        if round_ != slot.round or self._skipped.get(slot.id) == round_ or self._open.get(slot.id):
            raise ProtocolError(f"local rank {slot.local_rank} steps in round {round_} of {slot.spec.name!r}")
        own = self.own_parts(slot)
        self._armed[slot.id], self._is_last[slot.id] = round_, is_last
        self._open[slot.id] = 0 if is_last else len(own)
        return [self._step(part, divisor, is_last) for part in own if part.state is SUMMED]

    def disarm(self, slot: RankSlot) -> None:
        """Its rank has left: no step is made with sums that are yet to come."""
        self._armed.pop(slot.id, None)
        self._open.pop(slot.id, None)
        self._watching.pop(slot.id, None)

    def on_kept(self, part: OwnedPart) -> Iterable[HostedAction]:
        """A partition's step that is not the last of its round is made."""
        slot = self._move(part, SUMMED)
        if slot.id not in self._open:
            return ()  # its rank has left
        self._open[slot.id] -= 1
        if not self._open[slot.id]:
            del self._armed[slot.id]
        return self._poll(slot)

    def skip(self, slot: RankSlot, round_: int) -> list[OwnedPart]:
        """A rank gives up the sums of its round number ``round_``. Returns the partitions that are SUMMED. Raises
        ProtocolError for another round than the latest, or one in which it steps."""
        if round_ != slot.round or self._armed.get(slot.id) == round_:
            raise ProtocolError(f"local rank {slot.local_rank} gives up round {round_} of {slot.spec.name!r}")
        self._skipped[slot.id] = round_
        return [part for part in self.own_parts(slot) if part.state is SUMMED]

    def watch(self, slot: RankSlot) -> Iterable[HostedAction]:
        """A rank waits until all of its partitions are SUMMED."""
        self._watching[slot.id] = slot
        return self._poll(slot)

    def _poll(self, slot: RankSlot) -> Iterable[HostedAction]:
        if slot.id not in self._watching or self._open.get(slot.id):
            return
        if self._summed.get(slot.id, 0) == len(self.own_parts(slot)):
            yield AllSummed(self._watching.pop(slot.id))

    def _step(self, part: OwnedPart, divisor: int, is_last: bool) -> MakeStep:
        parameters = self._parameters.get(part.tensor.name)
        if parameters is None:
            raise ProtocolError(f"a step with {part.tensor.name!r}, whose parameters are not agreed")
        self._move(part, STEPPING)
        return MakeStep(part, part.inputs, divisor, parameters.tensor, parameters.by_source[part.index], is_last)

    def on_over(self, part: OwnedPart) -> None:
        """A partition's step is made, or given up."""
        self._move(part, SUMMING)
        part.inputs = ()

    def _move(self, part: OwnedPart, state: StepState) -> RankSlot:
        """Returns the owner's slot."""
        slot = self._slot_of(part)
        change = (state is SUMMED) - (part.state is SUMMED)
        part.step_to(state)
        self._summed[slot.id] = self._summed.get(slot.id, 0) + change
        return slot

    def _slot_of(self, part: OwnedPart) -> RankSlot:
        own = part.owner - self._first_rank
        for slot in part.tensor.slots:
            if slot.local_rank == own:
                return slot
        raise ProtocolError(f"partition {part.index} of {part.tensor.name!r} belongs to a rank that takes no part")
