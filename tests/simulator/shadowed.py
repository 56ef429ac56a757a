"""Jobs whose optimizers' states are kept in step by summation servers, until all ranks and services die at once."""

from __future__ import annotations

from typing import Any

from .hosted import HostedJob
from .outages import OutageCluster
from .parts import Parts
from .rank import Rank
from .shadow_rank import ShadowRank
from .shadow_uses import ShadowProgram
from .shadow_watch import ShadowWatch

ALL_DIE = "all ranks and communication services die"
_EVENTS_BETWEEN = (10, 40, 160)


class ShadowJob(HostedJob):
    """Beside the kind of cluster that a subclass names first."""

    program_class = ShadowProgram
    rank_class = ShadowRank

    def __init__(self, seed: int, parts: type[Parts] = Parts) -> None:
        super().__init__(seed, parts)
        if not isinstance(self.program, ShadowProgram):
            raise AssertionError("it has another program")
        rng = self.world.random
        self.watch = ShadowWatch(self, self.program)
        self._every = rng.choice(_EVENTS_BETWEEN)
        self._dies_at_event = -1
        if self.machines > 1 and rng.random() < 0.4:
            self.fault = ""
            self._dies_at_event = int(rng.expovariate(1 / rng.choice((500, 1500, 3000))))

    def new_rank(self, settings: Any) -> Rank:
        rank = super().new_rank(settings)
        if isinstance(rank, ShadowRank):
            rank.agreement = self._parts.held_op
        return rank

    def strike_more(self) -> None:
        super().strike_more()
        events = self.world.events
        self.watch.watch()
        if events % self._every == 0:
            self.watch.check()
        if 0 <= self._dies_at_event <= events and self.has_begun:
            self._dies_at_event = -1
            self._kill_all()

    def _kill_all(self) -> None:
        """At once, perhaps with their machines."""
        self.watch.check()
        self.world.faults.append(ALL_DIE)
        self.world.note("world", ALL_DIE)
        with_machines = self.world.random.random() < 0.5
        for process in [*self.ranks, *self.workers, *(self.servers if with_machines else ())]:
            if process.is_alive and process.machine >= 0:
                process.die()
        self.watch.check()

    def check_end(self) -> None:
        super().check_end()
        self.watch.check()


class ShadowCluster(ShadowJob):
    """On a reliable network."""


class ShadowOutageCluster(ShadowJob, OutageCluster):
    """Beside an unreliable network."""
