"""A placement computed in advance: how much each of n + k machines would hold, and how long a reduction would take.

Plans are for lists of parameters: those of well-known models (models.json, written by benchmarks/models.py), or those
of a user's file, which has the same format: rows of [parameter name, shape]. This module owns the format, and the
comparison of a real table with the optimum. `bps placement` and benchmarks/placement.py print it. It starts nothing and
sends nothing; any thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any

from byteps_py.errors import ConfigurationError
from byteps_py.placement.link_optimum import LinkOptimum
from byteps_py.placement.packing import Intervals
from byteps_py.placement.placement_table import Entry, PlacementTable
from byteps_py.placement.shares import Optimum, time_over_optimum
from byteps_py.tensors import key_of, split

#: Parameter names and shapes, in the model's order.
Shapes = list[tuple[str, tuple[int, ...]]]


def known_models() -> list[str]:
    """The names that ``load_model`` takes."""
    return list(_models())


def load_model(name: str) -> Shapes:
    """The parameters of a well-known model. Raises ConfigurationError for another name; it lists the known ones."""
    models = _models()
    if name not in models:
        raise ConfigurationError(
            f"unknown model {name!r}: known models are {', '.join(models)}; for another one, give --shapes FILE"
        )
    return _checked(models[name], f"model {name}")


def read_shapes(path: str) -> Shapes:
    """The rows of a JSON file, ``[["conv1.weight", [64, 3, 7, 7]], …]``. Raises ConfigurationError."""
    try:
        rows = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error
    return _checked(rows, path)


def entries(shapes: Shapes, itemsize: int = 4) -> list[Entry]:
    """The parameters' gradients as entries of a placement table, with ``itemsize`` bytes per element."""
    return [Entry(key_of(name), math.prod(shape) * itemsize, itemsize) for name, shape in shapes]


def _models() -> dict[str, Any]:
    models: dict[str, Any] = json.loads(resources.files(__package__).joinpath("models.json").read_text())
    return models


def _checked(rows: object, source: str) -> Shapes:
    if not isinstance(rows, list):
        raise ConfigurationError(f"{source} must be a list of [name, shape] rows, got {type(rows).__name__}")
    shapes: Shapes = []
    for number, row in enumerate(rows, start=1):
        match row:
            case [str(name), [*shape]] if _is_text(name) and all(type(d) is int and d >= 0 for d in shape):
                shapes.append((name, tuple(shape)))
            case _:
                raise ConfigurationError(
                    f'{source}: row {number} must be a name and a shape, ["fc.weight", [10, 4]], got {row!r}'
                )
    names = [name for name, _ in shapes]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise ConfigurationError(f"{source}: parameter {twice!r} is listed twice")
    if not any(math.prod(shape) for _, shape in shapes):
        raise ConfigurationError(f"{source} holds no elements: there is nothing to place")
    return shapes


def _is_text(name: str) -> bool:
    """False for a string with surrogates, which JSON allows but UTF-8 can't encode: it has no key."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


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
