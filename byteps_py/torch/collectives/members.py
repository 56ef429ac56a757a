"""The members of one process group, as the service sees them: session, ranks, prefix of names. Immutable; any
thread."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from byteps_py.errors import UnsupportedError, UsageError
from byteps_py.session import Session
from byteps_py.session.solo import SoloSession
from byteps_py.torch.collectives import router
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.movers import Mover


@dataclass(frozen=True)
class Members:
    """``ranks``: global ranks by position in the group, ascending. ``position``: that of this process. ``prefix``: how
    the names of the group's tensors and streams begin. Raises UnsupportedError if the ranks are not ascending."""

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
        """The number of members."""
        return len(self.ranks)

    @property
    def spec_group(self) -> tuple[int, ...]:
        """The ``group`` of a TensorSpec for all members."""
        return self.some(range(self.count))

    def some(self, positions: Sequence[int]) -> tuple[int, ...]:
        """The ``group`` of a TensorSpec for the members at ``positions``."""
        return () if len(positions) == self.session.size else tuple(self.ranks[p] for p in positions)

    @property
    def are_local(self) -> bool:
        """True if there are several members, all on this machine."""
        first = self.session.rank - self.session.local_rank
        return self.count > 1 and first <= self.ranks[0] and self.ranks[-1] < first + self.session.local_size

    @property
    def may_connect(self) -> bool:
        """True if members are on several machines, and are few enough for a connection between each two."""
        is_wanted = self.session.exchanges_addresses and not self.are_local
        return is_wanted and 1 < self.count <= router.MOST_CONNECTED

    def root(self, position: int) -> int:
        """The global rank of the member at ``position``, as the session numbers ranks. Raises UsageError if there is no
        such member."""
        self.check_root(position)
        return self.ranks[position] if self.session.size > 1 else 0

    def check_root(self, position: int) -> None:
        """Raises UsageError if there is no member at ``position``."""
        if not 0 <= position < self.count:
            raise UsageError(
                f"invalid root rank: {position} in a process group of {self.count} (ranks "
                f"{', '.join(map(str, self.ranks))})"
            )

    def split(self, positions: Sequence[int], number: int) -> Members:
        """The group of the members at ``positions``, this process among them. ``number``: of the splits of this group
        so far."""
        ranks = tuple(self.ranks[p] for p in positions)
        session = self.context.session if len(ranks) > 1 else SoloSession()
        name = f"{self.prefix}.split.{number}.{digest_of(ranks)}"
        return Members(self.context, session, ranks, positions.index(self.position), name)

    def mover(self, device: torch.device) -> Mover:
        """The mover for tensors of ``device``, see Context.mover."""
        return self.context.mover(device)


def prefix_of(epoch: int, name: str, ranks: Sequence[int]) -> str:
    """The prefix of a group's names. ``epoch`` counts the worlds of this process: the names of groups start again with
    each.

    Disjoint groups may have the same name, where not all ranks have created the same groups; so the prefix contains the
    ranks.
    """
    return f"c10d.{epoch}.{name}.{digest_of(ranks)}"


def digest_of(ranks: Sequence[int]) -> str:
    """A few letters that other ranks do not have: long lists of ranks are no names."""
    return hashlib.blake2b(repr(tuple(ranks)).encode(), digest_size=6).hexdigest()
