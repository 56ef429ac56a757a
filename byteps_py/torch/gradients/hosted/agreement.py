"""The agreement of the ranks of a hosted optimizer before a step: on numbers, the norm, whether sums are finite.

``group``: these ranks, as in a TensorSpec; () for all of the job. All of them call each function, with a ``name`` that
no other optimizer has. Must not know states or steps. The thread that makes the step calls.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from byteps_py import rank_bits
from byteps_py.errors import MismatchError, NonFiniteError
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.torch.collectives import nonfinite
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.slot_view import TensorRequest
from byteps_py.torch.gradients.hosted.rules import GroupNumbers
from byteps_py.torch.operations.reductions import Sum, reduced

_BLAME_BITS = 64
_INT, _FLOAT = struct.Struct("<q"), struct.Struct("<d")
_ALL_BUT_SIGN = (1 << 63) - 1
#: "rule" encodes the switches, such as amsgrad.
_COMPARED = ("lr", "weight_decay", "momentum", "dampening", "beta1", "beta2", "eps", "lr_decay", "always_adapt", "rule")
_FACTORS = ("the factor of a GradScaler, 1/scale,", "the factor of clipping")


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors of the averages, applied in this order: ``unscale`` of a GradScaler, ``clip``."""

    unscale: float = 1.0
    clip: float = 1.0


def ordered(value: float) -> int:
    """An integer of 64 bits for a float64: ranks compare both alike. Each NaN is the same, and so is each zero.

    >>> ordered(-2.5) < ordered(-0.0) == ordered(0.0) < ordered(1e-300) < ordered(math.inf) < ordered(math.nan)
    True
    """
    (bits,) = _INT.unpack(_FLOAT.pack(value + 0.0 if value == value else math.nan))
    return int(bits) ^ (_ALL_BUT_SIGN if bits < 0 else 0)


def float_of(number: int) -> float:
    """The float64 of which ``number`` is the ``ordered`` integer."""
    (value,) = _FLOAT.unpack(_INT.pack(number ^ (_ALL_BUT_SIGN if number < 0 else 0)))
    return float(value)


def members(context: Context, group: tuple[int, ...]) -> Sequence[int]:
    """The global ranks of ``group``."""
    return group or range(context.session.size)


def largest(context: Context, name: str, values: Sequence[int], group: tuple[int, ...] = ()) -> list[int]:
    """The largest of all ranks' integers, each, of 64 bits. Raises what Session.wait raises."""
    if len(members(context, group)) == 1:
        return list(values)
    own = torch.tensor(values, dtype=torch.int64, device="cpu")
    spec = TensorSpec(name, DType.INT64, (len(own),), Op.MAX, group=group)
    (view,) = context.slot_views([TensorRequest(spec, torch.int64, ((len(own),),), own.device)])
    view.contribute([own])
    view.wait()
    found: list[int] = view.results[0].tolist()
    return found


def bounds(
    context: Context, name: str, values: Sequence[int], group: tuple[int, ...] = ()
) -> tuple[list[int], list[int]]:
    """The smallest and the largest of all ranks' integers, each. As ``largest``."""
    both = largest(context, name, [*values, *(~value for value in values)], group)
    return [~value for value in both[len(values) :]], both[: len(values)]


def overflows(context: Context, name: str, square_sums: Sequence[float], group: tuple[int, ...] = ()) -> bool:
    """True, on all ranks, if a sum is NaN or infinite. ``square_sums``: of the averages that this rank owns."""
    return bool(largest(context, f"{name}.overflow", [not all(map(math.isfinite, square_sums))], group)[0])


@dataclass(frozen=True, slots=True)
class BadGradients:
    """The ``names`` of this rank's gradients in the round number ``step``, and which of them are NaN or infinite."""

    names: Sequence[str]
    bad: Sequence[bool]
    step: int


def explain_overflow(
    context: Context, name: str, gradients: BadGradients, group: tuple[int, ...] = ()
) -> NonFiniteError:
    """The error for sums that are NaN or infinite, the same on all ranks."""
    session = context.session
    # Bit by bit, because the largest of two numbers is not what both have in common.
    mine = rank_bits.of_rank(session.rank, session.size) if any(gradients.bad) else 0
    bits = [mine >> bit & 1 for bit in range(_BLAME_BITS)]
    found = largest(context, f"{name}.blame", [*bits, *map(int, gradients.bad)], group)
    blame = sum(1 << bit for bit, is_set in enumerate(found[: len(bits)]) if is_set)
    places = [repr(each) for each, is_bad in zip(gradients.names, found[len(bits) :], strict=True) if is_bad]
    return nonfinite.explain(blame or rank_bits.OVERFLOW, session.size, gradients.step, places or ["a sum"])


def total_square_sums(name: str, square_sums: Sequence[float], group: tuple[int, ...] = ()) -> list[float]:
    """The sums of the squares of all averages. ``square_sums``: of those that this rank owns."""
    own = torch.tensor(square_sums, dtype=torch.float64, device="cpu")
    found: list[float] = reduced(own, Sum, f"{name}.norm", group).tolist()
    return found


@dataclass(frozen=True, slots=True)
class AnnouncedStep:
    """The numbers with which a rank is about to step. ``others``: numbers that travel along."""

    groups: GroupNumbers
    factors: Factors
    others: Sequence[int] = ()


def compare_numbers(context: Context, name: str, own_step: AnnouncedStep, group: tuple[int, ...] = ()) -> list[int]:
    """Raises MismatchError, on all ranks, if their numbers differ. Returns the largest of all ranks' ``others``."""
    step, factors, others = own_step.groups, own_step.factors, own_step.others
    if len(members(context, group)) == 1 and not others:
        return []
    own = [
        rule.code if each == "rule" else ordered(getattr(found, each))
        for found, rule in zip(step.numbers, step.rules, strict=True)
        for each in _COMPARED
    ]
    own += [ordered(factors.unscale), ordered(factors.clip)]
    least, most = bounds(context, f"{name}.numbers", [*own, *others], group)
    for place, number in enumerate(own):
        if least[place] == most[place]:
            continue
        param_group, which = divmod(place, len(_COMPARED))
        is_factor = param_group == len(step.numbers)
        is_rule = not is_factor and _COMPARED[which] == "rule"
        what = _FACTORS[which] if is_factor else f"{_COMPARED[which]} of param_groups[{param_group}]"
        mine, low, high = (each if is_rule else float_of(each) for each in (number, least[place], most[place]))
        if math.isnan(mine):
            continue  # ``check_numbers`` says so, here and on all that have it
        raise MismatchError(
            f"ranks step with different numbers: {what} is {mine:g} on rank {context.session.rank}, and from "
            f"{low:g} to {high:g} on all. Set it alike, and step a learning-rate scheduler on every rank"
        )
    return most[len(own) :]
