"""An elastic job: machines and ranks die, come and go, and the others go on as another group."""

from __future__ import annotations

from typing import Any, ClassVar

from byteps_py.config.settings import Settings
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.core import RUNNING

from .cluster import Cluster
from .elastic_rank import ElasticRank
from .groups import Book
from .parts import Parts
from .rank import Rank
from .services import Worker
from .shocks import Shocks
from .world import InvariantError, Process

_ELASTIC_TIMEOUT_S = 15.0
_LAUNCHER_S = 0.5


class ElasticWorker(Worker):
    """``book``: of the group that it was last in."""

    book: Book | None = None
    cluster: ElasticCluster

    def start(self, *given: Any) -> None:
        super().start(*given)
        service: Any = self._service
        self._begin, service._begin = service._begin, self._note_begin
        self._welcome, service._rank_server._welcome = service._rank_server._welcome, self._note_welcome

    def _note_begin(self, membership: pb.Membership) -> None:
        if self._service._member_id in [worker.member_id for worker in membership.workers]:
            self.book = self.cluster.book_of(membership)
            self.group = self.book.number
        self._begin(membership)

    def _note_welcome(self, rank: Any) -> None:
        process = rank.connection._channel.peer.process
        if isinstance(process, ElasticRank) and self.book is not None:
            process.book = self.book
            process.group = self.book.number
        self._welcome(rank)

    def stop(self) -> None:
        """It gets SIGTERM."""
        if self.is_alive:
            self._service.stop()

    def _check_end(self) -> None:
        group = self._service._group
        is_whole = group is not None and len(self._service._rank_server.ranks.left) == group.topology.local_size
        if is_whole and not self.cluster.hit.intersection((self, *self.cluster.ranks_of(self.machine))):
            super()._check_end()


class ElasticCluster(Cluster):
    special: ClassVar[dict[str, Any]] = {"elastic": True, "elastic_timeout_s": _ELASTIC_TIMEOUT_S}
    rank_class: type[Rank] = ElasticRank

    def __init__(self, seed: int, parts: type[Parts] = Parts) -> None:
        super().__init__(seed, parts)
        self.fault = ""
        self.books: dict[int, Book] = {}
        self.shocks = Shocks(self)
        self.world.hang_s = 3 * _ELASTIC_TIMEOUT_S
        self._commit_every = self.world.random.choice((1, 1, 2, 3))

    @property
    def has_begun(self) -> bool:
        return self.scheduler.state == RUNNING and bool(self.books)

    def book_of(self, membership: pb.Membership) -> Book:
        local_sizes = [worker.local_size for worker in membership.workers]
        number = membership.workers_since
        book = self.books.get(number)
        if book is None:
            book = self.books[number] = self.new_book(number, local_sizes)
            self.world.note("world", f"group {number}: {'+'.join(map(str, local_sizes))} ranks")
        if book.local_sizes != local_sizes:
            raise InvariantError(f"group {number} is {local_sizes} to one machine, {book.local_sizes} to another")
        return book

    def new_book(self, number: int, local_sizes: list[int]) -> Book:
        return Book(self.world.seed, number, local_sizes)

    def new_worker(self, machine: int) -> Worker:
        worker = ElasticWorker(self.world, self.memory, machine, self.ledger)
        worker.cluster = self
        worker.on_end.append(lambda: self.world.after(_LAUNCHER_S, None, None, lambda: self._end_server(machine)))
        return worker

    def new_rank(self, settings: Settings) -> Rank:
        rank = self.rank_class(self.world, self.memory, self.local, settings, len(self.ranks), self.program, {})
        if not isinstance(rank, ElasticRank):
            raise AssertionError(f"{rank.name} can't be in one group after another")
        rank.chunk_bytes = self.runtimes.thresholds.chunk
        rank.commit_every = self._commit_every
        rank.is_job_over = lambda: self.scheduler.state != RUNNING
        rank.has_reason = lambda: self.shocks.are_losses
        rank.may_shrink = lambda: self.shocks.may_shrink
        rank.on_end.append(lambda: self._end_worker(rank.machine))
        return rank

    def ranks_of(self, machine: int) -> list[ElasticRank]:
        return [rank for rank in self.ranks if isinstance(rank, ElasticRank) and rank.machine == machine]

    def start_machine(self, local_size: int) -> int:
        """One more."""
        machine = len(self.local_sizes)
        self.local_sizes.append(local_size)
        self.machines += 1
        self.start_services(machine)
        self.start_ranks(machine)
        return machine

    def cut_off(self, machine: int, for_s: float) -> str:
        """Nothing comes to it, or from it; in words."""
        raise AssertionError("its network does not fail")

    # What bpslaunch does on each machine.

    def _end_worker(self, machine: int) -> None:
        """Once no rank is left."""
        worker, ranks = self.workers[machine], self.ranks_of(machine)
        if isinstance(worker, ElasticWorker) and not any(rank.is_alive for rank in ranks):
            self.world.after(max(rank.unheard_s() for rank in ranks), None, None, worker.stop)

    def _end_server(self, machine: int) -> None:
        """Once the communication service is gone."""
        for server in self.servers:
            if server.machine == machine and server.is_alive:
                server.drain()

    def strike_more(self) -> None:
        super().strike_more()
        self.shocks.step()

    def check_end(self) -> None:
        if self.world.faults:
            return
        left = self.scheduler.addresses_left()
        codes = {
            process.name: process.exit_code
            for process in self.world.processes
            if process.exit_code != 0 and process not in self.hit and not self.may_fail(process, left)
        }
        if codes:
            raise InvariantError(f"exit codes after an orderly end: {codes}")

    def may_fail(self, process: Process, left: set[str]) -> bool:
        if isinstance(process, ElasticWorker):
            return process.book is None  # it came too late
        return super().may_fail(process, left)
