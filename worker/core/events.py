"""The events that RoundPipeline, Agreement and PieceExchange handle, and the actions that they return for the service
to carry out. Data only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from byteps_py.errors import BytePSError, MismatchError
from byteps_py.tensors import Layout, TensorSpec
from byteps_py.worker.core.hosted_steps import HostedAction, MakeStep
from byteps_py.worker.core.owners import OwnedPiece
from byteps_py.worker.core.pieces import (
    Copy,
    CopyHere,
    Delivered,
    FetchPiece,
    Outgrown,
    Pair,
    PieceRequest,
    Receipt,
    RefusePiece,
    Serve,
    Transfer,
)
from byteps_py.worker.core.tensor import AccumulatedPart, Compute, Part, RankSlot, ScatterPart, SumRequest, Tensor

# ---- to RoundPipeline: what the ranks of this machine do -------------------------------------------------------


@dataclass(slots=True)
class TensorAgreed:
    """All ranks agree on a tensor. ``pieces``: (offset, length, server) of its partitions, in the order in which they
    are handed over; with the owner for the server if it scatters."""

    tensor: Tensor
    pieces: Sequence[tuple[int, int, int]] | Sequence[OwnedPiece]


@dataclass(slots=True)
class BytesReady:
    """A rank has handed over the first ``nbytes`` of its own round number ``round``."""

    slot: RankSlot
    round: int
    nbytes: int


@dataclass(slots=True)
class SlotJoined:
    """The slot's rank has joined: from the next round on, which may be the current one, it takes no part."""

    slot: RankSlot


@dataclass(slots=True)
class StepArmed:
    """A rank has said with which numbers its partitions step. ``is_last``: no other step uses this round's sums."""

    slot: RankSlot
    round: int
    is_last: bool = True


@dataclass(slots=True)
class StepSkipped:
    """A rank gives the sums of its partitions up."""

    slot: RankSlot
    round: int


@dataclass(slots=True)
class SumsAwaited:
    """A rank waits for the sums of its partitions."""

    slot: RankSlot


@dataclass(slots=True)
class TensorVoid:
    """The tensor is void: its rounds are forgotten, its credit is given back, and its memory once no kernel runs. With
    ``is_kept``, what it gave to the last round stays until TensorForgotten."""

    tensor: Tensor
    is_kept: bool = False


@dataclass(slots=True)
class TensorForgotten:
    """No other machine can lack a result of a tensor that was void, and kept."""

    tensor: Tensor


# ---- to RoundPipeline: what kernels and the network have done --------------------------------------------------


@dataclass(slots=True)
class Computed:
    """A Compute, or a SumForOwner, has ended."""

    part: Part


@dataclass(slots=True)
class StepEnded:
    """A MakeStep has ended: the parameters lie in the local ranks' results, and in this machine's contribution."""

    step: MakeStep


@dataclass(slots=True)
class Answered:
    """The server's answer to a push lies at address ``source`` (0: none, for the root of a broadcast)."""

    part: Part
    round: int
    source: int


@dataclass(slots=True)
class RoundsAwaited:
    """Other machines have given to these rounds of partitions, and wait for this one: their turn comes first, now or
    once they are ready."""

    rounds: Iterable[tuple[Part, int]]


@dataclass(slots=True)
class ResultWanted:
    """Another machine lacks a round's result. If this one has it, it won't send its part by itself."""

    part: Part
    round: int
    server: int


@dataclass(slots=True)
class ClockTold:
    """The server's next answer, to this round's push, contains so many rounds of each machine. ``added_at``: the
    version that the push made."""

    part: AccumulatedPart
    round: int
    clock: tuple[int, ...]
    added_at: int = 0


@dataclass(slots=True)
class CopyWanted:
    """The partition's server lacks its values: it wants to know what this machine's copy contains, or, with
    ``is_whole``, the copy."""

    part: AccumulatedPart
    is_whole: bool


@dataclass(slots=True)
class SumTaken:
    """The machine for which this machine's sum of a part is has taken it."""

    part: ScatterPart
    round: int


@dataclass(slots=True)
class ServersChanged:
    """Other servers, by member id, add these partitions from now on; also what those before have not answered."""

    moves: Sequence[tuple[Part, int]]


@dataclass(slots=True)
class MessagesLost:
    """What was sent of these partitions, or its answer, is lost where it is not there yet."""

    parts: Iterable[Part]


@dataclass(slots=True)
class TimePassed:
    """Send what the credit allows by now."""


RoundEvent = (
    TensorAgreed
    | BytesReady
    | SlotJoined
    | StepArmed
    | StepSkipped
    | SumsAwaited
    | TensorVoid
    | TensorForgotten
    | Computed
    | StepEnded
    | Answered
    | RoundsAwaited
    | ResultWanted
    | ClockTold
    | CopyWanted
    | SumTaken
    | ServersChanged
    | MessagesLost
    | TimePassed
)

# ---- to Agreement ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class NameDeclared:
    """A rank declares a name; ``slot`` is its memory."""

    slot: RankSlot


@dataclass(slots=True)
class NameReopened:
    """Another machine, which had got ``rounds`` rounds of it, votes on the next generation of a name that is agreed
    here. This machine will get them too, so a rank that waits in one of them does not vote by that."""

    name: str
    generation: int
    rounds: int


@dataclass(slots=True)
class NameAccepted:
    """All ranks of its group agree on ``spec``. ``rounds``: of the tensor before, which will be delivered."""

    name: str
    generation: int
    spec: TensorSpec
    rounds: int = 0


@dataclass(slots=True)
class NameRejected:
    """The ranks disagree: the name is undeclared. ``late``: global ranks that should have voted, and whose votes the
    scheduler does not know. ``rounds``: as in NameAccepted."""

    name: str
    generation: int
    error: BytePSError
    late: Iterable[int] = ()
    rounds: int = 0


@dataclass(slots=True)
class VerdictApplied:
    """What followed from a verdict is done: go on with the declarations that local ranks made meanwhile."""

    name: str


@dataclass(slots=True)
class TensorEnded:
    """The last round of a tensor that is ENDING has been delivered."""

    tensor: Tensor


@dataclass(slots=True)
class LocalRankJoined:
    """A rank votes no more, unless it has already."""

    local_rank: int


@dataclass(slots=True)
class RankJoined:
    """Global ``rank`` takes part in no round after ``last_rounds``, which are by name and generation; the generation
    of a gather or an exchange is 0."""

    rank: int
    last_rounds: Mapping[tuple[str, int], int]


@dataclass(slots=True)
class AllRanksJoined:
    """All ranks have joined, and none waits: all declarations are void, with ``error``."""

    error: BytePSError


@dataclass(slots=True)
class RankLeft:
    """A rank has left: what it declared and is not agreed on yet is no vote any more."""

    local_rank: int


#: BytesReady may be a vote, too.
AgreementEvent = (
    NameDeclared | BytesReady | NameReopened | NameAccepted | NameRejected | VerdictApplied | TensorEnded
    | LocalRankJoined | RankJoined | AllRanksJoined | RankLeft
)  # fmt: skip

# ---- to PieceExchange ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PiecesDeclared:
    """Global ``rank`` declares a name, for the first time or with more room."""

    rank: int
    slot: RankSlot


@dataclass(slots=True)
class PiecesReady:
    """A rank hands over a round. ``layout``: if it differs from the last."""

    slot: RankSlot
    round: int
    layout: Layout | None


@dataclass(slots=True)
class PieceArrived:
    """The bytes of a FetchPiece lie at address ``source``, until PieceCopied."""

    transfer: Transfer
    source: int


@dataclass(slots=True)
class PieceRefused:
    """The machine that has the piece of a FetchPiece says that its size is another."""

    transfer: Transfer
    error: MismatchError


@dataclass(slots=True)
class PieceCopied:
    """A Copy has ended."""

    transfer: Transfer


@dataclass(slots=True)
class CopiedHere:
    """A CopyHere has ended."""

    pairs: Sequence[Pair]


@dataclass(slots=True)
class MachineLost:
    """The pieces that a machine has requested can't be sent to it any more."""

    machine: int


#: A PieceRequest and a Receipt are another machine's messages, and events as they are.
PieceEvent = (
    PiecesDeclared | PiecesReady | PieceArrived | PieceRefused | PieceCopied | CopiedHere | MachineLost
    | PieceRequest | Receipt
)  # fmt: skip


@dataclass(slots=True)
class Push:
    """Send the machine's contribution to the partition's server (only ask for the result, if the tensor is
    broadcast from elsewhere); its answer is an Answered."""

    part: Part
    round: int


@dataclass(slots=True)
class Withdraw:
    """Tell server ``server`` that what it was given of a round goes elsewhere."""

    part: Part
    round: int
    server: int


@dataclass(slots=True)
class Supply:
    """Send what this machine gave to a round to ``server`` once more, for others that lack its result."""

    part: Part
    round: int
    server: int


@dataclass(slots=True)
class TellClock:
    """Tell the partition's server what this machine's copy contains."""

    part: AccumulatedPart


@dataclass(slots=True)
class Lend:
    """Send this machine's sum of a part, from where it lies; once it may change, it is a SumTaken."""

    part: ScatterPart
    request: SumRequest


@dataclass(slots=True)
class Show:
    """Tell the rank of ``slot`` that these chunks of its current result are there."""

    slot: RankSlot
    chunks: list[int]


@dataclass(slots=True)
class RoundDone:
    """A round is delivered. ``slots``: (local rank, slot id, the rank's own round number)."""

    tensor: Tensor
    slots: tuple[tuple[int, int, int], ...]


@dataclass(slots=True)
class Fail:
    """The declarations behind these slots are void: tell their ranks."""

    slots: tuple[RankSlot, ...]
    error: BytePSError


@dataclass(slots=True)
class SendBallot:
    """All local ranks have said what a tensor is: tell the scheduler. ``rounds``: how many of the generation
    before they have got. ``votes``: the distinct specs, and the local ranks that gave each."""

    name: str
    generation: int
    rounds: int
    votes: tuple[tuple[TensorSpec, tuple[int, ...]], ...]


@dataclass(slots=True)
class BeginTensor:
    """All ranks agree on a tensor: give it memory, place its partitions, and tell the pipeline (TensorAgreed)."""

    tensor: Tensor


@dataclass(slots=True)
class Release:
    """Nothing uses this memory any more."""

    slots: tuple[RankSlot, ...]
    tensor: Tensor | None = None  # also its contributions


#: TensorVoid and TensorForgotten are events for the pipeline, which the agreement asks to be passed on.
Action = (
    Compute
    | Push
    | Withdraw
    | Supply
    | TellClock
    | Lend
    | FetchPiece
    | Show
    | RoundDone
    | Fail
    | SendBallot
    | BeginTensor
    | TensorVoid
    | TensorForgotten
    | Release
    | HostedAction
)
#: Of gathers and exchanges.
DirectAction = Copy | CopyHere | FetchPiece | Show | Serve | RefusePiece | Delivered | Fail | Outgrown
