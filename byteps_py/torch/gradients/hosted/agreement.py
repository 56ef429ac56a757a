"""What the ranks of a hosted optimizer agree on before a step: numbers, the norm, whether sums are finite.

All ranks call each function. Must not know states or steps. The thread that makes the step calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from byteps_py import blame as blames
from byteps_py.errors import MismatchError, NonFiniteError
from byteps_py.kernels.update_rules import Hyperparameters, UpdateRule
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.torch.collectives import nonfinite
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.slot_view import TensorRequest
from byteps_py.torch.gradients.hosted.states import Factors
from byteps_py.torch.operations.reduction_plans import Sum
from byteps_py.torch.operations.reductions import reduced

_BLAME_BITS = 64


#: "rule" encodes the switches, such as amsgrad.
_COMPARED = ("lr", "weight_decay", "momentum", "dampening", "beta1", "beta2", "eps", "lr_decay", "always_adapt", "rule")
_FACTORS = ("the factor of a GradScaler, 1/scale,", "the factor of clipping")


@dataclass(frozen=True, slots=True)
class GroupNumbers:
    """Of each param_group, what a step is made with."""

    numbers: list[Hyperparameters]
    rules: list[UpdateRule]


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


def total_norm(name: str, square_sum: float) -> torch.Tensor:
    """The norm of all averages, float64. ``square_sum``: of those that this rank owns."""
    own = torch.tensor([square_sum], dtype=torch.float64, device="cpu")
    return reduced(own, Sum, f"{name}.norm").sqrt()[0]


def compare_numbers(
    context: Context, name: str, step: GroupNumbers, factors: Factors, others: Sequence[float] = ()
) -> list[float]:
    """Raises MismatchError, on all ranks, if their numbers differ. Returns the largest of all ranks' ``others``, which
    travel along."""
    if context.session.size == 1 and not others:
        return []
    values = [
        float(rule.code) if each == "rule" else getattr(found, each)
        for found, rule in zip(step.numbers, step.rules, strict=True)
        for each in _COMPARED
    ]
    own = torch.tensor([*values, factors.unscale, factors.clip], dtype=torch.float64, device="cpu")
    found = largest(context, f"{name}.numbers", [*own, *-own, *others])
    most, least = torch.tensor(found[: 2 * len(own)], dtype=torch.float64, device="cpu").chunk(2)
    for place in (most != -least).nonzero().flatten().tolist():
        if own[place].isnan():
            continue  # ``check_numbers`` says so, here and on all that have it
        group, which = divmod(place, len(_COMPARED))
        factor = place - len(values)
        what = f"{_COMPARED[which]} of param_groups[{group}]" if factor < 0 else _FACTORS[factor]
        raise MismatchError(
            f"ranks step with different numbers: {what} is "
            f"{float(own[place]):g} on rank {context.session.rank}, and from {-float(least[place]):g} to "
            f"{float(most[place]):g} on all. Set it alike, and step a learning-rate scheduler on every rank"
        )
    return found[2 * len(own) :]
