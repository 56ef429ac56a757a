"""What the rounds of a summation server ask for, and what they tell. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from byteps_py.errors import BytePSError
from byteps_py.server.partition import C, Round
from byteps_py.wire import Header


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
