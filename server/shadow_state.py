"""The states that a summation server keeps in step: facts about them, events, and actions.

Pure data. The rules are in shadow.py.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from byteps_py.kernels.optimizer_steps import StepSegment
from byteps_py.kernels.update_rules import StepKind
from byteps_py.server.shadow_records import RunRecords, SizedMemory
from byteps_py.tensor_codec import Codec
from byteps_py.wire.data_link import Header, StatesRead

#: Where a partition is in its run: the tensor's key, and the partition's index.
Place = tuple[int, int]


class ShadowTransitionError(RuntimeError):
    """Something can't happen in this state: a fault of this server, not of a peer."""


class CopyState(enum.Enum):
    """See the table in shadow.py."""

    FILLING = "waiting for its states"
    READY = "complete"
    STEPPING = "being stepped"
    BROKEN = "half a step was made"
    DROPPED = "given up"

    after: tuple[CopyState, ...]

    @property
    def is_whole(self) -> bool:
        """The states can be read, at once or when the step under way is made."""
        return self in (CopyState.READY, CopyState.STEPPING)


COPY_STATES: dict[CopyState, tuple[CopyState, ...]] = {
    CopyState.FILLING: (CopyState.READY, CopyState.DROPPED),
    CopyState.READY: (CopyState.STEPPING, CopyState.DROPPED),
    CopyState.STEPPING: (CopyState.READY, CopyState.BROKEN, CopyState.DROPPED),
    CopyState.BROKEN: (CopyState.DROPPED,),
    CopyState.DROPPED: (),
}
for _state, _states in COPY_STATES.items():
    _state.after = _states


@dataclass(frozen=True, slots=True)
class PartFacts:
    """A partition of gradients whose states are kept. Sizes are bytes.

    Attributes:
        run: the optimizer's, see ShadowPartition.
        name: the tensor's.
        key: the tensor's.
        index: the partition's.
        first: its first element in the tensor.
        count: its elements.
        kind: the kind of its steps.
        codec: of its sums; None: they are not coded. Its machines keep nothing from round to round.
    """

    run: int
    name: str
    key: int
    index: int
    first: int
    count: int
    kind: StepKind
    codec: Codec | None = None

    def __str__(self) -> str:
        return f"elements {self.first} to {self.first + self.count} of {self.name!r}"

    @property
    def state_nbytes(self) -> int:
        """The bytes of one state."""
        return self.count * self.kind.state_itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of all states."""
        return self.kind.states * self.state_nbytes

    @property
    def sum_nbytes(self) -> int:
        """The bytes of a sum of gradients, as servers have it."""
        if self.codec is not None:
            return self.codec.coded_nbytes(self.count)
        return self.count * self.kind.gradient.itemsize


@dataclass(slots=True, eq=False)
class HeldStep:
    """A step that can be applied. ``before``: the step that it follows. ``total``: the sum, of round ``round``.
    ``origin``, ``header``: to answer."""

    number: int
    before: int
    round: int
    total: SizedMemory
    divisor: int
    segments: tuple[StepSegment, ...]
    origin: object
    header: Header


@dataclass(slots=True, eq=False)
class StatesCopy:
    """The states of a partition, as they are after step ``base``, and the steps that can follow.

    Attributes:
        facts: the partition.
        generation: the tensor's when the copy was begun.
        seeded: the step of the states that were sent.
        base: the step of the states as they are; while it is STEPPING, as they will be.
        origin: the sender of the BEGIN, to answer; ``header``: its header.
        memory: given by the shell; all states, one after another.
        filled: for each state, the number of bytes that have come.
        steps: the steps that are not applied yet, in order; without the one that is being applied.
        wanted: the last step that a reader waits for.
        reads: the readers that wait.
    """

    facts: PartFacts
    generation: int
    seeded: int
    origin: object
    header: Header
    base: int = 0
    memory: Any = None
    state: CopyState = CopyState.FILLING
    filled: list[int] = field(default_factory=list)
    steps: deque[HeldStep] = field(default_factory=deque)
    wanted: int = -1
    reads: list[ReadAsked] = field(default_factory=list)
    reason: str = ""

    def step_to(self, state: CopyState) -> None:
        """Raises ShadowTransitionError."""
        if state not in self.state.after:
            raise ShadowTransitionError(f"the copy of {self.facts} is {self.state.name}: {state.name} can't follow")
        self.state = state

    def is_of(self, facts: PartFacts, generation: int, seeded: int) -> bool:
        """It is, or can become, the copy of these states as they were sent after step ``seeded``."""
        return self.state is not CopyState.BROKEN and (self.facts, self.generation, self.seeded) == (
            facts,
            generation,
            seeded,
        )

    @property
    def is_filled(self) -> bool:
        """All bytes of all states are there."""
        return all(nbytes == self.facts.state_nbytes for nbytes in self.filled)

    @property
    def last(self) -> int:
        """The last step that it can deliver."""
        return self.steps[-1].number if self.steps else self.base

    def delivers(self, step: int) -> bool:
        """The states can be read as they are after ``step``."""
        return self.state.is_whole and (step == self.base or any(held.number == step for held in self.steps))


@dataclass(slots=True, eq=False)
class ShadowedPart:
    """A partition in a run.

    Attributes:
        latest: the copy that was begun last; None if there is none.
        kept: a complete copy from before, which stays until the run is durable with the latest one.
        sums: the two that came last, by generation and round.
        job: the job in which it was begun, see JobReplaced.
    """

    facts: PartFacts
    latest: StatesCopy | None = None
    kept: StatesCopy | None = None
    sums: dict[tuple[int, int], SizedMemory] = field(default_factory=dict)
    job: int = 0

    @property
    def copies(self) -> list[StatesCopy]:
        """The copies whose states can be read."""
        return [copy for copy in (self.kept, self.latest) if copy is not None and copy.state.is_whole]


@dataclass(slots=True, eq=False)
class ShadowRun:
    """An optimizer's states in one incarnation of a job. ``job``: the last one that spoke of it. ``order``: when it was
    begun. ``is_whole``: all of its states have been held, wherever they are. ``generations``: of each tensor key, the
    newest generation with complete states here, and their step."""

    number: int
    job: int
    order: int
    durable: int = 0
    is_whole: bool = False
    heard_s: float = 0.0
    parts: dict[Place, ShadowedPart] = field(default_factory=dict)
    records: RunRecords = field(default_factory=RunRecords)
    generations: dict[int, tuple[int, int]] = field(default_factory=dict)


# ---- events ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OwnerMessage:
    """A SHADOW_… message. ``said``: its contents; or bytes of states, of a sum, or of a record's attachment.
    Nobody may change these from now on."""

    header: Header
    origin: object
    said: Any


@dataclass(frozen=True, slots=True)
class RoundSummed:
    """This server has taken a sum itself, which nobody may change from now on."""

    header: Header
    total: SizedMemory


@dataclass(frozen=True, slots=True)
class NoMemory:
    """There is none for ``copy``."""

    copy: StatesCopy
    reason: str


@dataclass(frozen=True, slots=True)
class StepApplied:
    """The thread pool has made the step of an ApplyStep, or failed and may have made half of it."""

    copy: StatesCopy
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class StepNotBegun:
    """The thread pool has not begun with an ApplyStep, and will not: the states are still those of before."""

    copy: StatesCopy
    step: HeldStep


@dataclass(frozen=True, slots=True)
class PoolStarted:
    """There is a thread pool again, after StepNotBegun."""


@dataclass(frozen=True, slots=True)
class JobReplaced:
    """From now on messages are of another job than before. Its runs replace those that are here, once all states of one
    of them are held. Copies that are incomplete will stay so."""


@dataclass(frozen=True, slots=True)
class HoldAsked:
    """A reader asks that no durable steps are applied, and no copies dropped that newer ones replace, for so long, at
    most LONGEST_HOLD_S; HoldOver is due then."""

    hold_s: float


@dataclass(frozen=True, slots=True)
class HoldOver:
    """The end of a hold may have come."""


@dataclass(frozen=True, slots=True)
class ReadAsked:
    """A reader wants states, as they are after a step that is held. Steps before are applied first. ``origin``,
    ``header``: to answer."""

    header: Header
    origin: object
    wanted: StatesRead


ShadowEvent = (
    OwnerMessage | RoundSummed | NoMemory | StepApplied | StepNotBegun | PoolStarted | JobReplaced | HoldAsked
    | HoldOver | ReadAsked
)  # fmt: skip

# ---- actions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AllocateStates:
    """Set ``copy.memory`` to ``copy.facts.nbytes`` of memory, or say NoMemory. Before that, the memory of ``spare``
    may be used again: nobody else has it."""

    copy: StatesCopy
    spare: Any = None


@dataclass(frozen=True, slots=True)
class FillStates:
    """Copy ``data`` to byte ``offset`` of state number ``state``."""

    copy: StatesCopy
    state: int
    offset: int
    data: Any


@dataclass(frozen=True, slots=True)
class ApplyStep:
    """Step the states of ``copy``, then say StepApplied; or StepNotBegun if no byte was written."""

    copy: StatesCopy
    step: HeldStep


@dataclass(frozen=True, slots=True)
class ShadowReply:
    """Send this to ``origin``: SHADOW_HELD, or SHADOW_LACKS with a sentence."""

    origin: object
    header: Header
    text: str = ""


@dataclass(frozen=True, slots=True)
class RefuseShadow:
    """Tell ``origin`` that no correct peer sends this."""

    origin: object
    header: Header
    text: str


@dataclass(frozen=True, slots=True)
class DeliverStates:
    """Give a reader its bytes of ``copy``, before the actions that follow: these may step it."""

    read: ReadAsked
    copy: StatesCopy


@dataclass(frozen=True, slots=True)
class RefuseRead:
    """Tell a reader why it gets nothing."""

    read: ReadAsked
    text: str


@dataclass(frozen=True, slots=True)
class ReplacedRun:
    """A run is forgotten, because all states of a newer one are held. To be logged."""

    run: ShadowRun
    by: ShadowRun


ShadowAction = (
    AllocateStates | FillStates | ApplyStep | ShadowReply | RefuseShadow | DeliverStates | RefuseRead | ReplacedRun
)
