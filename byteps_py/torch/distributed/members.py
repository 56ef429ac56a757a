"""One group as the service sees it: its session, its ranks, the beginning of its names. Immutable; any thread."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from byteps_py.session import Session
from byteps_py.session.nearby import Neighbours
from byteps_py.torch.context import Context
from byteps_py.torch.exchange import Mover


@dataclass(frozen=True)
class Members:
    """``ranks``: global ranks by position in the group, ascending. ``position``: this process's own."""

    context: Context
    session: Session
    ranks: tuple[int, ...]
    position: int
    prefix: str

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
        return self.ranks[position] - self.session.machine_index * self.session.local_size

    @property
    def neighbours(self) -> Neighbours | None:
        """The other ranks of this machine, if all members are among them."""
        first = self.session.machine_index * self.session.local_size
        if self.count > 1 and first <= self.ranks[0] and self.ranks[-1] < first + self.session.local_size:
            return self.session.nearby
        return None

    def root(self, position: int) -> int:
        """The rank of a member, as the session knows it."""
        return self.ranks[position] if self.session.size > 1 else 0

    def mover(self, device: torch.device) -> Mover:
        return self.context.mover(device)


def prefix_of(epoch: int, name: str, ranks: Sequence[int]) -> str:
    """How names of a group begin. ``epoch`` counts the worlds of this process: names of groups start again with each.

    Disjoint groups may have the same name, where not all ranks have made the same ones: hence the ranks.
    """
    who = hashlib.blake2b(repr(tuple(ranks)).encode(), digest_size=6).hexdigest()
    return f"c10d.{epoch}.{name}.{who}"
