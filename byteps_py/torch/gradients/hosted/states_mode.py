"""The place of a hosted optimizer's states: each machine has all of them, or each rank has its part.

    machine   every machine sums by the placement's formula, and makes the whole step for its ranks
    sharded   each rank owns 1/N: sums go to their owners, which send the parameters to all

A step in ``machine`` takes as long on the links as an all-reduce. It needs memory for all states on each machine, and
each machine makes the step of all elements.

A rank may have a part of the model only. The sums of a hosted optimizer are then of the ranks that share its
parameters, but clipping needs the norm of all parameters of the model, each once, and a step is skipped by all ranks or
by none: WholeModel says what the parts of one rank count for in the whole. Any thread that makes a step calls.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from byteps_py.errors import UsageError
from byteps_py.session import Session

#: Less than this is not worth the memory, and the time of the processors.
_WORTH = 1.02
#: With faster links, the processors of a machine take longer for the step of all elements than the links for the sums:
#: about 3 ns for AdamW and one element of 4 bytes.
_LINKS_BOUND_MBIT = 10_000.0
#: The states may take this part of the memory that a machine had left when the job began: models, data and the sums
#: need some, too.
_SHARE_OF_MEMORY = 0.5


class StatesMode(enum.Enum):
    """See the table of this module."""

    MACHINE = "machine"
    SHARDED = "sharded"


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """A mode, and why, in one sentence; none if the program has said it."""

    mode: StatesMode
    reason: str = ""

    @property
    def remark(self) -> str:
        """For ``bps status``."""
        return f"{self.mode.value}: {self.reason}" if self.reason else ""


def asked_for(hosted: object) -> StatesMode | None:
    """The mode that the argument ``hosted`` names; None if the choice is left to ``choose``. Raises UsageError for
    anything but True, "machine" and "sharded".

    >>> asked_for("machine"), asked_for(True)
    (<StatesMode.MACHINE: 'machine'>, None)
    """
    if hosted is True:
        return None
    for mode in StatesMode:
        if hosted == mode.value:
            return mode
    names = " or ".join(repr(mode.value) for mode in StatesMode)
    raise UsageError(f"hosted is {hosted!r}: give True, {names}, or False for an optimizer on the ranks")


def choose(
    session: Session, states_bytes: int, is_elastic: bool, group: Sequence[int] = (), is_shadowed: bool = False
) -> ModeChoice:
    """The mode for states of ``states_bytes`` in all, of the ranks of ``group``, () for all. The same on all of them:
    in an elastic job, some of them choose when other machines are there."""
    facts = session.machine_facts
    gain = facts.shadowed_gain if is_shadowed else facts.replicated_gain
    is_subset = 0 < len(group) < session.size
    room = _SHARE_OF_MEMORY * facts.memory_bytes
    if is_elastic:
        return ModeChoice(StatesMode.SHARDED, "the machines of an elastic job change")
    if is_subset:  # other ranks of a machine keep states of their own, and whose links are shared is not known
        return ModeChoice(StatesMode.SHARDED, "ranks of a process set keep the fewest states so")
    if session.num_machines == 1:
        return ModeChoice(StatesMode.SHARDED, "the ranks of one machine share its states in any case")
    if gain < _WORTH:
        return ModeChoice(StatesMode.SHARDED, "with these machines, states on each machine would make no step shorter")
    if not 0 < facts.slowest_mbit <= _LINKS_BOUND_MBIT:
        rate = f"{facts.slowest_mbit / 1000:g} Gbit/s" if facts.slowest_mbit else "unknown rates"
        return ModeChoice(StatesMode.SHARDED, f"with links of {rate}, processors bound a step, and each makes its part")
    if states_bytes > room:
        return ModeChoice(
            StatesMode.SHARDED,
            f"all states take {states_bytes / 1e9:.1f} GB, and a machine has {room / 1e9:.1f} GB for them",
        )
    return ModeChoice(
        StatesMode.MACHINE,
        f"links of {facts.slowest_mbit / 1000:g} Gbit/s bound a step, which takes {gain:.2f} times as "
        "long with sharded states",
    )


Share = tuple[int, int, int]


class WholeModel(Protocol):
    """What one rank knows about its part of a model. The ranks that share its parameters answer alike."""

    #: The number of sums that ``shares`` names.
    sums: int

    def shares(self, param: torch.nn.Parameter) -> Sequence[Share]:
        """(start, stop, number of a sum): which elements of the parameter, as if it were flat, count in which sum.
        Those of none count on another rank."""

    def square_sum(self, sums: Sequence[float]) -> float:
        """The squares' sum of the whole model, the same on all of its ranks, which all call it with their sums."""

    def is_any(self, is_here: bool) -> bool:
        """True on all ranks of the model if ``is_here`` is on one. All of them call it."""


class AllHere:
    """Each rank has the whole model."""

    sums = 1

    def shares(self, param: torch.nn.Parameter) -> Sequence[Share]:
        return [(0, param.numel(), 0)]

    def square_sum(self, sums: Sequence[float]) -> float:
        return math.fsum(sums)

    def is_any(self, is_here: bool) -> bool:
        return is_here
