"""A placement worked out in advance: what each machine of n + k would hold, and what it costs in time.

Owns the comparison of a real table with the optimum; `bps placement` and benchmarks/placement.py print it.
Starts nothing and sends nothing. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from byteps_py.placement.packing import Intervals
from byteps_py.placement.shares import Optimum, time_over_optimum
from byteps_py.placement.table import Entry, PlacementTable
from byteps_py.tensors import split


@dataclass(frozen=True, slots=True)
class Plan:
    """``held``: bytes of every machine's server, CPU machines first, 0 for a machine that holds nothing.

    ``partitions``: into how many pieces the model is cut; with one machine it is not.
    """

    optimum: Optimum
    held: tuple[int, ...]
    partitions: int

    @property
    def cpu(self) -> tuple[int, ...]:
        return self.held[: self.optimum.k]

    @property
    def gpu(self) -> tuple[int, ...]:
        return self.held[self.optimum.k :]

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """Part of the model that every machine holds."""
        return tuple(Fraction(held, sum(self.held) or 1) for held in self.held)

    @property
    def fullest(self) -> Fraction:
        """The largest of all servers' loads, each relative to the share that the formula gives it."""
        pairs = zip(self.shares, self.optimum.shares, strict=True)
        return max((share / best for share, best in pairs if best), default=Fraction(1))

    @property
    def time_over_optimum(self) -> Fraction:
        """How many times longer a reduction takes than with the formula's shares; see shares.py."""
        return time_over_optimum(self.optimum.n, self.cpu, self.gpu)


def plan(tensors: Sequence[Entry], n: int, k: int, partition_bytes: int) -> Plan:
    """The placement that n GPU machines and k CPU machines would use. Raises UsageError for n < 1 or k < 0."""
    optimum = Optimum(n, k)
    if not optimum.server_weights:
        return Plan(optimum, (0,) * (k + n), 0)
    table = PlacementTable(enumerate(optimum.server_weights), partition_bytes)
    table.add(tensors)
    loads = [table.load(position) for position in range(len(optimum.server_weights))]
    return Plan(optimum, _every_machine(optimum, loads), sum(len(table.partitions(t.key)) for t in tensors))


def plain_hash_plan(tensors: Sequence[Entry], n: int, k: int, partition_bytes: int) -> Plan:
    """What hashing alone would give, without bounds on loads and without extra cuts: the bar to be better than."""
    optimum = Optimum(n, k)
    if not optimum.server_weights:
        return Plan(optimum, (0,) * (k + n), 0)
    intervals = Intervals(optimum.server_weights)
    loads = [0] * len(optimum.server_weights)
    partitions = 0
    for tensor in tensors:
        for offset, length in split(tensor.nbytes, partition_bytes, tensor.itemsize):
            loads[next(intervals.probes(tensor.key, offset))] += length
            partitions += 1
    return Plan(optimum, _every_machine(optimum, loads), partitions)


def _every_machine(optimum: Optimum, loads: Sequence[int]) -> tuple[int, ...]:
    """Loads of the servers, spread to the machines that have one; 0 for the others."""
    servers = iter(loads)
    return tuple(next(servers) if weight else 0 for weight in optimum.weights)
