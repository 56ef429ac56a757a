"""Jobs whose communication services keep optimizers' states, and make their steps, beside all else."""

from __future__ import annotations

from typing import Any

from .busy import BusyCluster
from .cluster import Cluster
from .codecs import INT8
from .elastic import ElasticCluster
from .elastic_rank import ElasticRank
from .groups import Book
from .hosted_rank import HostedRank
from .hosted_uses import CodedHostedProgram, HostedProgram
from .outages import OutageCluster
from .parts import Parts
from .program import Program
from .rank import Rank
from .turn import Life


class HostedJob(Cluster):
    """Beside the kind of cluster that a subclass names first."""

    program_class = HostedProgram
    rank_class = HostedRank

    def __init__(self, seed: int, parts: type[Parts] = Parts) -> None:
        super().__init__(seed, parts)
        self.results |= train(self.program, self.local_sizes)

    def new_rank(self, settings: Any) -> Rank:
        rank = super().new_rank(settings)
        if isinstance(rank, HostedRank):
            rank.ledger = self.ledger
        return rank


class HostedCluster(HostedJob):
    """On a reliable network."""


class HostedOutageCluster(HostedJob, OutageCluster):
    """Beside an unreliable network."""


class HostedCodedCluster(HostedOutageCluster):
    """The same, with gradients that travel compressed."""

    program_class = CodedHostedProgram
    partition_bytes = 2 * INT8.item_bytes


class HostedBusyCluster(HostedJob, BusyCluster):
    """On busy machines."""


class HostedElasticRank(HostedRank, ElasticRank):
    """Its states end with its group. Those of the next one begin with other numbers, as with those of a commit."""

    def _enter(self) -> Life:
        yield from super()._enter()
        self.hosted = {}


class HostedElasticCluster(HostedJob, ElasticCluster):
    """Of machines that come and go."""

    rank_class = HostedElasticRank

    def new_book(self, number: int, local_sizes: list[int]) -> Book:
        return HostedBook(self.world.seed, number, local_sizes)


class HostedBook(Book):
    """Of a group whose services make optimizers' steps."""

    program_class = HostedProgram

    def __init__(self, seed: int, number: int, local_sizes: list[int]) -> None:
        super().__init__(seed, number, local_sizes)
        self.results |= train(self.program, local_sizes)


def train(program: Program, local_sizes: list[int]) -> dict[int, bytes]:
    """Find out what comes of a program's steps. Returns what ranks get beside that, by use."""
    if not isinstance(program, HostedProgram):
        return {}
    program.train(local_sizes)
    return {use.id: use.combined(local_sizes) for use in program.sums}
