"""One piece of one tensor, and what machines gave to its round in flight. Pure data; the rules are in rounds.py."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from byteps_py.wire import Header


@dataclass(slots=True, eq=False)
class Contribution:
    """What one machine gave to one round. ``origin``: whom to answer, compared by identity.

    ``nbytes``: the payload's true size. The shell adds where the payload lies in a subclass.
    """

    header: Header
    origin: object
    nbytes: int


C = TypeVar("C", bound=Contribution)


class State(enum.Enum):
    IDLE = "no round in flight"
    COLLECTING = "waiting for contributions"
    REDUCING = "all contributions are there"
    BROKEN = "the round was refused"
    DROPPED = "superseded"


@dataclass(slots=True, eq=False)
class Partition(Generic[C]):
    """A piece of one generation of a tensor. ``round``: in flight, or broken. ``last_round``: completed last."""

    key: int
    generation: int
    index: int
    state: State = State.IDLE
    round: int = 0
    last_round: int = -1  # none yet
    since_s: float = 0.0
    reason: str = ""
    contributions: dict[int, C] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"partition {self.index} of tensor key {self.key:#018x}"

    def in_order(self) -> list[C]:
        """Contributions by machine index: the order in which they are added."""
        return [self.contributions[machine] for machine in sorted(self.contributions)]
