"""What an elastic job must survive, again and again in one run: machines and ranks that die, freeze, come or go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .services import Worker
from .trials import Strikes

if TYPE_CHECKING:
    from .elastic import ElasticCluster

SHOCKS = (
    "kill a rank", "kill a machine", "kill a communication service", "freeze a machine",
    "a machine freezes for a while", "a machine comes", "a machine is told to leave", "a rank goes back",
)  # fmt: skip
CUT_OFF = "a machine is cut off for long"
FOR_GOOD_S = 1e6
_PLANNED = ("a machine comes", "a machine is told to leave")
_MOST = 6


class Shocks(Strikes):
    """What each does."""

    def __init__(self, cluster: ElasticCluster, known: Sequence[str] = SHOCKS) -> None:
        rng = cluster.world.random
        spacing = rng.choice((20, 100, 400))
        kinds = rng.sample(known, rng.randint(1, len(known)))
        super().__init__(cluster, spacing, [rng.choice(kinds) for _ in range(rng.choice((1, 1, 2, 3, _MOST)))])
        self._cluster = cluster
        self.are_losses = self.may_shrink = False  # so far

    def _strike(self, kind: str) -> None:
        if kind == "a machine comes":
            whom = self._start_machine()
        elif kind in ("kill a rank", "a rank goes back"):
            whom = self._hit_rank(kind)
        else:
            whom = self._hit_machine(kind)
        if whom:
            self.are_losses = self.are_losses or kind not in _PLANNED
            self.may_shrink = self.may_shrink or kind != "a machine comes"
            self._note(kind, whom)

    def _able(self) -> list[Worker]:
        """Communication services with ranks that will see the job through, as things are."""
        cluster = self._cluster
        return [
            worker
            for worker in cluster.workers
            if worker.is_alive
            and worker not in cluster.hit
            and worker.has_begun
            and any(rank.is_alive and not rank.has_finished for rank in cluster.ranks_of(worker.machine))
        ]

    def _start_machine(self) -> str:
        if not self._cluster.scheduler.is_alive or not self._able():
            return ""
        return f"machine {self._cluster.start_machine(self._random.choice((1, 2)))}"

    def _hit_rank(self, kind: str) -> str:
        able = self._able()
        ranks = [rank for worker in able for rank in self._cluster.ranks_of(worker.machine) if rank.is_alive]
        if len(ranks) < 2:
            return ""
        rank = self._random.choice(ranks)
        if kind == "a rank goes back":
            rank.wants_back = True
            return rank.name
        others = [other for other in self._cluster.ranks_of(rank.machine) if other is not rank and other.is_alive]
        if not (others or self._has_server_beside(rank.machine)):
            return ""
        self._cluster.hit.add(rank)
        if not others:  # its machine goes, too
            self._cluster.hit.update(server for server in self._cluster.servers if server.machine == rank.machine)
        rank.die()
        return rank.name

    def _has_server_beside(self, machine: int) -> bool:
        """The job can do without this machine's, perhaps with a new one."""
        cluster = self._cluster
        if any(server.machine != machine for server in cluster.trials.able()):
            return True
        if cluster.scheduler.is_alive:
            cluster.start_server(f"server {len(cluster.servers)}", -1)
        return cluster.scheduler.is_alive

    def _hit_machine(self, kind: str) -> str:
        cluster, world = self._cluster, self._world
        able = self._able()
        if len(able) < 2:
            return ""
        machine = self._random.choice(able).machine
        if not self._has_server_beside(machine):
            return ""
        here = [process for process in world.processes if cluster.machine_of(process) == machine and process.is_alive]
        cluster.hit.update(here)
        for rank in cluster.ranks_of(machine):
            rank.may_fail = True
        if kind == "a machine is told to leave":
            # A group that begins at this moment can't do without ranks that have yet to come.
            are_there = all(rank.has_begun and rank.has_joined for rank in cluster.ranks_of(machine))
            self.are_losses = self.are_losses or not are_there
            cluster.workers[machine]._service.stop()
        elif kind == "kill a communication service":
            cluster.workers[machine].die()
        elif kind == CUT_OFF:
            return cluster.cut_off(machine, self._random.choice((4.0, 8.0, 20.0, FOR_GOOD_S)))
        elif kind == "a machine freezes for a while":
            for_s = self._random.choice((0.5, 4.0, 8.0)) * self._random.random()
            for process in here:
                process.freeze_for(for_s)
            return f"machine {machine} for {for_s:.2f} s"
        else:
            for process in here:
                process.die() if kind == "kill a machine" else process.freeze()
            cluster.cut_off_soon(machine)
        return f"machine {machine}"
