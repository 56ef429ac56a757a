"""One run: a cluster, a program for its ranks, perhaps a fault, and what must hold at the end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from byteps_py.config.settings import Settings
from byteps_py.errors import PeerLostError, RendezvousError, StallError
from byteps_py.scheduler.core import RUNNING
from byteps_py.scheduler.membership import SUCCESSOR_S
from byteps_py.scheduler.roster import ClusterConfig

from .control import Place, Scheduler
from .ledger import Ledger
from .local import Local
from .memory import Memory
from .network import Network
from .parts import Parts, communication_service, summation_service
from .program import PARTITION_BYTES, Program
from .rank import Rank
from .runtime import Runtimes
from .services import Server, Worker
from .tables import table_class
from .trials import TRIALS, Trials
from .visits import Visits
from .world import InvariantError, Process, World

# Mbit/s; 0: measured.
_LINK_RATES = ((1000.0,), (1000.0,), (100.0, 400.0), (0.0,), (0.0, 400.0))
_CREDITS = (0, PARTITION_BYTES // 2, PARTITION_BYTES, 3 * PARTITION_BYTES, 16 * PARTITION_BYTES)
_MAX_EVENTS = 200_000
FAULTS = (
    "kill a rank", "kill a worker", "kill all servers", "a rank leaves", "freeze a machine", "kill the scheduler",
)  # fmt: skip
_STALL_LIMIT_S = 40.0
_NOTICED_S = 6.0  # connections to a machine that is silent end by then


@dataclass(frozen=True, slots=True)
class Report:
    """``shape``: machines' local sizes and number of CPU machines. ``fault``: what has ended the job; empty if none.
    ``trials``: what it had to survive."""

    seed: int
    shape: str
    fault: str
    trials: tuple[str, ...]
    events: int
    uses: int
    virtual_s: float
    violation: str
    log: str


class Cluster:
    """``special``: settings of this kind of cluster."""

    special: ClassVar[dict[str, Any]] = {}
    program_class: type[Program] = Program
    partition_bytes = PARTITION_BYTES
    known_trials: ClassVar[Sequence[str]] = TRIALS
    rank_class: type[Rank] = Rank

    def __init__(self, seed: int, parts: type[Parts] = Parts) -> None:
        world = self.world = World(seed)
        self._parts = parts
        rng = world.random
        self.machines = rng.choice((1, 2, 2, 3, 3, 4))
        self.local_sizes = [rng.choice((1, 1, 2, 2, 3)) for _ in range(self.machines)]
        self.cpu_machines = rng.randint(0, self.machines + 1)
        self.fault = rng.choice(FAULTS) if rng.random() < 0.3 else ""
        duplicates = not self.fault and rng.random() < 0.3
        if self.fault in ("kill all servers", "freeze a machine") and self.machines == 1:
            self.fault = "kill a rank"
        self.shape = f"{'+'.join(map(str, self.local_sizes))} ranks, {self.cpu_machines} CPU machines"
        # A third of them while the cluster comes together.
        self._fault_at_event = int(rng.expovariate(1 / rng.choice((30, 300, 300))))
        self.memory = Memory()
        self.local = Local(world)
        self.network = Network(world, self.memory, duplicates)
        self.placement = "servers-only" if self.cpu_machines and rng.random() < 0.15 else "optimal"
        self.link_rates = rng.choice(_LINK_RATES)
        self.gpu_machines_sum = self._settings(0).gpu_machines_sum
        self.config = ClusterConfig.from_settings(self._settings(0))
        self.place = Place(world, self.config, parts.member_links)
        self.ledger = Ledger(self.memory, lambda: world.active.group)
        self.runtimes: Runtimes
        self.trials = Trials(self, self.known_trials)
        self.visits = Visits(self)
        self.program = self.program_class.make(rng, sum(self.local_sizes))
        self.results = self._results()
        self.ranks: list[Rank] = []
        self.workers: list[Worker] = []
        self.servers: list[Server] = []
        self.hit: set[Process] = set()  # of machines that something was done to, which the job goes on without

    def _results(self) -> dict[int, bytes]:
        """What must come out, by use."""
        uses = [use for step in self.program.steps for use in step]
        known = [use for use in uses if not (use.is_mismatch or use.is_unsupported or use.pieces)]
        return {use.id: use.combined(self.local_sizes) for use in known}

    @property
    def scheduler(self) -> Scheduler:
        """The one that is there, or was there last."""
        return self.place.scheduler

    @property
    def has_begun(self) -> bool:
        """It is complete, and has heard so: a scheduler that is started again knows it, too."""
        return self.scheduler.state == RUNNING and all(worker.has_begun for worker in self.workers)

    def _settings(self, machine: int, local_rank: int = 0) -> Settings:
        settings = Settings(
            scheduler_host="scheduler",
            scheduler_port=1,
            num_workers=self.machines,
            num_servers=self.cpu_machines,
            placement=self.placement,
            worker_id=max(machine, 0),
            local_size=self.local_sizes[max(machine, 0)],
            local_rank=local_rank,
            machine_id=f"machine {machine}",
            node_host="127.0.0.1",
            job_id="sim",
            link_mbit=self.world.random.choice(self.link_rates),
            credit_bytes=self.world.random.choice(_CREDITS),
            start_timeout_s=25.0,  # longer than a scheduler that was started again waits for its members
            stall_warn_s=4.0,
            stall_limit_s=_STALL_LIMIT_S,
            heartbeat_interval_s=0.5,
            heartbeat_timeout_s=3.0,
            **self.special,
        )
        object.__setattr__(settings, "partition_bytes", self.partition_bytes)  # far below a page: many, and small
        return settings

    def start(self) -> None:
        self.runtimes = Runtimes(self.world, self.memory, self.local, self.network, self.ledger)
        for machine in range(self.machines):
            self.start_services(machine)
        for number in range(self.cpu_machines):
            self.start_server(f"server {number}", -1)
        for machine in range(self.machines):
            self.start_ranks(machine)

    def start_services(self, machine: int) -> None:
        """Of a GPU machine."""
        self.workers.append(self.start_worker(machine))
        if self.gpu_machines_sum:
            self.start_server(f"server on machine {machine}", machine)

    def start_worker(self, machine: int) -> Worker:
        """Its communication service."""
        worker = self.new_worker(machine)
        kind = communication_service(self._parts, table_class(self.world.seed))
        worker.start(kind, self._settings(machine), self.place.link, self.runtimes.of_communication_service(worker))
        return worker

    def start_ranks(self, machine: int) -> None:
        for local_rank in range(self.local_sizes[machine]):
            self.ranks.append(self.new_rank(self._settings(machine, local_rank)))

    def new_worker(self, machine: int) -> Worker:
        return Worker(self.world, self.memory, machine, self.ledger)

    def new_rank(self, settings: Settings) -> Rank:
        rank = self.rank_class(
            self.world, self.memory, self.local, settings, len(self.ranks), self.program, self.results
        )
        rank.chunk_bytes = self.runtimes.thresholds.chunk
        return rank

    def start_server(self, name: str, machine: int) -> str:
        """``machine``: of the GPU machines; -1: a CPU machine of its own."""
        server = Server(self.world, self.memory, name, machine)
        settings = self._settings(machine if machine >= 0 else -1 - len(self.servers))
        runtime = self.runtimes.of_summation_service(server)
        server.start(summation_service(self._parts), settings, self.place.link, runtime)
        self.servers.append(server)
        return name

    def run(self) -> None:
        """Raises InvariantError."""
        world = self.world
        while self._goes_on():
            if self.fault and not world.faults and world.events >= self._fault_at_event:
                self._strike()
            self.strike_more()
            if not world.step() or world.events > _MAX_EVENTS:
                raise InvariantError(f"hangs: {self._who_hangs()}")
        self.check_end()

    def strike_more(self) -> None:
        """Between two events."""
        self.trials.step()
        self.visits.step()

    def _goes_on(self) -> bool:
        if any(process.is_alive for process in self.world.processes if process is not self.scheduler):
            return True
        # A scheduler waits half a minute for the words of those who froze.
        return self.scheduler.is_alive and not self.world.faults

    def _strike(self) -> None:
        """The fault, as soon as there is somebody to be hit."""
        rng = self.world.random
        if self.fault == "kill a worker":
            candidates: list[Process] = [*self.workers]
        elif self.fault == "kill all servers":
            candidates = [*self.servers]
        elif self.fault == "kill the scheduler":
            candidates = [self.scheduler]
            self.world.hang_s += _STALL_LIMIT_S  # for what needs a scheduler
        else:
            candidates = [rank for rank in self.ranks if rank.has_connected]
        candidates = [process for process in candidates if process.is_alive]
        if not candidates:
            return
        victim = rng.choice(candidates)
        self.world.faults.append(f"{self.fault}: {victim.name}")
        self.world.note("world", self.world.faults[-1])
        if isinstance(victim, Rank) and self.fault == "a rank leaves":
            victim.leave_early()
        elif self.fault == "freeze a machine":
            machine = self.machine_of(victim)
            self.world.expect_quiet(self.config.patience_s + 1.0)  # it may be starting
            for process in self.world.processes:
                if self.machine_of(process) == machine:
                    process.freeze()
            self.cut_off_soon(machine)
        elif self.fault == "kill all servers":
            for process in candidates:
                process.die()
            self.world.expect_quiet(SUCCESSOR_S + 5 * self.config.heartbeat_timeout_s)
        else:
            victim.die()

    def cut_off_soon(self, machine: int) -> None:
        """Others find that a silent machine's connections have ended."""

        def cut() -> None:
            for link in list(self.network.links):
                if self.machine_of(link.process) == machine:
                    link.break_()

        self.world.after(_NOTICED_S, None, None, cut)

    def machine_of(self, process: Process) -> int:
        """Index of the GPU machine that it runs on; -1 if none."""
        return process.machine if isinstance(process, (Rank, Worker, Server)) else -1

    def _who_hangs(self) -> str:
        ranks = [f"{rank.name} {rank.doing}" for rank in self.ranks if rank.is_alive]
        others = [p.name for p in self.world.processes if p.is_alive and not isinstance(p, Rank)]
        return "; ".join([*ranks, *others])

    def is_blind(self, rank: Rank) -> bool:
        """It may have nothing but the stall limit to find out that it waits in vain."""
        # Every restart of the scheduler gives those who are missing time once more.
        return self.fault == "kill the scheduler" or any("scheduler again" in it for it in self.world.trials)

    def check_end(self) -> None:
        for rank in self.ranks:
            allowed = (PeerLostError, RendezvousError, *((StallError,) if self.is_blind(rank) else ()))
            if rank.error is not None and not isinstance(rank.error, allowed):
                raise InvariantError(f"{rank.name} fails with {rank.error!r} after {self.world.faults}")
        if not self.world.faults:
            left = self.scheduler.addresses_left()
            codes = {
                process.name: process.exit_code
                for process in self.world.processes
                if process.exit_code != 0 and not self.may_fail(process, left)
            }
            if codes:
                raise InvariantError(f"exit codes after an orderly end: {codes}")

    def may_fail(self, process: Process, left: set[str]) -> bool:
        """A server that was lost, or refused because its predecessor was not known to be gone; or a scheduler that was
        killed, or is the next one and does not know that a worker has left, and those that it then waits with; or a
        server that came to a job which needed none."""
        if any(trial.startswith("start the scheduler again") for trial in self.world.trials):
            return isinstance(process, (Server, Scheduler))
        if not isinstance(process, Server):
            return False
        return not process.was_member or (bool(self.world.trials) and process.address not in left)


def run(seed: int, kind: type[Cluster] = Cluster, parts: type[Parts] = Parts) -> Report:
    cluster = kind(seed, parts)
    violation = ""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        cluster.start()
        cluster.run()
    except InvariantError as broken:
        violation = str(broken)
    except Exception as error:
        violation = f"{type(error).__name__}: {error}"
        cluster.world.note("world", violation)
    finally:
        logging.disable(disabled)
    world = cluster.world
    fault = "; ".join(world.faults)
    trials = tuple(world.trials)
    uses = sum(len(step) for step in cluster.program.steps)
    return Report(seed, cluster.shape, fault, trials, world.events, uses, world.now_s, violation, world.log())
