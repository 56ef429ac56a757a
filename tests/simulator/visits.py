"""Servers that come for a moment: partitions go over to them, and back again before their rounds are over."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from .services import Server
from .tables import has_visits
from .trials import Strikes

if TYPE_CHECKING:
    from .cluster import Cluster

VISIT = "a server comes for a moment"
_MOST = 8


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
