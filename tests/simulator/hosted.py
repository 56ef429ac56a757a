"""Jobs whose communication services keep optimizers' states, and make their steps, beside all else."""

from __future__ import annotations

from typing import Any

from .cluster import Cluster
from .hosted_rank import HostedRank
from .hosted_uses import HostedProgram
from .outages import OutageCluster
from .parts import Parts
from .rank import Rank


class HostedJob(Cluster):
    """Beside the kind of cluster that a subclass names first."""

    program_class = HostedProgram
    rank_class = HostedRank

    def __init__(self, seed: int, parts: type[Parts] = Parts) -> None:
        super().__init__(seed, parts)
        train(self)

    def new_rank(self, settings: Any) -> Rank:
        return with_ledger(self, super().new_rank(settings))


class HostedCluster(HostedJob):
    """On a reliable network."""


class HostedOutageCluster(HostedJob, OutageCluster):
    """Beside an unreliable network."""


def train(cluster: Cluster) -> None:
    """Find out what comes of its program's steps."""
    if isinstance(cluster.program, HostedProgram):
        cluster.program.train(cluster.local_sizes)
        cluster.results |= {use.id: use.combined(cluster.local_sizes) for use in cluster.program.sums}


def with_ledger(cluster: Cluster, rank: Rank) -> Rank:
    if isinstance(rank, HostedRank):
        rank.ledger = cluster.ledger
    return rank
