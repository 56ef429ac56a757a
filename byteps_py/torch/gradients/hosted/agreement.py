"""What the ranks of a hosted optimizer agree on before a step: whether sums are finite.

Owns what a GradScaler sees in place of the parameters. Must not know states or steps. The training thread calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from byteps_py import blame as blames
from byteps_py.errors import NonFiniteError
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.torch.collectives import nonfinite
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.slot_view import TensorRequest

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


def largest(context: Context, name: str, values: Sequence[float]) -> list[float]:
    """The largest of all ranks' values, each. All ranks call it. Raises what Session.wait raises."""
    own = torch.tensor(values, dtype=torch.float64, device="cpu")
    if context.session.size == 1:
        return own.tolist()
    spec = TensorSpec(name, DType.FLOAT64, (len(own),), Op.MAX)
    (view,) = context.slot_views([TensorRequest(spec, torch.float64, ((len(own),),), own.device)])
    view.contribute([own])
    view.wait()
    return view.results[0].tolist()


def overflows(context: Context, name: str, square_sum: float) -> bool:
    """True, on all ranks, if a sum is NaN or infinite. ``square_sum``: of the averages that this rank owns. All ranks
    call it."""
    return bool(largest(context, f"{name}.overflow", [0.0 if math.isfinite(square_sum) else 1.0])[0])


def explain_overflow(
    context: Context, name: str, gradients: Sequence[str], bad: Sequence[bool], step: int
) -> NonFiniteError:
    """The error for sums that are NaN or infinite, the same on all ranks, which all call it. ``bad``: which of this
    rank's ``gradients`` are."""
    session = context.session
    # Bit by bit, because the largest of two numbers is not what both have in common.
    mine = blames.of_rank(session.rank, session.size) if any(bad) else 0
    bits = [float(mine >> bit & 1) for bit in range(_BLAME_BITS)]
    found = largest(context, f"{name}.blame", [*bits, *map(float, bad)])
    blame = sum(1 << bit for bit, is_set in enumerate(found[: len(bits)]) if is_set)
    places = [repr(each) for each, is_bad in zip(gradients, found[len(bits) :], strict=True) if is_bad]
    return nonfinite.explain(blame or blames.OVERFLOW, session.size, step, places or ["a sum"])
