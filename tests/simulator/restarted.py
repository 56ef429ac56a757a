"""A job of which everything dies but the CPU machines' servers, and that is started again: it begins anew at once."""

from __future__ import annotations

from byteps_py.config.settings import Settings

from .cluster import Cluster
from .parts import Parts
from .rank import Rank
from .services import Server, Worker
from .world import InvariantError, Process

ALL_BUT_SERVERS = "all but the servers of CPU machines die"
_SECOND = 1_000_000  # the group of the ranks that are started again: the ledger keeps groups apart


class RestartedCluster(Cluster):
    """The scheduler comes again first, last or in between; a machine's processes come together."""

    def __init__(self, seed: int, parts: type[Parts] = Parts) -> None:
        super().__init__(seed, parts)
        self.fault = ""
        rng = self.world.random
        self.trials._due.clear()
        self.visits._due.clear()
        self._strikes_at_event = int(rng.expovariate(1 / rng.choice((50, 300, 1000))))
        self._killed: set[Process] = set()
        self._known_results = dict(self.results)  # before ranks have entered what they heard first
        self._is_second = False

    def new_worker(self, machine: int) -> Worker:
        worker = super().new_worker(machine)
        worker.group = _SECOND if self._is_second else 0
        return worker

    def new_rank(self, settings: Settings) -> Rank:
        rank = super().new_rank(settings)
        rank.group = _SECOND if self._is_second else 0
        return rank

    def start_server(self, name: str, machine: int) -> str:
        started = super().start_server(name, machine)
        server = self.servers[-1]
        server.group = _SECOND if self._is_second else 0
        server.has_been_replaced = lambda: self._goes_on_as(server)
        return started

    def _goes_on_as(self, server: Server) -> None:
        """As persistent_server.py does it."""
        if server.machine < 0:
            self._killed.add(server)
            self.start_server(f"{server.name} again", -1)

    def strike_more(self) -> None:
        if 0 <= self._strikes_at_event <= self.world.events and self.has_begun:
            self._strikes_at_event = -1
            self._kill()

    def _kill(self) -> None:
        world, rng = self.world, self.world.random
        world.trials.append(f"{ALL_BUT_SERVERS}: at {world.now_s:.2f} s")
        world.note("world", ALL_BUT_SERVERS)
        dead = [*self.ranks, *self.workers, *(s for s in self.servers if s.machine >= 0), self.scheduler]
        for process in dead:
            if process.is_alive:
                process.die()
        self._killed.update(dead)
        for (
            link
        ) in self.place.links:  # of processes that were about to end, and were waiting for the scheduler's answer
            if link.process is None:
                link._give_up()
        self._is_second = True
        self.results = dict(self._known_results)
        self.servers = [server for server in self.servers if server.machine < 0]
        self.ranks, self.workers = [], []
        spread_s = rng.choice((0.01, 0.5, 3.0))
        comes_s = [rng.random() * spread_s for _ in range(self.machines + 1)]
        world.expect_quiet(max(comes_s) + 1.0)
        world.after(comes_s[-1], None, "the scheduler is started again", self.place.start_again)
        for machine in range(self.machines):
            world.after(max(comes_s[: machine + 1]), None, None, lambda machine=machine: self._start_machine(machine))

    def _start_machine(self, machine: int) -> None:
        self.start_services(machine)
        self.start_ranks(machine)

    def check_end(self) -> None:
        if any(rank.error is not None for rank in self.ranks):
            raise InvariantError(f"{[rank.error for rank in self.ranks]} after a restart")
        others = [process for process in self.world.processes if process not in self._killed]
        # A server that came when the new job was over is refused; its launcher knows that the ranks have ended well.
        needed = [process for process in others if not isinstance(process, Server) or process.was_member]
        codes = {process.name: process.exit_code for process in needed if process.exit_code != 0}
        if codes:
            raise InvariantError(f"exit codes after an orderly end: {codes}")
