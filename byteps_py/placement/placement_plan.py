"""A placement computed in advance: how much each of n + k machines would hold, and how long a reduction would take.

Owns the comparison of a real table with the optimum. `bps placement` and benchmarks/placement.py print it. Starts
nothing and sends nothing. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from byteps_py.placement.link_optimum import LinkOptimum
from byteps_py.placement.packing import Intervals
from byteps_py.placement.placement_table import Entry, PlacementTable
from byteps_py.placement.shares import Optimum, time_over_optimum
from byteps_py.tensors import split


@dataclass(frozen=True, slots=True)
class Plan:
    """``held``: bytes of every machine's server, CPU machines first, 0 for a machine that holds nothing.

    ``partitions``: into how many pieces the model is cut; 0 with one machine. ``links``: the optimum for unequal links;
    None if all links are equal.
    """

    optimum: Optimum
    held: tuple[int, ...]
    partitions: int
    links: LinkOptimum | None = None

    @property
    def cpu(self) -> tuple[int, ...]:
        """The bytes that CPU machines hold."""
        return self.held[: self.optimum.k]

    @property
    def gpu(self) -> tuple[int, ...]:
        """The bytes that GPU machines hold."""
        return self.held[self.optimum.k :]

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """The share of the model that each machine holds."""
        return tuple(Fraction(held, sum(self.held) or 1) for held in self.held)

    @property
    def best_shares(self) -> tuple[Fraction, ...]:
        """The optimal shares: by the formula, or by the linear program if links are not equal."""
        return self.links.shares if self.links is not None else self.optimum.shares

    @property
    def fullest(self) -> Fraction:
        """The largest load of a server, relative to its optimal share."""
        pairs = zip(self.shares, self.best_shares, strict=True)
        return max((share / best for share, best in pairs if best), default=Fraction(1))

    @property
    def time_over_optimum(self) -> Fraction:
        """How many times longer a reduction takes than with the best shares; see shares.py and link_optimum.py."""
        if self.links is not None:
            return self.links.time_of(self.shares) / self.links.time
        return time_over_optimum(self.optimum.n, self.cpu, self.gpu)


def plan(tensors: Sequence[Entry], n: int, k: int, partition_bytes: int, links: LinkOptimum | None = None) -> Plan:
    """The placement that n GPU machines and k CPU machines would use. Raises UsageError for n < 1 or k < 0."""
    optimum = Optimum(n, k)
    weights = links.weights if links is not None else optimum.weights
    servers = [(position, weight) for position, weight in enumerate(weights) if weight]
    if not servers:
        return Plan(optimum, (0,) * (k + n), 0, links)
    table = PlacementTable(servers, partition_bytes)
    table.add(tensors)
    loads = tuple(table.load(position) if weight else 0 for position, weight in enumerate(weights))
    return Plan(optimum, loads, sum(len(table.partitions(t.key)) for t in tensors), links)


def plain_hash_plan(tensors: Sequence[Entry], n: int, k: int, partition_bytes: int) -> Plan:
    """The placement by hashing alone, without bounds on loads and without extra cuts, for comparison."""
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
    """The loads of all machines, from those of the servers; 0 for machines without a server."""
    servers = iter(loads)
    return tuple(next(servers) if weight else 0 for weight in optimum.weights)
