"""The optimum for equal links: which share of the model each server holds, and how long a reduction takes.

Owns the formulas of n GPU machines and k CPU machines behind equal links, in exact fractions. Knows nothing of
tensors, hashing or processes. Pure; any thread.

Machines are listed CPU machines first, then GPU machines: the order of a cluster's servers everywhere.

A CPU machine that holds the share s of a model of M bytes receives s from each of n machines and answers each, so it
carries n·s in each direction. A GPU machine sends what others hold, M − s, and n − 1 answers for what it holds itself:
M + (n−2)·s. The optimum makes the two equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from byteps_py.errors import UsageError


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best placement for ``n`` GPU machines and ``k`` CPU machines with equal links.

    Times are in units of M/B: the bytes of the model over the bandwidth of one link in one direction. With
    n = 1 nothing is sent and no machine holds anything. CPU machines beyond n hold nothing; with k ≥ n neither
    do GPU machines.

    Raises UsageError for n < 1 or k < 0.

    >>> best = Optimum(4, 2)
    >>> best.weights, best.interval
    ((6, 6, 2, 2, 2, 2), 20)
    >>> best.time, best.gain_over_ring, best.gain_over_servers_only
    (Fraction(6, 5), Fraction(5, 4), Fraction(5, 3))
    """

    n: int
    k: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise UsageError(f"n, the number of GPU machines, must be at least 1, got {self.n}")
        if self.k < 0:
            raise UsageError(f"k, the number of CPU machines, can't be negative, got {self.k}")

    @property
    def cpu_machines_used(self) -> int:
        """The number of CPU machines that hold anything."""
        return min(self.k, self.n) if self.n > 1 else 0

    @property
    def interval(self) -> int:
        """n² + kn − 2k: the number of hash values, of which a machine owns its weight. 0 for n = 1."""
        k = self.cpu_machines_used
        return self.n * self.n + k * self.n - 2 * k if self.n > 1 else 0

    @property
    def cpu_weight(self) -> int:
        """The number of hash values of each CPU machine that is used: 2(n−1)."""
        return 2 * (self.n - 1)

    @property
    def gpu_weight(self) -> int:
        """The number of hash values of each GPU machine: n − k; 0 if GPU machines hold nothing."""
        return self.n - self.cpu_machines_used if self.n > 1 else 0

    @property
    def weights(self) -> tuple[int, ...]:
        """The number of hash values of every machine, k + n entries; 0 for a machine that holds nothing."""
        used = self.cpu_machines_used
        return (self.cpu_weight,) * used + (0,) * (self.k - used) + (self.gpu_weight,) * self.n

    @property
    def server_weights(self) -> tuple[int, ...]:
        """The ``weights`` of the machines that hold something: the cluster's servers."""
        return tuple(weight for weight in self.weights if weight)

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """The share of the model of every machine, k + n entries; they add up to exactly 1 (0 for n = 1)."""
        return tuple(Fraction(weight, self.interval or 1) for weight in self.weights)

    @property
    def time(self) -> Fraction:
        """Time of one reduction: 2n(n−1) / (n² + kn − 2k)."""
        return Fraction(2 * self.n * (self.n - 1), self.interval or 1)

    @property
    def gain_over_ring(self) -> Fraction | None:
        """How many times faster it is than ring all-reduce, 2(n−1)/n. None for n = 1, where both take no time."""
        return Fraction(2 * (self.n - 1), self.n) / self.time if self.time else None

    @property
    def gain_over_servers_only(self) -> Fraction | None:
        """How many times faster it is than servers on the k CPU machines only, n/k. None for k = 0 and for n = 1.

        More than n CPU machines do not help such servers either: a GPU machine still carries the whole model.
        """
        return max(Fraction(self.n, self.k), Fraction(1)) / self.time if self.k and self.time else None


def carried(n: int, cpu: Sequence[Fraction | int], gpu: Sequence[Fraction | int]) -> list[Fraction]:
    """How much each machine sends, and receives, in one reduction with any placement.

    ``cpu`` and ``gpu``: how much each machine's server holds, 0 without a server; ``gpu`` has n entries. The result is
    in the same unit (shares or bytes), CPU machines first. Raises UsageError if ``gpu`` does not have n entries.
    """
    if len(gpu) != n:
        raise UsageError(f"{n} GPU machines need {n} entries in gpu, got {len(gpu)}")
    if n == 1:
        return [Fraction(0)] * (len(cpu) + 1)
    model = sum(cpu) + sum(gpu)
    return [Fraction(n * held) for held in cpu] + [Fraction(model + (n - 2) * held) for held in gpu]


def reduction_time(n: int, cpu: Sequence[Fraction | int], gpu: Sequence[Fraction | int]) -> Fraction:
    """The time of one reduction with any placement, in units of M/B; see ``carried`` for the arguments.

    >>> reduction_time(4, [Fraction(1, 2), Fraction(1, 2)], [0, 0, 0, 0])  # servers on the CPU machines only
    Fraction(2, 1)
    >>> reduction_time(4, [3, 3], [1, 1, 1, 1])
    Fraction(6, 5)
    """
    model = Fraction(sum(cpu) + sum(gpu))
    return max(carried(n, cpu, gpu)) / model if model else Fraction(0)


def time_over_optimum(n: int, cpu: Sequence[Fraction | int], gpu: Sequence[Fraction | int]) -> Fraction:
    """How many times longer a reduction takes with this placement than with the best one. 1 for n = 1."""
    best = Optimum(n, len(cpu)).time
    return reduction_time(n, cpu, gpu) / best if best else Fraction(1)
