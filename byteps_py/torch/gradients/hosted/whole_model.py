"""A model of which each rank has a part: what the parts of one rank count for in the whole.

The sums of a hosted optimizer are of the ranks that share its parameters. Clipping needs the norm of all parameters of
the model, each once, and a step is skipped by all ranks or by none. Any thread that makes a step calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

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
