"""What the pure core asks the service to do. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from byteps_py.errors import BytePSError
from byteps_py.tensors import TensorSpec
from byteps_py.worker.core.events import TensorForgotten, TensorVoid
from byteps_py.worker.core.hosted_steps import HostedAction
from byteps_py.worker.core.pieces import Copy, CopyHere, Delivered, FetchPiece, Outgrown, RefusePiece, Serve
from byteps_py.worker.core.tensor import Compute, Part, RankSlot, ScatterPart, SumRequest, Tensor


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
