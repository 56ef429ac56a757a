"""The loss of a step: its parts on this rank, and the sums over all ranks. One thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from byteps_py.errors import UsageError

#: A mean over a part, or (sum over a part, number of the terms).
Loss = torch.Tensor | tuple[torch.Tensor, torch.Tensor | int | float]
LossFunction = Callable[[Any, Any], Loss]


class Outcome(NamedTuple):
    """The same on all ranks. ``is_counted``: the loss function counts; gradients are to be divided by ``terms``."""

    loss: torch.Tensor
    terms: float
    is_counted: bool


@dataclass(slots=True)
class Losses:
    """The losses of the parts whose last stage is on this rank. ``weight``: of a part's mean in the whole mean, and the
    scale of gradients."""

    function: LossFunction | None
    weight: float
    may_count: bool = True  # the function may return (sum, count)
    total: float = 0.0
    count: float = 0.0
    counted: int = 0  # parts whose loss is a sum with a count

    def of(self, output: Any, target: Any) -> torch.Tensor:
        """The loss of a part, from which the backward pass begins. Raises UsageError if it is none."""
        if self.function is None:
            raise UsageError("a loss function is needed")
        found = self.function(output, target)
        is_counted = isinstance(found, tuple) and len(found) == 2
        loss, count = found if isinstance(found, tuple) and is_counted else (found, 1)
        if is_counted and not self.may_count:
            raise UsageError("the schedule changes weights before all parts are counted: return the mean of each part")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError(
                "the loss function returns one number as a tensor, the mean over the micro-batch, or (sum, count); not "
                f"{'a tensor of the shape ' + str(tuple(loss.shape)) if isinstance(loss, torch.Tensor) else type(loss)}"
            )
        self.total += float(loss.detach())
        self.count += float(count)
        self.counted += is_counted
        return loss if is_counted else loss * self.weight
