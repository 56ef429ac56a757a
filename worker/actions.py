"""What the pure core asks the service to do. Data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from byteps_py.errors import BytePSError
from byteps_py.tensors import Op, TensorSpec
from byteps_py.worker.tensor import Part, RankSlot, ScatterPart, SumRequest, Tensor

if TYPE_CHECKING:
    from byteps_py.kernels.reduction import Report
    from byteps_py.worker.pieces import Transfer


@dataclass(slots=True)
class Compute:
    """Run a kernel over one partition, then call ``Pipeline.computed``. ``inputs`` and ``outputs``: addresses
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


@dataclass(slots=True)
class Push:
    """Send the machine's contribution to the partition's server (only ask for the result, if the tensor is
    broadcast from elsewhere); its answer goes to ``Pipeline.answered``."""

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


@dataclass(slots=True, eq=False)
class AskSum:
    """What is fetched of a part: the sum of machine ``server``."""

    part: ScatterPart
    round: int
    server: int
    length: int


@dataclass(slots=True)
class Fetch:
    """Ask machine ``item.server`` for it; its bytes go to ``Direct.arrived``, or to ``Scatter.arrived``."""

    item: Transfer | AskSum


@dataclass(slots=True)
class Lend:
    """Send this machine's sum of a part, from where it lies; once it may change, call ``Pipeline.lent``."""

    part: ScatterPart
    request: SumRequest


@dataclass(slots=True)
class Show:
    """Tell the rank of ``slot`` that these strips of its current result are there."""

    slot: RankSlot
    strips: list[int]


@dataclass(slots=True)
class Done:
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
class Release:
    """Nothing uses this memory any more."""

    slots: tuple[RankSlot, ...]
    tensor: Tensor | None = None  # also its contributions


Action = Compute | Push | Withdraw | Supply | Lend | Fetch | Show | Done | Fail | SendBallot | Release
