"""What a job must survive, again and again in one run: servers that die, freeze, come or go, connections that break."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .network import TcpLink
from .services import Server

if TYPE_CHECKING:
    from .cluster import Cluster

TRIALS = (
    "kill a server", "freeze a server", "drain a server", "start a server", "cut a connection", "cut a machine off",
    "start the scheduler again", "cut off from the scheduler", "kill every server",
)  # fmt: skip
LINK = "change a link"
_MAX_TRIALS = 8


class Strikes(ABC):
    """When they come: ``due``, the last first. One that can't be at its moment is left out. ``spacing``: in events."""

    def __init__(self, cluster: Cluster, spacing: int, due: list[str]) -> None:
        self._on = cluster
        self._world = cluster.world
        self._random = cluster.world.random
        self._spacing = spacing
        self._due = due
        self._next_event = -1

    def step(self) -> None:
        """Between two events."""
        if not self._due or not self._on.has_begun:
            return
        if self._next_event < 0:
            self._wait()
        if self._world.events >= self._next_event:
            self._strike(self._due.pop())
            self._wait()

    def _wait(self) -> None:
        self._next_event = self._world.events + int(self._random.expovariate(1 / self._spacing))

    def _note(self, kind: str, whom: str) -> None:
        """It has happened."""
        self._world.trials.append(f"{kind}: {whom}")
        self._world.note("world", self._world.trials[-1])

    @abstractmethod
    def _strike(self, kind: str) -> None: ...


class Trials(Strikes):
    """What each does."""

    def __init__(self, cluster: Cluster, known: Sequence[str] = TRIALS) -> None:
        rng = cluster.world.random
        count = rng.choice((0, 1, 2, _MAX_TRIALS)) if cluster.machines > 1 else 0
        spacing = rng.choice((10, 40, 150))
        kinds = rng.sample(known, rng.randint(1, len(known)))  # some runs know few kinds, and those often
        super().__init__(cluster, spacing, [rng.choice(kinds) for _ in range(count)])
        self._cluster = cluster

    def _strike(self, kind: str) -> None:
        if kind == "start a server":
            whom = self._start()
        elif kind == "cut a connection":
            whom = self._cut(1)
        elif kind == "cut a machine off":
            whom = self._cut(99)
        elif kind == LINK:
            whom = self._change_a_link()
        elif kind == "kill every server":
            whom = self._kill_every_server()
        elif kind == "start the scheduler again":
            whom = self._start_scheduler_again()
        elif kind == "cut off from the scheduler":
            whom = self._cut_off_from_scheduler()
        else:
            whom = self._hit_server(kind)
        if whom:
            self._note(kind, whom)

    def able(self) -> list[Server]:
        """Servers that can hold keys, as far as the scheduler knows, and can be relied on."""
        cluster = self._cluster
        known = cluster.scheduler.server_addresses()
        return [
            server
            for server in cluster.servers
            if server.is_alive
            and not server.is_paused
            and not server.is_leaving
            and server.address in known
            and server not in cluster.hit
            # Not those of machines that are yet to be let in.
            if server.machine < 0 or cluster.workers[server.machine].has_begun
        ]

    def _hit_server(self, kind: str) -> str:
        able = self.able()
        candidates = [server for server in self._cluster.servers if server.is_alive]
        if kind != "kill a server":
            candidates = [server for server in candidates if server in able]
        candidates = [server for server in candidates if any(other is not server for other in able)]
        if not candidates:
            return ""
        server = self._random.choice(candidates)
        if kind == "kill a server":
            server.die()
        elif kind == "drain a server":
            server.drain()
        else:
            server.freeze_for(self._random.choice((0.05, 0.5, 4.0, 8.0)) * self._random.random())
        return server.name

    def _start_at_last(self) -> None:
        """Once there is a scheduler that it can come to."""
        if not self._start() and any(worker.is_alive for worker in self._cluster.workers):
            self._world.after(0.1, None, None, self._start_at_last)

    def _start(self) -> str:
        cluster = self._cluster
        if not cluster.scheduler.is_alive:
            return ""
        taken = {cluster.machine_of(server) for server in cluster.servers if server.is_alive}
        there = [w for w in cluster.workers if w.is_alive and w.has_begun and w not in cluster.hit]
        free = [worker.machine for worker in there if worker.machine not in taken]
        if free and cluster.gpu_machines_sum and self._random.random() < 0.5:
            machine = self._random.choice(free)
            return cluster.start_server(f"server {len(cluster.servers)} on machine {machine}", machine)
        return cluster.start_server(f"server {len(cluster.servers)}", -1)

    def _kill_every_server(self) -> str:
        """One comes after a while: started again, as a launcher does."""
        world, alive = self._world, [server for server in self._cluster.servers if server.is_alive]
        if not self.able():
            return ""
        for server in alive:
            server.die()
        away_s = self._random.choice((0.3, 2.0, 6.0)) * self._random.random()
        world.expect_quiet(away_s)
        world.after(away_s, None, None, self._start_at_last)
        return f"after {away_s:.2f} s another one comes"

    def _cut(self, limit: int) -> str:
        network = self._cluster.network
        links = [link for link in network.links if link.process.is_alive and not link.server.process.is_gone]
        if not links:
            return ""
        process = self._random.choice(links).process
        chosen: list[TcpLink] = [link for link in links if link.process is process]
        chosen = self._random.sample(chosen, min(limit, len(chosen)))
        for link in chosen:
            link.break_()
        return ", ".join(f"{link.process.name} from {link.server.process.name}" for link in chosen)

    def _start_scheduler_again(self) -> str:
        cluster, world = self._cluster, self._world
        if not cluster.scheduler.is_alive or cluster.fault == "kill the scheduler":
            return ""
        cluster.scheduler.die()
        away_s = self._random.choice((0.01, 0.3, 2.0)) * self._random.random()
        world.after(away_s, None, "somebody starts the scheduler again", cluster.place.start_again)
        # Who has died meanwhile is given time to come back.
        world.expect_quiet(away_s + 5 * cluster.config.heartbeat_timeout_s)
        return f"after {away_s:.2f} s"

    def _change_a_link(self) -> str:
        scheduler = self._cluster.scheduler
        return scheduler.change_a_link(self._random.choice((0.1, 0.5, 2.0, 8.0))) if scheduler.is_alive else ""

    def _cut_off_from_scheduler(self) -> str:
        links = [link for link in self._cluster.place.links if link.can_break]
        if not links:
            return ""
        link = self._random.choice(links)
        link.break_()
        return link.name
