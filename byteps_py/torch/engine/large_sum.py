"""The interface of sums in shares among the members of a group, for GroupLargeSums."""

from __future__ import annotations

from typing import Protocol

import torch


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
