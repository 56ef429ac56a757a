"""Jobs on busy machines: processes that have to wait for a processor, longer and longer, and live.

Whoever has been late before is given time, so nobody is lost; and a server that then freezes for good is found all the
same, as the job comes to its end.
"""

from __future__ import annotations

from byteps_py.scheduler.roster import Presence

from .cluster import Cluster
from .parts import Parts
from .services import Server, Worker
from .trials import Strikes
from .world import InvariantError

STARVES, STOPS = "a process starves", "a busy server freezes for good"
#: In floors (PS_HEARTBEAT_TIMEOUT): the first silences are shorter, the last is longer.
_SILENCES = (0.5, 0.8, 1.5)
_PAUSE_S = 1.2  # in between: some heartbeats


class Starving(Strikes):
    """One process after the other, each ever longer."""

    def __init__(self, cluster: Cluster) -> None:
        rng = cluster.world.random
        kinds = [STARVES] * rng.choice((1, 2, 3)) if cluster.machines > 1 else []
        if kinds and rng.random() < 0.3:
            kinds.insert(0, STOPS)  # the last
        super().__init__(cluster, rng.choice((5, 40, 150)), kinds)
        self._cluster = cluster
        self._starved: set[Server | Worker] = set()
        self.frozen: Server | None = None

    def _strike(self, kind: str) -> None:
        cluster = self._cluster
        servers = cluster.trials.able()
        if kind == STOPS:
            candidates = [server for server in servers if server not in self._starved]
            if len(servers) > 1 and candidates:
                self.frozen = self._random.choice(candidates)
                cluster.world.expect_quiet(cluster.config.patience_s)
                self.frozen.freeze()
                cluster.hit.add(self.frozen)
                self._note(kind, self.frozen.name)
            return
        workers = [worker for worker in cluster.workers if worker.is_alive and worker.has_begun]
        able = [process for process in (*servers, *workers) if process not in self._starved]
        if able:
            process = self._random.choice(able)
            self._starved.add(process)
            self._note(kind, process.name)
            self._starve(process, 0)

    def _starve(self, process: Server | Worker, turn: int) -> None:
        if turn == len(_SILENCES) or not process.is_alive:
            return
        silence_s = _SILENCES[turn] * self._cluster.config.heartbeat_timeout_s
        process.freeze_for(silence_s)
        self._world.after(silence_s + _PAUSE_S, None, None, lambda: self._starve(process, turn + 1))


class BusyCluster(Cluster):
    """Nothing else happens to it."""

    def __init__(self, seed: int, parts: type[Parts] = Parts) -> None:
        super().__init__(seed, parts)
        self.fault = ""
        self.starving = Starving(self)

    def strike_more(self) -> None:
        self.starving.step()

    def check_end(self) -> None:
        super().check_end()
        frozen = self.starving.frozen
        for member in self.scheduler.links.core.job.roster.everyone:
            is_frozen = frozen is not None and member.facts.address == frozen.address
            if member.presence is Presence.LOST and not is_frozen:
                raise InvariantError(f"{member.describe()} was only slow: {self.scheduler.links.core.reason}")
