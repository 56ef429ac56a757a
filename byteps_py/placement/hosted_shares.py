"""The step of a hosted optimizer on equal links: which share each server adds, and how long the links take.

In units of M/B as in shares.py, of M bytes of gradients and as many of parameters. Four things may add to an
all-reduce's bytes:

    states with one owner    a CPU machine receives n + 1 bytes for each that it adds, parameters included; owners send
                             the parameters that CPU machines hand on. worker/core/owners.py has the count
    a shadow                 the sums that GPU machines add go to a CPU machine as well
    one without CPU machines they go to the next two GPU machines, of which one may have added it itself
    more copies of it        all sums go to further CPU machines, and where there are not as many, to the next GPU ones
    groups of some machines  servers of all machines add their sums, with the weights for all

With states on each machine, the weights are those of an all-reduce. Otherwise they are such that CPU and GPU machines'
links carry the same: owners send c/n for the share c that all CPU machines add, so one of these adds
2(n−1) / (n² + n + kn − 3k). With a shadow they carry the same for c = (k(2n−1) − n) / (n² + kn − 2k): a CPU machine
receives (n+1) c/k + (1−c)/k, and a GPU machine sends 1 + (n−1) (1−c)/n + c/n. Pure; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from byteps_py.errors import UsageError
from byteps_py.placement.shares import Optimum

#: Machines that keep a copy of each state where there are no CPU machines.
GPU_MACHINES_COPIES = 2


def owned_factors(n: int, gpu_machines_sum: bool) -> tuple[int, int]:
    """By what CPU and GPU machines' weights are multiplied for sums with one owner. Two GPU machines add all: of a sum
    that a CPU machine adds, its owner would only have more to send."""
    return (0, 1) if n == 2 and gpu_machines_sum else (n, n + 1)


def shadowed_factors(n: int, k: int) -> tuple[int, int]:
    """The same for such sums that are shadowed."""
    return (n * (k * (2 * n - 1) - n), 2 * k * (n * n - 1)) if k else (1, 1)


def used_cpu_machines(n: int, k: int) -> int:
    """CPU machines with a share; others keep no copies of states, either."""
    return min(k, n) if n > 1 else k


def shadow_copies(n: int, k: int, asked: int = 1) -> tuple[int, int]:
    """The copies of each shadowed state on CPU machines, and on the next GPU machines (worker/core/shadowing.py).
    ``asked``: BYTEPS_SHADOW_COPIES."""
    spare = used_cpu_machines(n, k)
    wanted = max(asked, 1 if spare else GPU_MACHINES_COPIES)
    return min(wanted, spare), min(max(0, wanted - spare), n - 1 if k < n else 0)


def copies_of_sums(n: int, k: int, is_sharded: bool) -> Fraction:
    """How often a sum that a GPU machine adds is sent for copies of shadowed states, on average."""
    return sum(_sent_for_copies(shadow_copies(n, k), Fraction(1), Fraction(0 if is_sharded else 1, n)), Fraction(0))


def _sent_for_copies(copies: tuple[int, int], added: Fraction, is_there: Fraction) -> tuple[Fraction, Fraction]:
    """How often a sum is sent to CPU and to GPU machines, on average. ``added``: the share that GPU machines add;
    ``is_there``: how often such a one has a copy of what it adds. A CPU machine that adds always has."""
    return copies[0] - (1 - added), copies[1] * (1 - added * is_there)


@dataclass(frozen=True, slots=True)
class HostedOptimum:
    """A step of n GPU machines and k CPU machines. ``is_sharded``: each state has one owner, else each machine has all;
    ``group``: machines that sum the same gradients, if the job has several such groups, all alike.

    ``copies``: BYTEPS_SHADOW_COPIES. With a group of one machine, only the shadow's copies of sums are on the links.

    Raises UsageError as Optimum does, and for a group of more machines than there are.

    >>> HostedOptimum(4, 2, is_sharded=True).time, HostedOptimum(4, 2, is_sharded=False).time
    (Fraction(15, 11), Fraction(6, 5))
    >>> HostedOptimum(2, 1, is_sharded=True, is_shadowed=True).time
    Fraction(3, 2)
    >>> HostedOptimum(2, 1, is_sharded=True, is_shadowed=True, copies=2).time
    Fraction(2, 1)
    >>> [str(HostedOptimum(4, 2, each, is_shadowed=True).time) for each in (True, False)]
    ['3/2', '7/5']
    """

    n: int
    k: int
    is_sharded: bool
    is_shadowed: bool = False
    group: int = 0
    copies: int = 1

    def __post_init__(self) -> None:
        Optimum(self.n, self.k)
        if not 0 <= self.group <= self.n:
            raise UsageError(f"group, the machines of a group, must be from 1 to n={self.n}, or 0 for all")

    @property
    def weights(self) -> tuple[int, int]:
        """Of each CPU machine that is used, and of each GPU machine."""
        best = Optimum(self.n, self.k)
        cpu = gpu = 1
        if self.is_sharded and self.is_shadowed:
            cpu, gpu = shadowed_factors(self.n, best.cpu_machines_used)
        elif self.is_sharded:
            cpu, gpu = owned_factors(self.n, best.gpu_weight > 0)
        return best.cpu_weight * cpu, best.gpu_weight * gpu

    @property
    def time(self) -> Fraction:
        """The bytes that the busiest link carries in one direction, in units of a group's gradients."""
        n, group = self.n, self.group or self.n
        if group == 1:
            return self._of_copies_alone()
        k = min(self.k, n)
        weights = self.weights
        total = k * weights[0] + n * weights[1]
        cpu, gpu = (Fraction(weight, total) for weight in weights)
        on_cpu, on_gpu = Fraction(n, group) * (group + self.is_sharded) * cpu, 1 + (n - 2) * gpu
        if self.is_sharded:
            on_gpu += (k * cpu + (n - group) * gpu) / group
        if self.is_shadowed:
            is_there = Fraction(0 if self.is_sharded else 1, n)
            to_cpu, to_gpu = _sent_for_copies(shadow_copies(n, k, self.copies), n * gpu, is_there)
            on_gpu += (to_cpu + to_gpu) / group
            on_cpu += to_cpu * Fraction(n, group * k) if k else 0
        return max(on_cpu, on_gpu)

    def _of_copies_alone(self) -> Fraction:
        """A machine adds its sums alone."""
        if not self.is_shadowed:
            return Fraction(0)
        cpu, gpu = shadow_copies(self.n, self.k, self.copies)
        return max(Fraction(cpu + gpu), Fraction(self.n * cpu, used_cpu_machines(self.n, self.k) or 1))
