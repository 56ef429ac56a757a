"""The cluster: its configured size, one record for each member, and the rules for admitting members and opening epochs.

Pure. Every decision comes with a sentence that explains it.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction

from byteps_py.config import tuning
from byteps_py.config.settings import SLOW_FACTOR, Settings
from byteps_py.failure_detector import FailureDetector
from byteps_py.placement.link_optimum import LinkOptimum
from byteps_py.proto import control_pb2 as pb
from byteps_py.wording import count_text, ranks_text

#: Version of the control protocol; a member with another version is refused.
PROTOCOL_VERSION = 17
MAX_LOCAL_SIZE = 1024
#: The machine index of a GPU machine outside the group: it waits to join an elastic job, or was left behind.
OUTSIDE = -1


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """``num_workers`` GPU machines (n), ``num_servers`` CPU machines (k); times in seconds.

    ``partition_bytes`` is not among them: the scheduler moves no tensors, so the first member that registers decides.
    """

    num_workers: int
    num_servers: int = 0
    servers_only: bool = False  # GPU machines sum nothing, regardless of the formula's share
    job: str = ""
    start_timeout_s: float = 60.0
    heartbeat_interval_s: float = 0.2
    heartbeat_timeout_s: float = 1.0
    heartbeat_timeout_max_s: float | None = None
    stall_warn_s: float = 60.0
    straggler: float = 5.0
    rebalance_links: bool = True
    elastic: bool = False
    min_ranks: int = 1
    max_ranks: int = 0
    elastic_timeout_s: float = 600.0
    reset_limit: int = 0
    max_restarts: int = 0

    @classmethod
    def from_settings(cls, settings: Settings) -> ClusterConfig:
        """The configuration of the job that a scheduler with these settings serves: their fields of the same names."""
        names = {each.name for each in fields(cls)} - {"servers_only"}
        same = {name: getattr(settings, name) for name in names}
        return cls(servers_only=settings.placement == "servers-only", **same)

    @property
    def patience_s(self) -> float:
        """See Settings.patience_s."""
        return self.heartbeat_timeout_max_s or SLOW_FACTOR * self.heartbeat_timeout_s

    @property
    def needs_gpu_machine_servers(self) -> bool:
        """True when the placement gives GPU machines a share: there is a network, and k < n."""
        return self.num_workers > 1 and self.num_servers < self.num_workers and not self.servers_only

    def weights(self, cpu_mbit: Sequence[float], gpu_mbit: Sequence[float]) -> tuple[int, ...]:
        """The share of the keys that each machine gets, relative to the others, for links of these rates: CPU machines
        first, then GPU machines; 0 for none. One GPU machine adds all of its gradients itself; CPU machines beside it
        share the copies of its optimizers' states. Raises UsageError if no machine could hold any."""
        if len(gpu_mbit) == 1:
            return (*(1 for _ in cpu_mbit), 0)
        return self.optimum(cpu_mbit, gpu_mbit).weights

    def optimum(self, cpu_mbit: Sequence[float], gpu_mbit: Sequence[float]) -> LinkOptimum:
        """The best shares for links of these rates. Raises UsageError like ``weights``."""
        return LinkOptimum(cpu_mbit, gpu_mbit, not self.servers_only and len(cpu_mbit) < len(gpu_mbit))


def describe(facts: pb.Register, ranks: range = range(0)) -> str:
    """A process that registers, or has registered, in words."""
    place = f"host {facts.host or '?'}, pid {facts.pid}"
    if facts.role == pb.ROLE_COMMUNICATION:
        return f"worker {facts.machine_index} ({f'{ranks_text(ranks)}, ' if ranks else ''}{place})"
    if facts.kind == pb.MACHINE_KIND_GPU:
        return f"the summation service of GPU machine {facts.machine_index} ({place}, {facts.address})"
    return f"server {facts.address} ({place})"


class Presence(enum.Enum):
    """A member's state. It goes from PRESENT to LEFT or to LOST, once."""

    PRESENT = "present"
    LEFT = "left"  # it sent Leave
    LOST = "lost"  # its stream ended without Leave, or it was silent for too long, or it broke the protocol


@dataclass(slots=True, eq=False)
class MemberRecord:
    """One member. ``connection``: its link (see member_links/links.py)."""

    id: int
    connection: int
    facts: pb.Register
    last_seen_s: float
    first_rank: int = -1  # CS: set when the cluster is complete
    weight: int = 0  # SS: its part of the keys; set when the cluster is complete
    link_mbit: float = 0.0  # of its machine's link; set when the cluster is complete
    usual_mbit: float = 0.0  # the most that it was while others were known; 0: it has not changed
    presence: Presence = Presence.PRESENT
    is_draining: bool = False  # it is to leave: an SS gets no keys, a CS of an elastic job is in no further group
    is_ready: bool = False  # its kernels are loaded and, of a CS, all its ranks have connected
    is_late: bool = False  # SS: it registered while the job ran, and is not ready for keys yet
    epoch: int = 0  # CS: the latest epoch whose placement it has applied
    detector: FailureDetector | None = None  # of its heartbeats; see health.py
    statistics: pb.Statistics = field(default_factory=pb.Statistics)
    shadow: pb.ShadowProtection = field(default_factory=pb.ShadowProtection)
    progress: Sequence[pb.RankProgress] = ()  # CS: of its ranks
    home: tuple[str, int] = ("", -1)  # of a GPU machine: the common facts of its processes, as they registered

    def __post_init__(self) -> None:
        facts, self.facts = self.facts, pb.Register()
        self.facts.CopyFrom(facts)  # elastic jobs change the machine's index
        self.home = (facts.machine_id, facts.machine_index)

    @property
    def is_present(self) -> bool:
        return self.presence is Presence.PRESENT

    @property
    def is_worker(self) -> bool:
        """True for a communication service."""
        return self.facts.role == pb.ROLE_COMMUNICATION

    @property
    def can_hold_keys(self) -> bool:
        """True for a summation service that may get keys in the next epoch."""
        return not (self.is_worker or self.is_draining or self.is_late)

    @property
    def is_cpu_server(self) -> bool:
        return not self.is_worker and self.facts.kind == pb.MACHINE_KIND_CPU

    @property
    def is_gpu_server(self) -> bool:
        return not self.is_worker and self.facts.kind == pb.MACHINE_KIND_GPU

    @property
    def holds_keys(self) -> bool:
        """True for a summation service that reductions depend on."""
        return self.weight > 0

    @property
    def ranks(self) -> range:
        """Global ranks of a CS of a complete cluster; empty for others."""
        if self.first_rank < 0:
            return range(0)
        return range(self.first_rank, self.first_rank + self.facts.local_size)

    def describe(self) -> str:
        """The member in words: ``worker 1 (ranks 2-3, host gpu1, pid 42)``."""
        return describe(self.facts, self.ranks)

    def to_message(self) -> pb.Member:
        """The member as part of a Membership."""
        facts = self.facts
        return pb.Member(
            member_id=self.id,
            role=facts.role,
            kind=facts.kind,
            machine_id=facts.machine_id,
            machine_index=facts.machine_index,
            address=facts.address,
            local_address=facts.local_address,
            memory_bytes=facts.memory_bytes,
            local_size=facts.local_size,
            first_rank=max(0, self.first_rank),
            host=facts.host,
            pid=facts.pid,
            weight=self.weight,
            link_mbit=self.link_mbit,
        )

    def to_status(self, now_s: float, doubt: str = "") -> pb.MemberStatus:
        """The member as part of the status. ``doubt``: why it may be dead."""
        return pb.MemberStatus(
            member=self.to_message(),
            alive=self.is_present,
            left=self.presence is Presence.LEFT,
            heartbeat_age_s=max(0.0, now_s - self.last_seen_s),
            statistics=self.statistics,
            doubt=doubt,
            progress=self.progress,
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a registration is refused: a type name of byteps_py/errors.py, and the sentence."""

    error: str
    message: str
    later: bool = False  # it may try again: its predecessor's place, or job, is about to end


class _Lists:
    """The present members of a Roster, as its methods of the same names list them. Made anew when one of them changes;
    one that registers is added, as thousands may do at a time.

    ``services``: by address. ``places``: GPU machines' members by what gives them their place, see ``_places``.
    """

    def __init__(self, everyone: Iterable[MemberRecord]) -> None:
        self.present: list[MemberRecord] = []
        self.workers: list[MemberRecord] = []
        self.cpu_servers: list[MemberRecord] = []
        self.gpu_servers: list[MemberRecord] = []
        self.services: dict[str, MemberRecord] = {}
        self.places: dict[tuple[object, ...], MemberRecord] = {}
        self.machines: tuple[dict[int, int], dict[int, int]] | None = None
        for member in everyone:
            if member.is_present:
                self.add(member)

    def add(self, member: MemberRecord) -> None:
        """A present member."""
        self.present.append(member)
        self.machines = None
        if member.is_worker:
            if member.facts.machine_index != OUTSIDE:
                bisect.insort(self.workers, member, key=_index)
        else:
            self.services.setdefault(member.facts.address, member)
            if member.can_hold_keys and member.is_cpu_server:
                bisect.insort(self.cpu_servers, member, key=_address)
            elif member.can_hold_keys:
                bisect.insort(self.gpu_servers, member, key=_index)
        if member.facts.kind == pb.MACHINE_KIND_GPU:
            role, facts = member.facts.role, member.facts
            for place in ((role, facts.machine_index), (role, member.home), (role, "at home", member.home[1])):
                self.places.setdefault(place, member)


def _index(member: MemberRecord) -> int:
    return member.facts.machine_index


def _address(member: MemberRecord) -> str:
    return member.facts.address


class Roster:
    """All members of the job, and its epochs. ``epoch``: the latest; 0 before the cluster is complete.

    A table: ``admit``, ``remove``, ``drain``, ``set_late``, ``complete``, ``regroup`` and ``reassign`` change it. The
    other methods are questions of all components of the scheduler, with each heartbeat: lists are made once for each
    change.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._by_connection: dict[int, MemberRecord] = {}
        self._next_id = 1
        self.epoch = 0
        self.first_epoch = 1  # after those of an earlier cluster at this address, as far as known
        self.workers_since = 0  # the epoch that brought the present workers
        self.partition_bytes = 0  # known once the cluster is complete
        self.everyone: list[MemberRecord] = []
        # The workers of the group, also those that have left in order: a machine whose ranks are done keeps its index.
        self._workers: list[MemberRecord] = []
        self._known: _Lists | None = None  # since the last change

    @property
    def _lists(self) -> _Lists:
        if self._known is None:
            self._known = _Lists(self.everyone)
        return self._known

    def of_connection(self, connection: int) -> MemberRecord | None:
        """The member that registered on this connection; None if it was refused, or has not registered."""
        return self._by_connection.get(connection)

    def present_member(self, connection: int) -> MemberRecord | None:
        """The same; None also once it has left or is lost."""
        member = self._by_connection.get(connection)
        return member if member is not None and member.is_present else None

    def present(self) -> Sequence[MemberRecord]:
        """All connected members, in the order of their registrations."""
        return self._lists.present

    def lost_connections(self) -> set[int]:
        """The connections of lost members, which may never end."""
        return {m.connection for m in self.everyone if m.presence is Presence.LOST}

    def workers(self) -> Sequence[MemberRecord]:
        """Connected communication services, by machine index; of an elastic job, those in its group."""
        return self._lists.workers

    def admit(self, connection: int, register: pb.Register, now_s: float) -> MemberRecord | Refusal:
        """Add the process to the cluster, or say why not."""
        refusal = self._refusal(register)
        if refusal is not None:
            return refusal
        record = MemberRecord(self._next_id, connection, register, now_s)
        self._next_id += 1
        if self.epoch and record.facts.kind == pb.MACHINE_KIND_GPU and self._config.elastic:
            record.facts.machine_index = self._place_of(record)
        self.everyone.append(record)
        if self._known is not None:
            self._known.add(record)
        self._by_connection[connection] = record
        return record

    def _place_of(self, newcomer: MemberRecord) -> int:
        """The machine index of a summation service whose machine is in the group; a worker waits for the next group."""
        workers = [] if newcomer.is_worker else self.workers()
        return next((m.facts.machine_index for m in workers if m.home == newcomer.home), OUTSIDE)

    @property
    def latest_epoch(self) -> int:
        """The latest epoch that was opened here, or that an earlier cluster is known to have had."""
        return max(self.epoch, self.first_epoch - 1)

    @property
    def size(self) -> int:
        """Number of the job's ranks, also of workers that have left."""
        return sum(len(m.ranks) for m in self.everyone)

    def has_services(self, without: MemberRecord | None = None) -> bool:
        """True if the workers have a summation service, or are one machine alone, which needs none. ``without``: a
        service that does not count."""
        there = (m for m in self._services() if m.is_cpu_server or m.facts.machine_index != OUTSIDE)
        return len(self._workers) == 1 or any(member is not without for member in there)

    def has_services_for(self, members: Sequence[tuple[int, int]]) -> bool:
        """The same for the workers of an epoch that is not open yet, see ``regroup``."""
        ids = {member_id for member_id, _ in members}
        homes = {member.home for member in self.everyone if member.id in ids}
        return len(members) == 1 or any(m.is_cpu_server or m.home in homes for m in self._services())

    def _services(self) -> list[MemberRecord]:
        return [*self.cpu_servers(), *([] if self._config.servers_only else self.gpu_servers())]

    def remove(self, record: MemberRecord, presence: Presence) -> None:
        """The member has left or is lost. A cluster that is still forming forgets one that left: its place is free."""
        record.presence = presence
        self._known = None
        if not self.epoch and presence is Presence.LEFT:
            self.everyone.remove(record)

    def drain(self, member: MemberRecord) -> None:
        """The member is to leave."""
        member.is_draining = True
        self._known = None

    def set_late(self, member: MemberRecord, is_late: bool) -> None:
        """The service registered while the job runs; it is ready for keys once it is not late any more."""
        member.is_late = is_late
        self._known = None

    def _refusal(self, register: pb.Register) -> Refusal | None:
        contradiction = self._contradiction(register)
        if contradiction:
            return Refusal("ConfigurationError", contradiction)
        clash = self._clash(register)
        return Refusal("RendezvousError", clash, later=self._may_be_free_soon(register)) if clash else None

    def _contradiction(self, register: pb.Register) -> str:
        """The settings of the process that do not fit this cluster, in words; empty if all fit."""
        config = self._config
        if register.protocol != PROTOCOL_VERSION:
            return (
                f"this process has version {register.protocol} of the control protocol, the scheduler has version "
                f"{PROTOCOL_VERSION}: install the same byteps_py everywhere"
            )
        if register.job != config.job:
            return (
                f"this process belongs to job {register.job!r}, the scheduler serves job {config.job!r}: set the same "
                "BYTEPS_JOB_ID, or the same DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT, everywhere"
            )
        if register.role not in (pb.ROLE_COMMUNICATION, pb.ROLE_SUMMATION):
            return f"unknown role {register.role}"
        if register.kind not in (pb.MACHINE_KIND_GPU, pb.MACHINE_KIND_CPU):
            return f"unknown kind of machine {register.kind}"
        if register.elastic != config.elastic:
            told, known = ("is set" if flag else "is not set" for flag in (register.elastic, config.elastic))
            return (
                f"BYTEPS_ELASTIC {told} for this process and {known} for the scheduler: it must be the same everywhere"
            )
        for variable, theirs, ours in (
            ("DMLC_NUM_WORKER", register.num_workers, config.num_workers),
            ("DMLC_NUM_SERVER", register.num_servers, config.num_servers),
        ):
            # A job that has grown has more machines than it began with. A CPU machine serves jobs of any size.
            may_differ = self.epoch and (register.role == pb.ROLE_SUMMATION or config.elastic)
            if theirs != ours and not may_differ and register.kind != pb.MACHINE_KIND_CPU:
                return (
                    f"{variable} is {theirs} in this process and {ours} in the scheduler: "
                    "it must be the same everywhere"
                )
        first = self.present()[0] if self.present() else None
        if first is not None and register.partition_bytes != first.facts.partition_bytes:
            here, there = (facts.partition_bytes or "not set" for facts in (register, first.facts))
            return (
                f"BYTEPS_PARTITION_BYTES is {here} in this process and {there} in {first.describe()}: it must be "
                "the same everywhere"
            )
        return self._impossible_place(register)

    def _impossible_place(self, register: pb.Register) -> str:
        n = self._config.num_workers
        if register.role == pb.ROLE_COMMUNICATION:
            if register.kind != pb.MACHINE_KIND_GPU:
                return "a communication service runs on a GPU machine only"
            if not 1 <= register.local_size <= MAX_LOCAL_SIZE:
                return f"BYTEPS_LOCAL_SIZE={register.local_size} is not in 1..{MAX_LOCAL_SIZE}"
        elif not register.address:
            return "a summation service must register with the address at which it listens; this one gave none"
        may_join = self.epoch and self._config.elastic
        if register.kind == pb.MACHINE_KIND_GPU and not may_join and not 0 <= register.machine_index < n:
            return f"DMLC_WORKER_ID={register.machine_index} is not in 0..{n - 1} (DMLC_NUM_WORKER={n})"
        return ""

    def _may_be_free_soon(self, register: pb.Register) -> bool:
        """True if its place is one that a member has left, or may have lost: with BYTEPS_MAX_RESTARTS a communication
        service may be back before its predecessor is missed."""
        comes_again = self._config.max_restarts > 0 and self.epoch > 0 and register.role != pb.ROLE_SUMMATION
        return comes_again or self._has_left(register)

    def _clash(self, register: pb.Register) -> str:
        """Why the cluster has no place for one more such member; empty if it has."""
        if self.epoch and register.role != pb.ROLE_SUMMATION and not self._config.elastic:
            return (
                "the cluster is complete already; a worker can't join or come back while it runs, unless the job is "
                "elastic (BYTEPS_ELASTIC)"
            )
        if register.role == pb.ROLE_SUMMATION and (other := self._lists.services.get(register.address)) is not None:
            return f"the address {register.address} is taken by {other.describe()}"
        other = self._lists.places.get(self._place(register)) if register.kind == pb.MACHINE_KIND_GPU else None
        if other is not None:
            taken = f"DMLC_WORKER_ID={register.machine_index} is taken by {other.describe()}"
            return f"{taken}: give each GPU machine its own"
        if register.kind == pb.MACHINE_KIND_CPU and not self.epoch:
            k = self._config.num_servers
            if len(self._lists.cpu_servers) >= k:
                return (
                    f"DMLC_NUM_SERVER={k}, and {count_text(k, 'server')} have registered already: this one is too many"
                )
        return ""

    def missing_numbers(self) -> list[int]:
        """The numbers (DMLC_WORKER_ID) of the machines that a job which keeps its ranks waits for."""
        there = {member.home[1] for member in self.present() if member.is_worker}
        numbers = range(self._config.num_workers) if self._config.max_restarts else ()
        return [number for number in numbers if number not in there]

    def _place(self, register: pb.Register) -> tuple[object, ...]:
        """The key of ``_Lists.places`` under which no other member may be."""
        if self._config.max_restarts and register.role == pb.ROLE_COMMUNICATION:
            return register.role, "at home", register.machine_index
        if self.epoch and self._config.elastic:
            return register.role, (register.machine_id, register.machine_index)
        return register.role, register.machine_index

    def _has_left(self, register: pb.Register) -> bool:
        """True if a member with the same place has left in order, while others have not left yet."""
        return any(
            m.presence is Presence.LEFT
            and (m.facts.role, m.facts.kind) == (register.role, register.kind)
            and m.facts.machine_index == register.machine_index
            for m in self.everyone
        )

    @property
    def is_complete(self) -> bool:
        """True if all members that the cluster needs have registered."""
        config, there = self._config, self._lists
        n, k = config.num_workers, config.num_servers
        served = len(there.gpu_servers) >= n or not config.needs_gpu_machine_servers
        return len(there.workers) >= n and len(there.cpu_servers) >= k and served

    def missing(self) -> str:
        """The members that the cluster still waits for, in words; empty when it is complete."""
        config, present = self._config, self.present()
        n, k = config.num_workers, config.num_servers
        waiting: list[str] = []
        there = {m.facts.machine_index for m in present if m.is_worker}
        absent = [i for i in range(n) if i not in there]
        if absent:
            waiting.append(
                f"{count_text(len(absent), 'worker')} (DMLC_ROLE=worker, DMLC_WORKER_ID={_ids_text(absent)})"
            )
        cpu_servers = sum(m.is_cpu_server for m in present)
        if cpu_servers < k:
            waiting.append(f"{count_text(k - cpu_servers, 'server')} (DMLC_ROLE=server)")
        served = {m.facts.machine_index for m in present if m.is_gpu_server}
        unserved = [i for i in range(n) if i not in served]
        if config.needs_gpu_machine_servers and unserved:
            services = count_text(len(unserved), "summation service")
            where = f"GPU machine{'s' if len(unserved) > 1 else ''} {_ids_text(unserved)}"
            waiting.append(f"{services} (of {where}; bpslaunch starts {'them' if len(unserved) > 1 else 'it'})")
        if not waiting:
            return ""
        return (
            f"{len(there)} of {count_text(n, 'worker')}, {cpu_servers} of {count_text(k, 'server')}: waiting for "
            + (", ".join(waiting[:-1]) + " and " if waiting[:-1] else "")
            + waiting[-1]
        )

    def cpu_servers(self) -> Sequence[MemberRecord]:
        """Servers of CPU machines that may hold keys, in the order in which they get them."""
        return self._lists.cpu_servers

    def gpu_servers(self) -> Sequence[MemberRecord]:
        """Servers of GPU machines that may hold keys, by machine index; none where GPU machines do not sum."""
        return self._lists.gpu_servers

    def link_owners(self) -> list[MemberRecord]:
        """The members whose ``link_mbit`` is the rate of their machine's link: CPU machines' servers, then workers."""
        return [*self.cpu_servers(), *self._workers]

    def machines(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """The ``link_owners`` of GPU machines by their index, and of all machines by the member ids of their summation
        services; -1 for a service without a worker."""
        lists = self._lists
        if lists.machines is None:
            workers = {worker.facts.machine_index: worker.id for worker in lists.workers}
            servers = {server.id: server.id for server in lists.cpu_servers}
            servers.update((s.id, workers.get(s.facts.machine_index, -1)) for s in lists.gpu_servers)
            lists.machines = workers, servers
        return lists.machines

    def link_owners_without_share(self) -> set[int]:
        """Those of ``link_owners``, by member id, whose machine adds nothing."""
        beside = {server.facts.machine_index: server.weight for server in self.gpu_servers()}
        return {
            member.id
            for member in self.link_owners()
            if not (member.weight if member.is_cpu_server else beside.get(member.facts.machine_index, 0))
        }

    def times_with(self, link_mbit: Mapping[int, float]) -> tuple[Fraction, Fraction]:
        """The time of a sum of one megabit with the present shares, and with the best ones, if links have these rates
        in Mbit/s; others stay as they are. By member id, of ``link_owners``."""
        owners = self.link_owners()
        rates = [link_mbit.get(member.id, member.link_mbit) for member in owners]
        k = len(owners) - len(self._workers)
        beside = {server.facts.machine_index: server.weight for server in self.gpu_servers()}
        weights = [m.weight if m.is_cpu_server else beside.get(m.facts.machine_index, 0) for m in owners]
        best = self._config.optimum(rates[:k], rates[k:])
        return best.time_of([Fraction(weight, sum(weights) or 1) for weight in weights]), best.time

    def set_link_rates(self, link_mbit: Mapping[int, float]) -> None:
        """Links of ``link_owners``, by member id, have these rates in Mbit/s from now on."""
        for member in self.link_owners():
            if member.id in link_mbit:
                new_mbit = link_mbit[member.id]
                member.usual_mbit = max(member.usual_mbit, member.link_mbit, new_mbit)
                member.link_mbit = new_mbit

    def link_rates(self) -> list[float]:
        """The configured rates in Mbit/s, CPU machines first, then GPU machines; 0: to be measured."""
        return [member.facts.link_mbit for member in (*self.cpu_servers(), *self.workers())]

    def complete(self, link_mbit: Sequence[float]) -> pb.Membership:
        """Open the first epoch, with these rates in Mbit/s. Callable once, when ``missing`` is empty."""
        first_rank = 0
        self._workers = workers = list(self.workers())
        cpu = self.cpu_servers()
        for worker in workers:
            worker.first_rank = first_rank
            first_rank += worker.facts.local_size
        for member, rate in zip((*cpu, *workers), link_mbit, strict=True):
            member.link_mbit = rate
        is_shared = tuning.gpu_machines_sum(len(cpu), len(self.gpu_servers()))
        usual_bytes = tuning.partition_bytes(min(link_mbit), len(workers), is_shared)
        self.partition_bytes = workers[0].facts.partition_bytes or usual_bytes
        self.epoch = self.first_epoch - 1
        self.workers_since = self.first_epoch
        return self._open_epoch("")

    def regroup(
        self, members: Sequence[tuple[int, int]], reason: str, is_continued: bool, is_under_way: bool = False
    ) -> pb.Membership:
        """Open the next epoch with these machines, (member id, number of ranks) in order, and the present servers."""
        by_id = {member.id: member for member in self.everyone}
        for member in self.everyone:
            if member.facts.kind == pb.MACHINE_KIND_GPU:
                member.facts.machine_index, member.first_rank = OUTSIDE, -1
        self._known = None
        first_rank = 0
        for index, (member_id, count) in enumerate(members):
            worker = by_id[member_id]
            worker.facts.machine_index, worker.facts.local_size, worker.first_rank = index, count, first_rank
            worker.epoch = self.epoch + 1
            first_rank += count
        places = {by_id[member_id].home: by_id[member_id].facts.machine_index for member_id, _ in members}
        for server in self.everyone:
            if server.is_gpu_server and server.is_present:
                server.facts.machine_index = places.get(server.home, OUTSIDE)
        self._known = None
        self._workers = list(self.workers())
        self.workers_since = self.epoch + 1
        membership = self._open_epoch(reason)
        membership.continued, membership.under_way = is_continued, is_under_way
        return membership

    def reassign(self, reason: str) -> pb.Membership | None:
        """Open the next epoch: the present servers share the keys. None if no server's share changes."""
        before = {member.id: member.weight for member in self.everyone if member.weight}
        membership = self._open_epoch(reason)
        if before == {server.member_id: server.weight for server in membership.servers}:
            self.epoch -= 1
            return None
        return membership

    def _open_epoch(self, reason: str) -> pb.Membership:
        workers, cpu, gpu = self._workers, self.cpu_servers(), self.gpu_servers()
        by_machine = {member.facts.machine_index: member for member in gpu}
        usual_mbit = max((member.link_mbit for member in (*cpu, *workers)), default=0.0)
        for member in (
            *cpu,
            *workers,
        ):  # a machine that joined later counts as fast as the others, unless it says its rate
            member.link_mbit = member.link_mbit or member.facts.link_mbit or usual_mbit or tuning.LOOPBACK_MBIT
        for worker in workers:
            if (beside := by_machine.get(worker.facts.machine_index)) is not None:
                beside.link_mbit = worker.link_mbit
        rates = [member.link_mbit for member in cpu], [worker.link_mbit for worker in workers]
        weights = self._config.weights(*rates)
        holders = [*cpu, *(by_machine.get(worker.facts.machine_index) for worker in workers)]
        shares = {member.id: weight for member, weight in zip(holders, weights, strict=True) if member is not None}
        if len(workers) > 1 and not any(shares.values()):  # the machines that should sum have no service
            shares = {member.id: 1 for member in holders if member is not None}
        for member in self.everyone:
            member.weight = shares.get(member.id, 0)
        self.epoch += 1
        return pb.Membership(
            epoch=self.epoch,
            workers=_messages(workers),
            # One machine alone sums in its own communication service.
            servers=_messages(member for member in (*cpu, *gpu) if member.weight),
            partition_bytes=self.partition_bytes,
            workers_since=self.workers_since,
            reason=reason,
        )


def _ids_text(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:8])) + (", …" if len(ids) > 8 else "")


def _messages(members: Iterable[MemberRecord]) -> list[pb.Member]:
    return [m.to_message() for m in members]
