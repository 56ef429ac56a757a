"""One group as the service sees it: its session, its ranks, the beginning of its names. Immutable; any thread."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from byteps_py.errors import UnsupportedError, UsageError
from byteps_py.session import Session
from byteps_py.session.peers import LocalPeers
from byteps_py.session.solo import SoloSession
from byteps_py.torch.engine.context import Context
from byteps_py.torch.engine.movers import Mover


@dataclass(frozen=True)
class Members:
    """``ranks``: global ranks by position in the group, ascending. ``position``: this process's own."""

    context: Context
    session: Session
    ranks: tuple[int, ...]
    position: int
    prefix: str

    def __post_init__(self) -> None:
        if list(self.ranks) != sorted(self.ranks):
            raise UnsupportedError(
                f"a process group of ranks {list(self.ranks)}: the backend byteps has groups in ascending order only"
            )

    @property
    def count(self) -> int:
        return len(self.ranks)

    @property
    def spec_group(self) -> tuple[int, ...]:
        """For a TensorSpec of the whole group."""
        return self.some(range(self.count))

    def some(self, positions: Sequence[int]) -> tuple[int, ...]:
        """For a TensorSpec of these members."""
        return () if len(positions) == self.session.size else tuple(self.ranks[p] for p in positions)

    def local_rank(self, position: int) -> int:
        """Of a member on this machine."""
        return self.ranks[position] - (self.session.rank - self.session.local_rank)

    @property
    def peers(self) -> LocalPeers | None:
        """The other ranks of this machine, if all members are among them."""
        first = self.session.rank - self.session.local_rank
        if self.count > 1 and first <= self.ranks[0] and self.ranks[-1] < first + self.session.local_size:
            return self.session.peers
        return None

    def root(self, position: int) -> int:
        """The rank of a member, as the session knows it. Raises UsageError if there is none at ``position``."""
        self.check_root(position)
        return self.ranks[position] if self.session.size > 1 else 0

    def check_root(self, position: int) -> None:
        """Raises UsageError if no member is at ``position``."""
        if not 0 <= position < self.count:
            raise UsageError(
                f"invalid root rank: {position} in a process group of {self.count} (ranks "
                f"{', '.join(map(str, self.ranks))})"
            )

    def split(self, positions: Sequence[int], number: int) -> Members:
        """A group of some of them, this process among them; ``number``: of the splits of this group so far."""
        ranks = tuple(self.ranks[p] for p in positions)
        session = self.context.session if len(ranks) > 1 else SoloSession()
        name = f"{self.prefix}.split.{number}.{_digest(ranks)}"
        return Members(self.context, session, ranks, positions.index(self.position), name)

    def mover(self, device: torch.device) -> Mover:
        return self.context.mover(device)


def prefix_of(epoch: int, name: str, ranks: Sequence[int]) -> str:
    """How names of a group begin. ``epoch`` counts the worlds of this process: names of groups start again with each.

    Disjoint groups may have the same name, where not all ranks have made the same ones: hence the ranks.
    """
    return f"c10d.{epoch}.{name}.{_digest(ranks)}"


def _digest(ranks: Sequence[int]) -> str:
    return hashlib.blake2b(repr(tuple(ranks)).encode(), digest_size=6).hexdigest()
