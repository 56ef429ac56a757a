"""Sums of a hosted optimizer that are NaN or infinite: found by the ranks that have them, known to all.

Owns what a GradScaler sees in place of the parameters. Must not know states or steps. The training thread calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from byteps_py import blame as blames
from byteps_py.errors import NonFiniteError
from byteps_py.torch.collectives import nonfinite
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.gradients.hosted_reducer import HostedReducer
from byteps_py.torch.gradients.largest_values import largest

_BLAME_BITS = 64


class GradientProbe:
    """A parameter of one element that a GradScaler unscales in place of those of a hosted optimizer, whose averages are
    not on the ranks. Its gradient is 1, so that the scaler leaves the factor there; or infinite, so that it skips."""

    def __init__(self) -> None:
        self._param = torch.zeros(1, dtype=torch.float32, device="cpu")
        self._param.grad = torch.ones(1, dtype=torch.float32, device="cpu")

    def groups(self, overflows: bool) -> list[dict[str, list[torch.Tensor]]]:
        """The param_groups for a scaler that is about to unscale them."""
        self._gradient.fill_(float("inf") if overflows else 1.0)
        return [{"params": [self._param]}]

    @property
    def factor(self) -> float:
        """What the scaler has multiplied gradients by."""
        return float(self._gradient)

    @property
    def _gradient(self) -> torch.Tensor:
        if self._param.grad is None:
            self._param.grad = torch.ones(1, dtype=torch.float32, device="cpu")
        return self._param.grad


def overflows(context: Context, name: str, reducer: HostedReducer, initial_sums: Sequence[float]) -> bool:
    """True, on all ranks, if a sum is NaN or infinite. All ranks call it, after ``finish``."""
    finite = math.isfinite(reducer.square_sum(initial_sums))
    return bool(largest(context, f"{name}.overflow", [0.0 if finite else 1.0])[0])


def find_error(
    context: Context, name: str, reducer: HostedReducer, initial_sums: Sequence[float]
) -> NonFiniteError | None:
    """The error for sums that are NaN or infinite, the same on all ranks, which all call it; None if all are finite."""
    if not overflows(context, name, reducer, initial_sums):
        return None
    session = context.session
    names = [name for bucket in reducer.with_states for name in bucket.names]
    bad = reducer.bad_gradients()
    # Bit by bit, because the largest of two numbers is not what both have in common.
    mine = blames.of_rank(session.rank, session.size) if any(bad) else 0
    bits = [float(mine >> bit & 1) for bit in range(_BLAME_BITS)]
    found = largest(context, f"{name}.blame", [*bits, *map(float, bad)])
    blame = sum(1 << bit for bit, is_set in enumerate(found[: len(bits)]) if is_set)
    places = [repr(each) for each, is_bad in zip(names, found[len(bits) :], strict=True) if is_bad]
    step = max((bucket.round for bucket in reducer.with_states), default=0)
    return nonfinite.explain(blame or blames.OVERFLOW, session.size, step, places or ["a sum"])
