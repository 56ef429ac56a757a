"""Jobs whose optimizers' states are kept in step by summation servers, until all ranks and services die at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from .codecs import INT8
from .hosted import HostedJob
from .network import TcpLink
from .outages import OutageCluster
from .parts import Parts
from .rank import Rank
from .shadow_rank import ShadowRank
from .shadow_uses import CodedShadowProgram, ShadowProgram
from .shadow_watch import ShadowWatch
from .trials import Strikes

ALL_DIE = "all ranks and communication services die"
CUT, SHORTAGE = "a connection with states on it is cut", "servers have no memory for states"
JOIN, LOSS = "a server comes, and stays", "a server dies of whose copies there are others"
_EVENTS_BETWEEN = (10, 40, 160)
_WAITING_BYTES = (1000, 3000)  # if it is limited at all
_SHORT_CREDIT_BYTES = 200


class ShadowStrikes(Strikes):
    """Faults of shadowed jobs, beside those of all jobs."""

    def __init__(self, cluster: ShadowJob, kinds: Sequence[str]) -> None:
        rng = cluster.world.random
        self._job = cluster
        count = rng.choice((0, 0, 3, 10)) if cluster.machines > 1 or cluster.cpu_machines else 0
        kinds = rng.sample(kinds, rng.randint(1, 2))
        super().__init__(cluster, rng.choice((20, 60, 150)), [rng.choice(kinds) for _ in range(count)])

    def _strike(self, kind: str) -> None:
        cluster, world = self._on, self._world
        if kind == SHORTAGE:
            memory = cluster.memory
            memory.available_bytes = 0.0
            for_s = world.delay() * self._random.choice((10, 100))
            world.after(for_s, None, None, lambda: vars(memory).pop("available_bytes", None))
            self._note(kind, f"for {for_s:.3f} s")
            return
        if kind == JOIN:
            ranks = [rank for rank in cluster.ranks if isinstance(rank, ShadowRank)]
            if cluster.scheduler.is_alive and any(rank.durable for rank in ranks):
                self._note(kind, cluster.start_server(f"server {len(cluster.servers)}", -1))
            else:
                self._due.append(kind)
            return
        if kind == LOSS:
            able = cluster.trials.able()
            if len(able) > 1 and self._job.watch.has_two_copies():
                server = self._random.choice(able)
                server.die()
                self._note(kind, server.name)
                self._job.watch.watch()
                self._job.watch.check()
            else:
                self._due.append(kind)
            return
        links = [link for link in cluster.network.links if isinstance(link, TcpLink) and link.has_states]
        if links:
            link = self._random.choice(links)
            link.break_()
            self._note(kind, link.process.name)
        else:
            self._due.append(kind)


class ShadowJob(HostedJob):
    """Beside the kind of cluster that a subclass names first."""

    program_class = ShadowProgram
    rank_class = ShadowRank
    faults: ClassVar[Sequence[str]] = (CUT, SHORTAGE, JOIN, JOIN)

    def __init__(self, seed: int, parts: type[Parts] = Parts) -> None:
        super().__init__(seed, parts)
        if not isinstance(self.program, ShadowProgram):
            raise AssertionError("it has another program")
        rng = self.world.random
        self.watch = ShadowWatch(self, self.program, self.special.get("shadow_copies", 1))
        self.strikes = ShadowStrikes(self, self.faults)
        if rng.random() < 0.25 and SHORTAGE in self.faults:
            self.memory.most_waiting_bytes = rng.choice(_WAITING_BYTES)
        if rng.random() < 0.3:
            self.watch.credit_bytes = _SHORT_CREDIT_BYTES
        self._every = rng.choice(_EVENTS_BETWEEN)
        self._dies_at_event = -1
        if (self.machines > 1 or self.cpu_machines) and rng.random() < 0.4:
            self.fault = ""
            self._dies_at_event = int(rng.expovariate(1 / rng.choice((500, 1500, 3000))))

    def new_rank(self, settings: Any) -> Rank:
        rank = super().new_rank(settings)
        if isinstance(rank, ShadowRank):
            rank.agreement = self._parts.held_op
        return rank

    def strike_more(self) -> None:
        super().strike_more()
        self.strikes.step()
        events = self.world.events
        self.watch.watch()
        if events % self._every == 0 or self.watch.is_due:
            self.watch.check()
        if 0 <= self._dies_at_event <= events and self.has_begun:
            self._dies_at_event = -1
            self._kill_all()

    def _kill_all(self) -> None:
        """At once, perhaps with their machines."""
        self.watch.check()
        self.world.faults.append(ALL_DIE)
        self.world.hang_s += 60.0  # a scheduler that was started again gives all of them time
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


class ShadowCodedCluster(ShadowJob):
    """On a reliable network, with gradients that travel compressed."""

    program_class = CodedShadowProgram
    partition_bytes = 2 * INT8.item_bytes


class ShadowCopiesCluster(ShadowJob):
    """On a reliable network, with two copies of all states and records: one server's loss loses no step."""

    special: ClassVar[dict[str, Any]] = {"shadow_copies": 2}
    faults: ClassVar[Sequence[str]] = (CUT, JOIN, LOSS, LOSS)
