"""Networks that lose everything for a while: to a machine, from it, or both. Its processes go on meanwhile.

TCP says again what was lost, so what is sent meanwhile arrives later, unless its connection is given up before.
"""

from __future__ import annotations

from typing import Any

from .cluster import Cluster
from .elastic import ElasticCluster
from .parts import Parts
from .rank import Rank
from .shocks import CUT_OFF, FOR_GOOD_S, SHOCKS, Shocks
from .trials import Strikes
from .world import Outage

OUTAGES = ("a server is cut off", "a machine is cut off for a moment")


class Outages(Strikes):
    """Which hosts are struck, and for how long."""

    def __init__(self, cluster: Cluster) -> None:
        rng = cluster.world.random
        count = rng.choice((1, 2, 6)) if cluster.machines > 1 else 0
        kinds = rng.sample(OUTAGES, rng.randint(1, len(OUTAGES)))
        super().__init__(cluster, rng.choice((10, 40, 150)), [rng.choice(kinds) for _ in range(count)])
        self._cluster = cluster
        self._cleared_s: dict[str, float] = {}  # by host

    def _strike(self, kind: str) -> None:
        whom = self._cut_server_off() if kind == "a server is cut off" else self._cut_machine_off_briefly()
        if whom:
            self._note(kind, whom)

    def _is_rested(self, host: str) -> bool:
        """It has been heard since it was struck last."""
        return self._world.now_s > self._cleared_s.get(host, -1.0) + 2 * self._cluster.config.heartbeat_interval_s

    def _cut_server_off(self) -> str:
        """A CPU machine's: those of GPU machines share their machine's network."""
        able = self._cluster.trials.able()
        candidates = [server for server in able if server.machine < 0 and self._is_rested(server.host)]
        if len(able) < 2 or not candidates:
            return ""
        server = self._random.choice(candidates)
        for_s = self._random.choice((0.05, 0.5, 4.0, 8.0)) * self._random.random()
        if for_s > self._shorter_s:  # it will be given up
            self._cluster.hit.add(server)
        return self.cut(server.host, for_s)

    def _cut_machine_off_briefly(self) -> str:
        """Not where a connection is just being made again, for which there is less time."""
        unheard = {link.host for link in self._cluster.place.links if not (link.is_heard or link.is_over)}
        workers = [worker for worker in self._cluster.workers if worker.is_alive and self._is_rested(worker.host)]
        workers = [worker for worker in workers if worker.host not in unheard]
        if not workers:
            return ""
        return self.cut(self._random.choice(workers).host, self._shorter_s * self._random.random())

    @property
    def _shorter_s(self) -> float:
        """Than a silence that is too long, with a heartbeat on each side of it."""
        return self._cluster.config.heartbeat_timeout_s - 2 * self._cluster.config.heartbeat_interval_s

    def cut(self, host: str, for_s: float) -> str:
        """In words."""
        world = self._world
        to_it, from_it = self._random.choice(((True, True), (True, False), (False, True)))
        until_s = self._cleared_s[host] = world.now_s + for_s
        outage = Outage(host, to_it, from_it, until_s)
        world.outages.append(outage)
        for connection in [*self._cluster.network.links, *self._cluster.place.streams]:
            if outage.affects(connection.way) or outage.affects(connection.way[::-1]):
                self._give_up_later(connection, until_s)
        ways = "both ways" if to_it and from_it else "to it" if to_it else "from it"
        return f"{host}, {ways}, " + ("for good" if for_s >= FOR_GOOD_S else f"for {for_s:.2f} s")

    def _give_up_later(self, connection: Any, until_s: float) -> None:
        world = self._world
        notice_s = world.notice_s()

        def notice() -> None:
            if world.is_interrupted(connection.way):
                connection.break_()

        if world.now_s + notice_s < until_s:
            world.after(notice_s, None, None, notice)


class OutageCluster(Cluster):
    """Jobs beside an unreliable network."""

    def __init__(self, seed: int, parts: type[Parts] = Parts) -> None:
        super().__init__(seed, parts)
        rng = self.world.random
        self.fault = CUT_OFF if self.machines > 1 and rng.random() < 0.2 else ""
        self.outages = Outages(self)
        self._blind = ""  # the host that nothing comes to, or from

    def is_blind(self, rank: Rank) -> bool:
        return rank.host == self._blind or super().is_blind(rank)

    def strike_more(self) -> None:
        super().strike_more()
        self.outages.step()

    def _strike(self) -> None:
        workers = [worker for worker in self.workers if worker.is_alive]
        if workers:
            worker = self.world.random.choice(workers)
            for_s = self.world.random.choice((4.0, 20.0, FOR_GOOD_S))
            self._blind = worker.host
            self.world.hang_s += 60.0  # who hears of nobody has only the limits of a start, or of a stall
            self.world.faults.append(f"{self.fault}: {self.outages.cut(worker.host, for_s)}")
            self.world.note("world", self.world.faults[-1])


class ElasticOutageCluster(ElasticCluster):
    """The same, and the others go on without a machine that is cut off for long."""

    def __init__(self, seed: int, parts: type[Parts] = Parts) -> None:
        super().__init__(seed, parts)
        self.shocks = Shocks(self, (*SHOCKS, CUT_OFF, CUT_OFF))
        self.world.hang_s += 60.0
        self.outages = Outages(self)

    def strike_more(self) -> None:
        super().strike_more()
        self.outages.step()

    def cut_off(self, machine: int, for_s: float) -> str:
        return self.outages.cut(self.workers[machine].host, for_s)
