"""What a summation server knows of a partition's rounds in flight, and what the rounds ask the shell to do.

Pure data. The rules are in rounds.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from byteps_py.errors import BytePSError
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


class RoundState(enum.Enum):
    COLLECTING = "waiting for contributions"
    REDUCING = "all contributions are there"
    DROPPED = "superseded"


@dataclass(slots=True, eq=False)
class Round(Generic[C]):
    """One round in flight. ``is_resent``: a machine lacks its result, which others may have: who has not given within
    a moment (``want_at``) is asked. ``redirected``: by machine, whom to answer instead of who gave."""

    partition: PartitionRounds[C]
    number: int
    since_s: float
    state: RoundState = RoundState.COLLECTING
    is_resent: bool = False
    want_at: float = 0.0
    contributions: dict[int, C] = field(default_factory=dict)
    redirected: dict[int, C] = field(default_factory=dict)

    def in_order(self) -> list[C]:
        """Contributions by machine index: the order in which they are added."""
        return [self.contributions[machine] for machine in sorted(self.contributions)]

    def waiting(self) -> list[C]:
        """Whom to answer, in machine order."""
        asked = (self.redirected.get(c.header.sender, c) for c in self.in_order())
        return [c for c in asked if not c.header.is_supply]


@dataclass(slots=True, eq=False)
class PartitionRounds(Generic[C]):
    """A piece of one generation of a tensor. ``last_round``: completed last; ``broken_round``: refused last, for
    ``reason``; -1: none yet."""

    key: int
    generation: int
    index: int
    last_round: int = -1
    broken_round: int = -1
    reason: str = ""
    rounds: dict[int, Round[C]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"partition {self.index} of tensor key {self.key:#018x}"


@dataclass(frozen=True, slots=True)
class Reduce(Generic[C]):
    """Combine ``round.in_order()``, then report it with ``Rounds.reduced``."""

    round: Round[C]


@dataclass(frozen=True, slots=True)
class Answer(Generic[C]):
    """Send the result to all who contributed and lack it, in machine order."""

    contributions: list[C]


@dataclass(frozen=True, slots=True)
class RefuseContributions(Generic[C]):
    """Tell these senders that, and why, their contributions are not used. ``error``: a type of byteps_py.errors."""

    contributions: list[C]
    error: type[BytePSError]
    text: str


@dataclass(frozen=True, slots=True)
class Want:
    """Ask ``machines`` for what they gave to a round; ``header``: of another machine's contribution to it."""

    header: Header
    machines: tuple[int, ...]


Action = Reduce[C] | Answer[C] | RefuseContributions[C] | Want


@dataclass(frozen=True, slots=True)
class RoundStall:
    """A round that waits for machines. ``machines``: how many are to contribute; ``missing``: those of all that have
    not, whether they are to or not."""

    key: int
    index: int
    round: int
    age_s: float
    machines: int
    missing: tuple[int, ...]


@dataclass(slots=True)
class Counters:
    """Since the start. ``bytes_summed``: bytes of results, each once."""

    rounds: int = 0
    bytes_summed: int = 0
    duplicates: int = 0
    refused: int = 0
    wanted: int = 0
    bytes_in_flight: int = 0
