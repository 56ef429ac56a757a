"""The optimum behind unequal links: the linear program of shares.py with a rate for every machine.

    least t   such that   n·x ≤ t·B              for every CPU machine that holds the share x
                          1 + (n−2)·x ≤ t·B      for every GPU machine
                          all x together = 1

For a given t every machine has a largest share, so the least t is where these shares add up to 1. Each share is a
function of t with one kink, so the sum is solved exactly, without a solver. A GPU machine whose link is so slow that
the model alone takes longer holds nothing, and the others share as if it did not exist. Pure; any thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from byteps_py.errors import UsageError
from byteps_py.placement.shares import Optimum, carried

#: Rates whose ratio is above this count as equal: measurements are not more precise, and even shares are worth more.
_SAME = 0.85
_WEIGHT_BITS = 20


@dataclass(frozen=True, slots=True)
class LinkOptimum:
    """The best placement for CPU and GPU machines with links of these rates, in each direction, in any one unit.

    ``gpu_machines_sum`` False: only CPU machines hold anything (the classical parameter server). Raises UsageError
    without a GPU machine, for a rate that is not above 0, or for several GPU machines and no machine that sums.

    >>> best = LinkOptimum([400, 100], [400, 400, 400, 200])
    >>> [str(share) for share in best.shares], str(best.time * 400)
    (['10/29', '5/58', '11/58', '11/58', '11/58', '0'], '2')
    >>> LinkOptimum([1, 1], [1] * 4).weights == Optimum(4, 2).weights
    True
    """

    cpu: tuple[Fraction, ...]
    gpu: tuple[Fraction, ...]
    gpu_machines_sum: bool

    def __init__(
        self, cpu: Sequence[float | Fraction], gpu: Sequence[float | Fraction], gpu_machines_sum: bool = True
    ) -> None:
        if not gpu:
            raise UsageError("a cluster has at least one GPU machine")
        if any(not math.isfinite(rate) or rate <= 0 for rate in (*cpu, *gpu)):
            raise UsageError(f"the rate of a link must be above 0: {[float(rate) for rate in (*cpu, *gpu)]}")
        if len(gpu) > 1 and not cpu and not gpu_machines_sum:
            raise UsageError("without CPU machines, the GPU machines have to sum")
        object.__setattr__(self, "gpu_machines_sum", gpu_machines_sum)
        object.__setattr__(self, "cpu", tuple(Fraction(rate) for rate in cpu))
        object.__setattr__(self, "gpu", tuple(Fraction(rate) for rate in gpu))

    @property
    def are_equal(self) -> bool:
        """True if all links have one rate: then the formula of shares.py holds."""
        return len({*self.cpu, *self.gpu}) == 1

    @property
    def _is_formula(self) -> bool:
        n, k = len(self.gpu), len(self.cpu)
        return n == 1 or (self.are_equal and (self.gpu_machines_sum or k >= n))

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """Share of the model of every machine, CPU machines first; they add up to exactly 1 (0 for n = 1)."""
        n = len(self.gpu)
        if self._is_formula:
            return Optimum(n, len(self.cpu)).shares
        if not self.gpu_machines_sum:
            return (*(rate / sum(self.cpu) for rate in self.cpu), *(Fraction(0) for _ in self.gpu))
        if n == 2:
            return self._shares_of_two()
        level = self._level()
        cpu = [level * rate / n for rate in self.cpu]
        return (*cpu, *(max(Fraction(0), (level * rate - 1) / (n - 2)) for rate in self.gpu))

    def _level(self) -> Fraction:
        """The t at which all machines' largest shares, none below 0, add up to 1."""
        n = len(self.gpu)
        slope, offset = sum(self.cpu, Fraction(0)) / n, Fraction(0)
        rates = sorted(self.gpu, reverse=True)
        for number, rate in enumerate(rates):  # a GPU machine can hold something once t·rate > 1
            if slope and (1 - offset) / slope <= 1 / rate:
                break
            slope += rate / (n - 2)
            offset -= Fraction(1, n - 2)
            following = rates[number + 1 :]
            if not following or slope / following[0] + offset >= 1:
                break
        return (1 - offset) / slope

    def _shares_of_two(self) -> tuple[Fraction, ...]:
        """The shares for two GPU machines. Each carries the whole model whatever it holds; CPU machines hold as much as
        they can carry in that time."""
        total = sum(self.cpu, Fraction(0))
        room = total / min(self.gpu) / 2
        scale = min(Fraction(1), room) / total if total else Fraction(0)
        cpu = [rate * scale for rate in self.cpu]
        rest = (1 - sum(cpu, Fraction(0))) / 2
        return (*cpu, rest, rest)

    @property
    def time(self) -> Fraction:
        """Time of one reduction of a model of size 1, in the rates' unit."""
        return self.time_of(self.shares)

    def time_of(self, shares: Sequence[Fraction | int]) -> Fraction:
        """The time of one reduction with other shares: that of the machine that takes longest."""
        k = len(self.cpu)
        loads = carried(len(self.gpu), shares[:k], shares[k:])
        if len(self.gpu) == 1:
            return Fraction(0)
        return max(load / rate for load, rate in zip(loads, (*self.cpu, *self.gpu), strict=True))

    @property
    def weights(self) -> tuple[int, ...]:
        """Shares as whole numbers, for the placement table: the formula's own where all links are equal."""
        if self._is_formula:
            return Optimum(len(self.gpu), len(self.cpu)).weights
        return tuple(round(share * (1 << _WEIGHT_BITS)) for share in self.shares)


def classes(rates: Sequence[float]) -> list[float]:
    """Measured rates, with rates that hardly differ made equal: each becomes the highest rate of its class.

    >>> classes([391.0, 398.5, 196.0, 402.0])
    [402.0, 402.0, 196.0, 402.0]
    """
    leaders: list[float] = []
    for rate in sorted(rates, reverse=True):
        if not leaders or rate < leaders[-1] * _SAME:
            leaders.append(rate)
    return [min(leader for leader in leaders if leader >= rate) for rate in rates]
