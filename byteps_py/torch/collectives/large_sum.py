"""Sums in shares among the members of a group: their interface, and which of them a group uses. Any thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from byteps_py.session.peers import PeerTransport, Ring
from byteps_py.torch.collectives.ring.ring_sum import SLOT_BYTES, RingSums
from byteps_py.torch.collectives.share_sums import ShareSums
from byteps_py.torch.collectives.two_level_sums import TwoLevelSums


class LargeSum(Protocol):
    """One sum."""

    @property
    def has_begun(self) -> bool:
        """True once this member has given something to others."""

    def run(self, deadline: float) -> None:
        """Complete the sum; if a wait ends early, a further call continues. ``deadline``: of time.monotonic(). Raises
        StallError, JoinedError (no member completes it) and what ends the session."""


class LargeSums(Protocol):
    """The sums of a group, one at a time."""

    def start(
        self, source: torch.Tensor, target: torch.Tensor | None, average: bool, name: str, scatters: bool = False
    ) -> LargeSum:
        """The sum of flat and contiguous tensors. ``target``: see RingSum. ``name``: the same on all members."""


def large_sums_among(
    transport: PeerTransport, name: str, ranks: Sequence[int], own: int, machines: Sequence[Sequence[int]]
) -> tuple[LargeSums, Ring | None]:
    """The large sums of a group, and the ring that they use, which the caller retires.

    Args:
        name: of the group, the same on all members.
        ranks: of the members, by position. ``own``: the position of this one.
        machines: the positions of the members on each machine, as many on each.
    """
    near = {position: ranks[position] for some in machines if own in some for position in some}
    others = [rank for position, rank in near.items() if position != own]
    ring = transport.ring(transport.stream(f"{name}.ring", others), SLOT_BYTES) if others else None
    if ring is None:
        return ShareSums(transport, own, {p: rank for p, rank in enumerate(ranks) if p != own}), None
    if len(machines) == 1:
        return RingSums(ring, own, near), ring
    return TwoLevelSums(transport, ranks, machines, own, ring), ring
