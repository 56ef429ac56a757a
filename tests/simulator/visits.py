"""Servers that come for a moment: partitions go over to them, and back again before their rounds are over."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from byteps_py.placement.table import Move, PlacementTable

from .services import Server
from .trials import Strikes

if TYPE_CHECKING:
    from .cluster import Cluster

VISIT = "a server comes for a moment"
_MOST = 8


def has_visits(seed: int) -> bool:
    """Some runs have. What happens in the others does not depend on it."""
    return seed % 5 == 4


def slowness(seed: int) -> float:
    """Of servers' kernels: in half of these runs partitions come back before they have been added up."""
    return 30.0 if has_visits(seed) and seed % 2 else 1.0


class RestlessTable(PlacementTable):
    """Half of all partitions go to servers that come, and home when these go: more than the real one moves."""

    def __init__(self, servers: Iterable[tuple[int, int]], partition_bytes: int) -> None:
        super().__init__(servers, partition_bytes)
        self._homes: dict[tuple[int, int], int] = {}  # by key and index

    def rebalance(self, servers: Iterable[tuple[int, int]]) -> list[Move]:
        known = {server for server, _ in self.servers}
        before = {(key, i): part.server for key, it in self._tensors.items() for i, part in enumerate(it.parts)}
        super().rebalance(servers)
        able = [server for server, weight in self.servers if weight]
        new = [server for server in able if server not in known]
        moves = []
        for (key, index), source in before.items():
            parts = list(self.partitions(key))
            home = self._homes.setdefault((key, index), source)
            target = new[key % len(new)] if new and (key + index) % 2 else home if home in able else parts[index].server
            self._account(parts[index : index + 1], -1)
            parts[index] = parts[index]._replace(server=target)
            self._account(parts[index : index + 1], 1)
            self._replace(key, parts)
            if target != source:
                moves.append(Move(key, index, source, target))
        return sorted(moves)


class Visits(Strikes):
    """When a server comes, and goes."""

    def __init__(self, cluster: Cluster) -> None:
        rng = random.Random(f"visits {cluster.world.seed}")
        count = _MOST if cluster.machines > 1 and has_visits(cluster.world.seed) else 0
        super().__init__(cluster, rng.choice((10, 40, 150)), [VISIT] * count)
        self._random = rng
        self._cluster = cluster
        self._guest: Server | None = None
        self._goes_at_event = -1  # once it has been let in

    def step(self) -> None:
        if self._guest is None:
            super().step()
        else:
            self._watch(self._guest)

    def _strike(self, kind: str) -> None:
        cluster = self._cluster
        if not cluster.scheduler.is_alive or not any(worker.is_alive for worker in cluster.workers):
            return
        self._goes_at_event = -1
        self._note(kind, cluster.start_server(f"server {len(cluster.servers)}", -1))
        self._guest = cluster.servers[-1]

    def _watch(self, guest: Server) -> None:
        """It goes soon after machines could hear of it."""
        events = self._world.events
        if not guest.is_alive:
            self._guest = None
        elif self._goes_at_event < 0:
            if guest.address in self._cluster.scheduler.server_addresses():
                self._goes_at_event = events + int(self._random.expovariate(1 / self._random.choice((5, 30, 100))))
        elif events >= self._goes_at_event:
            self._guest = None
            if any(other is not guest for other in self._cluster.trials.able()):
                guest.die() if self._random.random() < 0.5 else guest.drain()
