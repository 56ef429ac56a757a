"""One agreed tensor on one machine: its memory, its partitions, and their states. Pure.

One round of one partition (Stage):

    WAITING ─all local ranks ready─► REDUCING ─► QUEUED ─credit─► IN_FLIGHT ─answer─► DELIVERING ─► DONE

One tensor (TensorState), which a name that is declared anew replaces by another one:

    ACTIVE ─it is void after a later round─► ENDING ─► KEPT ─no machine lacks its result─► RETIRED

One rank's memory for it (SlotState):

    ACTIVE ─its rank joins in a round─► LAST_ROUND ─the round ends─► JOINED
    any ─nothing comes of it─► VOID ─its rank knows─► RELEASED

What may follow what stands in ``STAGES``, ``TENSOR_STATES`` and ``SLOT_STATES``; ``move_to`` is the only way from one
state to another.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from byteps_py.errors import BytePSError
from byteps_py.system.shm import Block
from byteps_py.tensor_codec import Codec
from byteps_py.tensors import PRIORITY_READY_ORDER, Op, TensorSpec, key_of
from byteps_py.wire.chunks import Arriving
from byteps_py.worker.core import IllegalTransitionError

if TYPE_CHECKING:
    from byteps_py.kernels.reduction import Report

#: So much of each gradient is pushed in the order in which gradients become ready, the rest by priority. By priority
#: alone, machines turn to a more urgent gradient when it is ready, which is not the same moment for all: they have
#: begun different partitions of the one before, an answer needs all machines, and links run dry. There is time for a
#: quarter of all gradients in any backward pass that takes at least a quarter of what the links need for all.
HEAD_FRACTION = 1 / 4


class Stage(enum.Enum):
    """Where a partition stands in the current round."""

    WAITING = "waiting for local ranks"
    REDUCING = "being reduced on this machine"
    QUEUED = "waiting for credit"
    IN_FLIGHT = "waiting for its server"
    DELIVERING = "being delivered to local ranks"
    DONE = "delivered"

    after: tuple[Stage, ...]


WAITING, REDUCING, QUEUED, IN_FLIGHT, DELIVERING, DONE = Stage
STAGES: dict[Stage, tuple[Stage, ...]] = {
    WAITING: (REDUCING, QUEUED, IN_FLIGHT, DELIVERING),  # what is stepped on a machine alone is not summed before
    REDUCING: (QUEUED, IN_FLIGHT, DELIVERING, DONE),  # DELIVERING: a sum that its owner steps with
    QUEUED: (IN_FLIGHT, DELIVERING, DONE),  # the server of before may answer what waits to be sent again
    IN_FLIGHT: (QUEUED, DELIVERING, DONE),
    DELIVERING: (DONE,),
    DONE: (WAITING,),
}
for _stage, _stages in STAGES.items():
    _stage.after = _stages


class TensorState(enum.Enum):
    """``is_void``: no rank gets a result of it any more."""

    ACTIVE = "its rounds go on"
    ENDING = "its rounds go on until ``last_round`` is delivered"
    KEPT = "void; what was given to its last round is kept for machines that may lack the result"
    RETIRED = "void; its memory is given back once no kernel uses it"

    after: tuple[TensorState, ...]
    is_void: bool


TENSOR_STATES: dict[TensorState, tuple[TensorState, ...]] = {
    TensorState.ACTIVE: (TensorState.ENDING, TensorState.KEPT, TensorState.RETIRED),
    # A later verdict may say of another round that it is the last.
    TensorState.ENDING: (TensorState.ENDING, TensorState.KEPT, TensorState.RETIRED),
    TensorState.KEPT: (TensorState.RETIRED,),
    TensorState.RETIRED: (),
}
for _state, _states in TENSOR_STATES.items():
    _state.after = _states
    _state.is_void = _state in (TensorState.KEPT, TensorState.RETIRED)


class SlotState(enum.Enum):
    """``has_left``: the rank has left; what it had handed over still counts, but it waits for nothing. ``has_joined``:
    the rank begins no further round."""

    ACTIVE = "its rank takes part"
    LEFT = "its rank has left"
    LAST_ROUND = "its rank has joined, and takes part in the round that it has begun"
    LEFT_IN_LAST_ROUND = "its rank has joined, and has left before the round that it had begun is over"
    JOINED = "its rank has joined, and takes no part"
    VOID = "nothing comes of it, which its rank may not know yet: it may write there"
    RELEASED = "void, and its rank knows: the memory is given back once no kernel uses it"

    after: tuple[SlotState, ...]
    has_left: bool
    has_joined: bool


_S, _VOID = SlotState, SlotState.VOID
SLOT_STATES: dict[SlotState, tuple[SlotState, ...]] = {
    _S.ACTIVE: (_S.LEFT, _S.LAST_ROUND, _S.JOINED, _S.VOID),
    _S.LEFT: (_S.LEFT_IN_LAST_ROUND, _S.JOINED, _S.VOID),
    _S.LAST_ROUND: (_S.LEFT_IN_LAST_ROUND, _S.JOINED, _S.VOID),
    _S.LEFT_IN_LAST_ROUND: (_S.JOINED, _S.VOID),
    _S.JOINED: (_S.VOID,),
    _S.VOID: (_S.RELEASED,),
    _S.RELEASED: (),
}
for _slot_state, _slot_states in SLOT_STATES.items():
    _slot_state.after = _slot_states
    _slot_state.has_left = _slot_state in (_S.LEFT, _S.LEFT_IN_LAST_ROUND)
    _slot_state.has_joined = _slot_state in (_S.LAST_ROUND, _S.LEFT_IN_LAST_ROUND, _S.JOINED)


@dataclass(slots=True, eq=False)
class Part:
    """One partition of a tensor: ``length`` bytes at ``offset`` of what machines send, which is coded if the tensor
    has a codec. Ranks have it as ``dense_length`` bytes at ``dense_offset``. ``server``: index of the server that adds
    it; -1 when no other machine takes part. ``answer``: where the server of this machine writes the answer (shared
    memory). ``is_resent``: in this round it was given to another server, or on another connection, before.
    ``awaited_round``: other machines have given to it, and wait for this one."""

    tensor: Tensor
    index: int
    offset: int
    length: int
    server: int
    stage: Stage = WAITING
    answer: Block | None = None
    local_sum: Compute | None = None  # the same every round, where one machine is all
    is_resent: bool = False
    awaited_round: int = 0
    #: By parity of the round: the ranks to blame if this machine's sum is not finite; 0: no sum, or it is not checked.
    blames: list[int] = field(default_factory=lambda: [0, 0])

    def move_to(self, stage: Stage) -> None:
        """Raises IllegalTransitionError."""
        if stage not in self.stage.after:
            raise IllegalTransitionError.of(f"partition {self.index} of {self.tensor.name!r}", self.stage, stage)
        self.stage = stage

    @property
    def priority(self) -> int:
        """Higher is pushed first. The front of a gradient goes as gradients become ready, see HEAD_FRACTION."""
        spec = self.tensor.spec
        is_front = self.dense_offset < HEAD_FRACTION * spec.nbytes
        return max(spec.priority, PRIORITY_READY_ORDER) if is_front else spec.priority

    @property
    def dense_offset(self) -> int:
        """Where it lies in a rank's memory."""
        codec = self.tensor.codec
        if codec is None:
            return self.offset
        return self.offset // codec.item_bytes * codec.block * self.tensor.spec.dtype.itemsize

    @property
    def dense_length(self) -> int:
        """Its size in a rank's memory: the tensor's last block may be shorter than others."""
        codec, spec = self.tensor.codec, self.tensor.spec
        if codec is None:
            return self.length
        whole = self.length // codec.item_bytes * codec.block * spec.dtype.itemsize
        return min(whole, spec.nbytes - self.dense_offset)

    @property
    def written_bytes(self) -> int:
        """It is there once so many bytes of the tensor are, see TensorChunks."""
        return self.dense_offset + self.dense_length

    @property
    def contributes(self) -> bool:
        """This machine sends something of its own to the server."""
        return self.tensor.contributes

    @property
    def wants_result(self) -> bool:
        """The answer brings something: not to the root of a broadcast, or if all local ranks have joined."""
        return self.tensor.root_slot is None and bool(self.tensor.slots)

    @property
    def is_acknowledged(self) -> bool:
        """This machine contributes to a sum, and needs only to hear that it is taken."""
        return False

    @property
    def is_pulled(self) -> bool:
        """This machine only asks for the result, once it is due: this takes no turn of others, and no credit."""
        return False

    @property
    def root_machine(self) -> int:
        """Where a broadcast reads it."""
        return self.tensor.root_machine

    def given(self, round_: int) -> tuple[Block, int] | None:
        """(block, offset in it) of this machine's contribution to a round, see ``Tensor.given``."""
        block = self.tensor.given(round_)
        return (block, self.offset) if block is not None else None

    @property
    def contribution(self) -> tuple[Block, int]:
        """(block, offset in it) of this machine's contribution to the current round."""
        return self.tensor.contribution, self.offset

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.dense_length // self.tensor.spec.dtype.itemsize

    @property
    def outputs(self) -> tuple[int, ...]:
        """Addresses of the local results that a delivery has to write."""
        return self.tensor.results(self.dense_offset)

    @property
    def result_offset(self) -> int:
        """Where it lies in a result."""
        return self.dense_offset

    @property
    def takers(self) -> tuple[RankSlot, ...]:
        """The local ranks that get its result."""
        return self.tensor.slots


@dataclass(slots=True, eq=False)
class AccumulatedPart(Part):
    """A partition of an ACCUMULATE. The latest answer is copied to where the contribution to its round lay: a server
    that has not got the values may need it. ``copied_round``: its round; 0: there was none yet. ``clock``: what it
    contains (see server/accumulators.py). ``added_at``: the version that this machine's last contribution made, 0 if
    that is not known. ``told``: of the answer that comes next: the round, what it contains, and ``added_at``.
    ``copied_epoch``, ``told_epoch``: in which it came.

    With a codec, offset and length are of values, up to the end of the last block. Behind the copy of all values, a
    contribution has the codes of changes. ``changes``: of an answer that brings changes instead of values, the
    addresses of their codes; 0: that of this machine's own."""

    copied_round: int = 0
    clock: tuple[int, ...] = ()
    added_at: int = 0
    told: tuple[int, tuple[int, ...], int] = (0, (), 0)
    copied_epoch: int = 0
    told_epoch: int = 0
    changes: tuple[int, ...] = ()

    @property
    def dense_offset(self) -> int:
        return self.offset

    @property
    def dense_length(self) -> int:
        return min(self.length, self.tensor.spec.nbytes - self.offset)

    def codes_change(self, round_: int) -> bool:
        """What this machine gives to a round is coded. The first one brings values."""
        return self.tensor.codec is not None and round_ > 1

    @property
    def contribution(self) -> tuple[Block, int]:
        codec, spec = self.tensor.codec, self.tensor.spec
        if codec is None or not self.codes_change(self.tensor.round):
            return self.tensor.contribution, self.offset
        return self.tensor.contribution, spec.sent_nbytes + self.offset // spec.sent_itemsize * codec.item_bytes

    @property
    def copy_before(self) -> int:
        """The address of the copy of the round before."""
        return self.tensor.contributions[(self.tensor.round - 1) % 2].address + self.offset

    @property
    def outputs(self) -> tuple[int, ...]:
        return (*self.tensor.results(self.dense_offset), self.tensor.contribution.address + self.offset)


@dataclass(slots=True, eq=False)
class SumRequest:
    """Another machine wants this machine's sum of a part. ``origin``: where to send it, and as what; opaque."""

    origin: object
    machine: int
    key: int
    generation: int
    index: int
    round: int


@dataclass(slots=True, eq=False)
class ScatterPart(Part):
    """A partition whose result is for one rank. ``owner``: its global rank; ``piece_offset``: where the owner's piece
    begins in a rank's memory; ``dense_offset`` and ``dense_length``: where the partition lies there. ``request``: the
    owner's machine has asked for this machine's sum.

    At the owner's machine, in the current round: ``sums``, addresses of the machines' sums; ``missing``, machines that
    have not sent theirs; ``asks``, under way; ``frames``, what keeps received memory.
    """

    owner: int = -1
    piece_offset: int = 0
    dense_offset: int = 0
    dense_length: int = 0
    written_bytes: int = 0
    request: SumRequest | None = None
    sums: dict[int, int] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    asks: list[AskSum] = field(default_factory=list)
    frames: list[object] = field(default_factory=list)

    @property
    def outputs(self) -> tuple[int, ...]:
        return tuple(slot.result.address + self.result_offset for slot in self.takers)

    @property
    def result_offset(self) -> int:
        return self.dense_offset - self.piece_offset

    @property
    def takers(self) -> tuple[RankSlot, ...]:
        own = self.owner - self.tensor.first_rank
        return tuple(slot for slot in self.tensor.slots if slot.local_rank == own)


@dataclass(slots=True, eq=False)
class RankSlot:
    """One local rank's memory for a tensor, and how much of the current round's contribution is there.

    ``coded_state``: what the machine keeps from round to round for the tensor's codec (``Codec.state_nbytes``, one
    after the other), zeros at first. The first local rank of a group has it in its memory, so that it can save and load
    it while no round of the tensor is under way. ``is_coded``: a tensor has it by now; a later one gets no part of it.
    """

    id: int
    local_rank: int
    spec: TensorSpec
    inputs: tuple[Block, ...]
    result: Block
    round: int = 0  # the rank's own count of rounds it has begun
    ready_bytes: int = -1  # of the current round; -1: the rank has not come
    ready_since: float = 0.0
    tensor: Tensor | None = None  # once all ranks agreed
    state: SlotState = SlotState.ACTIVE
    arriving: Arriving | None = None  # if the rank takes results in chunks
    coded_state: Block | None = None
    is_coded: bool = False
    copies: int = 0  # of pieces, under way to its result

    def move_to(self, state: SlotState) -> None:
        """Raises IllegalTransitionError."""
        if state not in self.state.after:
            raise IllegalTransitionError.of(f"slot {self.id} of {self.spec.name!r}", self.state, state)
        self.state = state

    def rank_left(self) -> None:
        """Its rank has left. Of a slot that is void, or whose rank has joined, nothing changes by that."""
        if self.state is SlotState.ACTIVE:
            self.move_to(SlotState.LEFT)
        elif self.state is SlotState.LAST_ROUND:
            self.move_to(SlotState.LEFT_IN_LAST_ROUND)

    def rank_joined(self) -> None:
        """Its rank has joined, or has done so in the round that is over by now."""
        if self.ready_bytes < 0:
            self.move_to(SlotState.JOINED)
        elif not self.state.has_joined:
            self.move_to(SlotState.LEFT_IN_LAST_ROUND if self.state.has_left else SlotState.LAST_ROUND)

    @property
    def is_void(self) -> bool:
        """Nothing will come of what its rank hands over, which it may not know yet."""
        return self.state is _VOID or (self.tensor is not None and self.tensor.state.is_void)

    @property
    def waits(self) -> bool:
        """Its rank has begun a round, and is there to see its end."""
        return self.ready_bytes >= 0 and not self.state.has_left

    @property
    def begun(self) -> int:
        """The latest round of the tensor that its rank has begun; 0: none."""
        if self.tensor is None:
            return 0
        return self.tensor.round if self.ready_bytes >= 0 else self.tensor.round - 1

    @property
    def input(self) -> Block:
        """Where the contribution to the current round lies."""
        return self.inputs[(self.round - 1) % len(self.inputs)]


@dataclass(slots=True, eq=False)
class Tensor:
    """``slots``: of the local ranks that take part, in order. ``contributions``: where the machine's sums lie, by
    parity of the round (a contribution outlives its round, until the next one is complete); empty if a rank's own
    input serves. ``root_slot``: what a broadcast reads, None if it is on another machine.
    ``machines``: how many take part; 0: all of several. ``first_rank``: the global rank of this machine's first.

    Data, whatever the state: ``ending``, why it is void once ``last_round`` is delivered (None unless it has been
    ENDING); ``joined``, slots that take no more part; ``has_last_rounds``, slots take part in the current round for the
    last time; ``passes_from``, the first round to which this machine contributes nothing, if no slot takes part.
    ``is_resent`` and ``awaited_round`` of a Part are such facts of a round, too."""

    name: str
    generation: int
    spec: TensorSpec
    slots: tuple[RankSlot, ...]
    contributions: tuple[Block, ...] = ()
    root_slot: RankSlot | None = None
    root_machine: int = 0xFFFF
    machines: int = 0
    first_rank: int = 0
    parts: list[Part] = field(default_factory=list)
    key: int = 0
    round: int = 1  # the current one
    begun: int = 0  # partitions of the current round that have left WAITING
    finished: int = 0  # partitions of the current round that are DONE
    running: int = 0  # kernels at work on this tensor's memory
    state: TensorState = TensorState.ACTIVE
    ending: BytePSError | None = None
    last_round: int = 0
    joined: tuple[RankSlot, ...] = ()
    has_last_rounds: bool = False
    passes_from: int = 0
    blame: int = 0  # ranks that made the current round's result NaN or infinite, as far as it is there

    def __post_init__(self) -> None:
        self.key = key_of(self.name)

    def move_to(self, state: TensorState) -> None:
        """Raises IllegalTransitionError."""
        if state not in self.state.after:
            raise IllegalTransitionError.of(f"tensor {self.name!r}", self.state, state)
        self.state = state

    def end_after(self, round_: int, error: BytePSError) -> None:
        """It is void once this round is delivered."""
        self.move_to(TensorState.ENDING)
        self.ending, self.last_round = error, round_

    @property
    def is_used(self) -> bool:
        """A kernel runs on its memory, or another machine may lack what was given."""
        return bool(self.running) or self.state is TensorState.KEPT

    @property
    def codec(self) -> Codec | None:
        """How it is coded between machines; None: as its dtype says, or nothing is sent."""
        return None if self.is_alone else self.spec.codec

    @property
    def is_alone(self) -> bool:
        """No other machine takes part: nothing is sent."""
        return self.machines == 1

    def is_past(self, round_: int) -> bool:
        """No local rank waits for this round, or an earlier one, or will."""
        return self.round > round_ or not self.slots

    @property
    def ready_bytes(self) -> int:
        """Bytes that all local ranks have handed over; -1 before all have come."""
        return min(slot.ready_bytes for slot in self.slots)

    @property
    def contribution(self) -> Block:
        """Where this machine's contribution to the current round lies."""
        if self.contributions:
            return self.contributions[self.round % 2]
        return (self.root_slot or self.slots[0]).input

    def given(self, round_: int) -> Block | None:
        """Where its contribution to the current round, if all is handed over, or to the one before lies; None if it
        gave none."""
        if self.spec.op is Op.BROADCAST and self.root_slot is None:
            return None
        if not self.slots and round_ >= self.passes_from:
            return None
        if self.contributions:
            return self.contributions[round_ % 2]
        slot = self.root_slot or (self.slots[0] if self.slots else self.joined[0])
        latest = self.round if slot.ready_bytes >= 0 else self.round - 1 if self.slots else self.passes_from - 1
        return slot.inputs[(slot.round - 1 - (latest - round_)) % len(slot.inputs)]

    def has_result(self, part: Part, round_: int) -> bool:
        """This machine has the result of a round, the current one or the one before."""
        is_answered = part.stage is DELIVERING or part.stage is DONE
        return round_ == self.round - 1 or (round_ == self.round and is_answered)

    @property
    def contributes(self) -> bool:
        """False if the tensor is broadcast from another machine, or all local ranks of its group have joined."""
        return bool(self.slots) and (self.spec.op is not Op.BROADCAST or self.root_slot is not None)

    def results(self, offset: int) -> tuple[int, ...]:
        """Addresses, at ``offset``, of the local ranks' results that a delivery has to write."""
        return tuple(
            slot.result.address + offset
            for slot in self.slots
            # the root of a broadcast may already have its result: its own input
            if not (slot is self.root_slot and slot.result.address == slot.input.address)
        )


@dataclass(slots=True)
class Compute:
    """Run a kernel over one partition, then call ``RoundPipeline.computed``. ``inputs`` and ``outputs``: addresses
    of the partition in this process. Used to sum the local ranks and to deliver an answer to them. ``work``: the
    call as the executor has bound it, kept where the same Compute comes again each round. ``report``: what it has
    found, if the tensor is guarded."""

    part: Part
    op: Op
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    divisor: int
    work: Callable[[], None] | None = None
    report: Report | None = None


@dataclass(slots=True, eq=False)
class AskSum:
    """Fetch machine ``server``'s sum of a part."""

    part: ScatterPart
    round: int
    server: int
    length: int
