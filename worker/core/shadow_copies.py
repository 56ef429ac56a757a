"""Copies of optimizer states at servers, with the messages, events and actions about them. Pure data; the rules are in
shadowing.py.

A partition's copy on a server is in one of these states:

    EMPTY ─a step ends, and the credit allows─► COPYING ─the states are copied─► SEEDING ─held─► FOLLOWING
      ▲ └──────────────── the server lacks something, or is no member any more ────┴───────────────┘
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from byteps_py.kernels.optimizer_steps import StepSegment
from byteps_py.worker.core import IllegalTransitionError
from byteps_py.worker.core.hosted_steps import OwnedPart
from byteps_py.worker.core.topology import Topology

#: Memory of the shell: of copied states, or of a sum.
M = TypeVar("M")


class CopyProgress(enum.Enum):
    """The progress of a copy of a partition's states."""

    EMPTY = "the server has no states"
    COPYING = "states are being copied"
    SEEDING = "states are on their way"
    FOLLOWING = "in step"

    after: tuple[CopyProgress, ...]


EMPTY, COPYING, SEEDING, FOLLOWING = CopyProgress
_COPY_STATES: dict[CopyProgress, tuple[CopyProgress, ...]] = {
    EMPTY: (COPYING,),
    COPYING: (SEEDING, EMPTY),
    SEEDING: (FOLLOWING, EMPTY),
    FOLLOWING: (EMPTY,),
}
for _state, _after in _COPY_STATES.items():
    _state.after = _after


@dataclass(slots=True, eq=False)
class ShadowMemory(Generic[M]):
    """Memory of unacknowledged messages. ``users``: their number."""

    memory: M
    users: int = 0


@dataclass(slots=True, eq=False)
class ShadowMessage(Generic[M]):
    """A message that a server has not acknowledged. ``step``: the step that the acknowledgement will name.
    ``is_awaited``: until then the step is not held for rank ``rank``. ``is_void``: the message is of no use any more,
    and not sent again; its memory stays until the server has read it, because it is sent from where it lies."""

    server: int
    rank: int
    step: int
    is_awaited: bool
    held: ShadowMemory[M] | None
    is_void: bool = field(default=False, init=False)


@dataclass(slots=True, eq=False)
class SendStates(ShadowMessage[M]):
    """The states of a partition after ``step``; the memory has them one after the other."""

    copy: ShadowCopy[M]


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """Numbers that a rank sends with a step. ``step``: its number; ``durable``: see shadowing.py; ``is_whole``: all
    partitions of all ranks have been FOLLOWING."""

    step: int
    durable: int
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class StepMade:
    """A step of a partition. ``round``: of the sum, which was divided by ``divisor``; ``segments``: of elements of the
    partition."""

    numbers: StepNumbers
    round: int
    divisor: int
    segments: tuple[StepSegment, ...]


@dataclass(slots=True, eq=False)
class SendStep(ShadowMessage[M]):
    """A step, and its sum if there is memory. ``before``: the step before it that the server has been told of."""

    copy: ShadowCopy[M]
    made: StepMade
    before: int


@dataclass(slots=True, eq=False)
class RecordCopies:
    """The copies of a rank's record of a step. ``sent``: the servers to which it was sent, ``held``: those that have
    said that they hold it and are still members."""

    sent: set[int]
    held: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class SendRecord(ShadowMessage[M]):
    """A rank's record of a step. The memory has the packed record and its attachment. ``copies``: of this record;
    ``is_paced``: the rank waits with the next one until ``TellRecorded``."""

    run: int
    copies: RecordCopies
    is_paced: bool = False

    @property
    def is_last_hope(self) -> bool:
        """No other server has the record, or may yet take it."""
        return not self.copies.held and (self.held is None or self.held.users == 1)


@dataclass(slots=True)
class SendEnd:
    """The server is to forget a partition."""

    server: int
    part: OwnedPart


@dataclass(slots=True)
class ReleaseMemory(Generic[M]):
    """No message needs it any more."""

    memory: M


@dataclass(slots=True)
class CatchUp:
    """A partition whose next sum had to wait, see ``Shadowing.is_behind``, is not behind any more."""

    part: OwnedPart


@dataclass(slots=True)
class CopyStates:
    """Copy the states of the partition of a StepDue right after its step."""


@dataclass(slots=True)
class TellHeld:
    """Tell a rank that steps up to this one are held, and whether all of its partitions have been FOLLOWING.
    ``refused``: the latest step whose record no server has taken; 0: there is none."""

    rank: int
    step: int
    is_whole: bool
    refused: int = 0


@dataclass(slots=True)
class TellRecorded:
    """Tell a rank that servers have its record of this step, or that none takes it."""

    rank: int
    run: int
    step: int


SentMessage = SendStates[M] | SendStep[M] | SendRecord[M]
ShadowingAction = (
    SendStates[M] | SendStep[M] | SendRecord[M] | SendEnd | ReleaseMemory[M] | CatchUp | CopyStates | TellHeld
    | TellRecorded
)  # fmt: skip


@dataclass(slots=True, eq=False)
class ShadowCopy(Generic[M]):
    """The states of a partition at one server. ``last``: the step that it was told of last; ``seed``: that of its
    states; ``refusals``: how often the server has not taken them, which are not sent again before step
    ``not_before``."""

    part: ShadowedPiece[M]
    server: int
    state: CopyProgress = EMPTY
    seed: int = 0
    last: int = 0
    refusals: int = 0
    not_before: int = 0

    def move_to(self, state: CopyProgress) -> None:
        """Raises IllegalTransitionError."""
        if state not in self.state.after:
            raise IllegalTransitionError.of(f"the copy of {self.part} at server {self.server}", self.state, state)
        self.state = state


@dataclass(slots=True, eq=False)
class ShadowedPiece(Generic[M]):
    """A partition of gradients whose states are copied. ``copies``: while it moves, the old ones and the new ones.
    ``due``: a step that its rank has begun and this partition has yet to make; 0: none. ``state_bytes``: of all.
    ``sums``: messages with its sums that are unacknowledged."""

    part: OwnedPart
    run: int
    state_bytes: int
    copies: list[ShadowCopy[M]] = field(default_factory=list)
    due: int = 0
    sums: int = 0
    has_followed: bool = False  # with all steps that it was told of

    @property
    def place(self) -> tuple[int, int]:
        return self.part.tensor.key, self.part.index

    def __str__(self) -> str:
        return f"partition {self.part.index} of {self.part.tensor.name!r}"


@dataclass(slots=True)
class StatesWatched:
    """A rank's partitions, and the bytes of their states, are to be copied. Those that have been before, in an earlier
    generation of the tensor, go on. A new run takes the place of the one before."""

    rank: int
    run: int
    parts: Iterable[tuple[OwnedPart, int]]


@dataclass(slots=True)
class StatesEnded:
    """The states of these partitions are given up."""

    parts: Iterable[OwnedPart]


@dataclass(slots=True)
class StepBegun:
    """A rank steps with these partitions, each once its sum is there."""

    rank: int
    step: int
    parts: Iterable[OwnedPart]


@dataclass(slots=True)
class StepDue:
    """A partition is about to step. A CopyStates answers if its states are to be copied then."""

    part: OwnedPart


@dataclass(slots=True)
class PartitionStepped(Generic[M]):
    """A partition's step is made. ``states``: their copy, after a CopyStates; ``total``: the sum, if ``needs_sum`` said
    so."""

    part: OwnedPart
    made: StepMade
    states: M | None
    total: M | None


@dataclass(slots=True)
class RecordPacked(Generic[M]):
    """A rank's record of a step, once it has begun the step of all of its partitions. ``is_paced``: see
    SendRecord."""

    rank: int
    run: int
    step: int
    packed: M
    is_paced: bool = False


@dataclass(slots=True)
class ServerHolds:
    """A server holds the states of a partition after a step, or a step, or a record. ``place``: key and index of the
    partition, or run and rank of the record."""

    server: int
    place: tuple[int, int]
    step: int


@dataclass(slots=True)
class ServerLacks:
    """A server can't go on with a partition: its states will be copied once more. Or it does not take a record: a later
    one will do. ``place``: as in ServerHolds."""

    server: int
    place: tuple[int, int]
    step: int


@dataclass(slots=True)
class ServerReconnected:
    """There is a new connection to a server: what it has not acknowledged may be lost."""

    server: int


@dataclass(slots=True)
class TopologyChanged:
    """Other servers, or other servers of partitions, which know them by now."""

    topology: Topology


ShadowingEvent = (
    StatesWatched | StatesEnded | StepBegun | StepDue | PartitionStepped[M] | RecordPacked[M] | ServerHolds
    | ServerLacks | ServerReconnected | TopologyChanged
)  # fmt: skip
