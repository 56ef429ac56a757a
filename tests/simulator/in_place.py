"""An elastic job that keeps its ranks (BYTEPS_MAX_RESTARTS): ranks, services and machines that die are started again,
and take their places. What each shock does, and what each launcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from byteps_py.config.settings import Settings
from byteps_py.scheduler.job import FAILED

from .elastic import ElasticCluster, ElasticWorker
from .groups import Book
from .in_place_rank import InPlaceBook, InPlaceRank
from .parts import Parts
from .rank import Rank
from .services import Worker
from .shocks import Shocks
from .world import InvariantError

_AWAY_S = (0.02, 0.3, 3.0)  # at most, until it is started again
_MOST_RESTARTS = 100  # of all processes: what goes on for ever is found out
EVERY_MACHINE = "kill every machine"
IN_PLACE_SHOCKS = ("kill a rank", "kill a machine", "kill a communication service", "a rank goes back", EVERY_MACHINE)
_RANKS_ALONE = ("kill a rank", "a rank goes back")


class InPlaceShocks(Shocks):
    """They take nobody in the last step: others may be done then, and nobody waits for who comes again."""

    _cluster: InPlaceCluster

    def _strike(self, kind: str) -> None:
        cluster, rng = self._cluster, self._random
        ranks = [rank for rank in cluster.seats.values() if rank.is_alive]
        machines = sorted({rank.machine for rank in ranks})
        if not ranks or any(rank.is_ending for rank in cluster.seats.values()):
            return
        rank = rng.choice(ranks)
        dying = machines if kind == EVERY_MACHINE else [rank.machine]
        if kind not in _RANKS_ALONE and not self._may_go(dying):
            return
        self.are_losses = True
        if kind == "a rank goes back":
            rank.wants_back = True
            whom = rank.name
        elif kind == "kill a rank":
            rank.die()
            whom = rank.name
        elif kind == "kill a communication service":
            cluster.workers[rank.machine].die()
            whom = f"machine {rank.machine}"
        else:
            for machine in dying:
                cluster.kill_machine(machine)
            whom = ", ".join(f"machine {machine}" for machine in dying)
        self._note(kind, whom)

    def _may_go(self, machines: list[int]) -> bool:
        """A scheduler that is started again, and none of whose machines come back, begins a new job."""
        restarts = any("scheduler again" in each for each in (*self._world.trials, *self._cluster.trials._due))
        stay = [each for each in self._cluster.workers if each.machine not in machines and each.is_alive]
        return not restarts or any(isinstance(each, ElasticWorker) and each.book is not None for each in stay)


class InPlaceCluster(ElasticCluster):
    """``seats``: by machine and its local rank, the process that is there, or was last."""

    special: ClassVar[dict[str, Any]] = {**ElasticCluster.special, "max_restarts": 100}
    rank_class: type[Rank] = InPlaceRank

    def __init__(self, seed: int, parts: type[Parts] = Parts) -> None:
        super().__init__(seed, parts)
        self.seats: dict[tuple[int, int], InPlaceRank] = {}
        self.shocks = InPlaceShocks(self, IN_PLACE_SHOCKS)
        self._coming: set[object] = set()  # what is about to be started again
        self._restarts = 0

    def new_book(self, number: int, local_sizes: list[int]) -> Book:
        if local_sizes != self.local_sizes:
            raise InvariantError(f"group {number} has {local_sizes} ranks, the first one had {self.local_sizes}")
        return InPlaceBook(self.world.seed, number, local_sizes)

    def new_rank(self, settings: Settings) -> Rank:
        rank = super().new_rank(settings)
        if not isinstance(rank, InPlaceRank):
            raise AssertionError(f"{rank.name} can't take its place again")
        rank.place = sum(self.local_sizes[: settings.worker_id]) + settings.local_rank
        self.seats[settings.worker_id, settings.local_rank] = rank
        return rank

    def new_worker(self, machine: int) -> Worker:
        worker = ElasticWorker(self.world, self.memory, machine, self.ledger)
        worker.cluster = self
        worker.on_end.append(lambda: self._service_ended(machine))
        return worker

    def kill_machine(self, machine: int) -> None:
        """At once; all of it is started again after a while."""
        self._coming.add(machine)
        for process in [each for each in self.world.processes if each.is_alive and self.machine_of(each) == machine]:
            self.hit.add(process)
            process.die()
        self._later(machine, lambda: self._start_machine_again(machine))

    # What bpslaunch does on each machine.

    def _end_worker(self, machine: int) -> None:
        """A rank has ended."""
        ranks = {place: rank for place, rank in self.seats.items() if place[0] == machine}
        if all(rank.is_done for rank in ranks.values()):
            super()._end_worker(machine)
        for place, rank in ranks.items():
            if not (rank.is_alive or rank.is_done or {machine, place} & self._coming):
                self.hit.add(rank)
                self._coming.add(place)
                self._later(place, lambda place=place: self._start_rank(*place))  # type: ignore[misc]

    def _service_ended(self, machine: int) -> None:
        if machine in self._coming:
            return
        if all(rank.is_done for place, rank in self.seats.items() if place[0] == machine):
            self._end_server(machine)
            return
        self.hit.add(self.workers[machine])
        self._later(self.workers[machine], lambda: self._start_worker_again(machine))

    def _later(self, what: object, start: Callable[[], None]) -> None:
        away_s = self.world.random.choice(_AWAY_S) * self.world.random.random()
        self.world.expect_quiet(away_s + 1.0)
        self._restarts += 1
        if self._restarts > _MOST_RESTARTS:
            raise InvariantError("processes end and are started again for ever")

        def act() -> None:
            self._coming.discard(what)
            start()

        self.world.after(away_s, None, None, act)

    def _start_rank(self, machine: int, seat: int) -> None:
        """Unless it came with its machine."""
        if machine not in self._coming and not self.seats[machine, seat].is_alive:
            self.ranks.append(self.new_rank(self._settings(machine, seat)))

    def _start_worker_again(self, machine: int) -> None:
        if machine not in self._coming and not self.workers[machine].is_alive:
            self.workers[machine] = self.start_worker(machine)

    def _start_machine_again(self, machine: int) -> None:
        self.workers[machine] = self.start_worker(machine)
        if self.gpu_machines_sum:
            self.start_server(f"server {len(self.servers)} on machine {machine}", machine)
        self.start_ranks(machine)

    # What must hold.

    def strike_more(self) -> None:
        super().strike_more()
        if self.scheduler.state == FAILED:
            raise InvariantError(f"the job ends by a loss: {self.scheduler.links.core.job.reason}")

    def check_end(self) -> None:
        missing = [rank.name for rank in self.seats.values() if not rank.is_done]
        if missing:
            raise InvariantError(f"the job is over, and not done: {', '.join(missing)}")
        super().check_end()
