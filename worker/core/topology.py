"""The machines and servers of an epoch, as one communication service sees them. Pure."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from byteps_py.config import tuning
from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.tensors import Op, TensorSpec

#: As many as can be asked for (see variables.py): more, and memory would be taken for those that are not there.
MAX_LOCAL_SIZE = 1024
MAX_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Topology:
    """``machine_index``: this machine among ``workers``, which are in order of machine index. ``group``: the epoch
    since which the workers are these. ``shadow_copies``: see BYTEPS_SHADOW_COPIES."""

    epoch: int
    machine_index: int
    workers: tuple[pb.Member, ...]
    servers: tuple[pb.Member, ...]
    partition_bytes: int
    group: int
    is_continued: bool = False  # of an elastic job: its ranks were in the group before, and are equal
    is_under_way: bool = False  # of an elastic job: some of its ranks have the state of an earlier group
    shadow_copies: int = 1

    @classmethod
    def of(cls, membership: pb.Membership, machine_index: int, shadow_copies: int = 1) -> Topology:
        return cls(
            membership.epoch,
            machine_index,
            tuple(membership.workers),
            tuple(membership.servers),
            membership.partition_bytes,
            membership.workers_since,
            membership.continued,
            membership.under_way,
            shadow_copies,
        )

    def check(self) -> None:
        """Raises ProtocolError for what no correct scheduler says: workers are in order, with all their ranks, servers
        may hold something, and rates are numbers."""
        first_rank, why = 0, ""
        for place, worker in enumerate(self.workers):
            if worker.machine_index != place or worker.first_rank != first_rank:
                why = f"worker {place} is machine {worker.machine_index}, and its ranks begin at {worker.first_rank}"
            if not 1 <= worker.local_size <= MAX_LOCAL_SIZE:
                why = f"worker {place} has {worker.local_size} ranks"
            first_rank += worker.local_size
            if why or first_rank > MAX_RANKS:
                break
        if first_rank > MAX_RANKS:
            why = why or f"there are more than {MAX_RANKS} ranks"
        for member in (*self.workers, *self.servers):
            if not 0 <= member.link_mbit < math.inf:
                why = why or f"the link of {member.host} has {member.link_mbit} Mbit/s"
        for server in self.servers:
            if not server.weight:
                why = why or f"server {server.member_id} is to hold nothing"
        if not self.partition_bytes:
            why = why or "partitions are empty"
        if why:
            raise ProtocolError(f"the scheduler's membership of epoch {self.epoch} can't be: {why}")

    @property
    def machines(self) -> int:
        return len(self.workers)

    @property
    def me(self) -> pb.Member:
        return self.workers[self.machine_index]

    @property
    def first_rank(self) -> int:
        return self.me.first_rank

    @property
    def is_homogeneous(self) -> bool:
        """Machines have equally many ranks."""
        return len({worker.local_size for worker in self.workers}) == 1

    @property
    def local_size(self) -> int:
        return self.me.local_size

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(worker.local_size for worker in self.workers)

    @property
    def gpu_machines_sum(self) -> bool:
        """Beside CPU machines, or because there are none: their links carry what is summed for others, too."""
        return tuning.gpu_machines_sum(len(self.cpu_servers), len(self.servers) - len(self.cpu_servers))

    @property
    def cpu_servers(self) -> list[int]:
        """Of CPU machines, by member id."""
        return [server.member_id for server in self.servers if server.kind != pb.MACHINE_KIND_GPU]

    @property
    def has_shadow_servers(self) -> bool:
        """There are other machines whose servers can keep copies of an optimizer's states: alike on all machines."""
        return self.machines > 1 or bool(self.cpu_servers)

    @property
    def server_addresses(self) -> tuple[str, ...]:
        """The addresses of all servers' data planes."""
        return tuple(server.address for server in self.servers if server.address)

    @property
    def weights(self) -> dict[int, int]:
        """Each server's part of the keys, relative to the others', by member id."""
        return {server.member_id: server.weight for server in self.servers}

    @property
    def slowest_mbit(self) -> float:
        """The rate of the slowest link."""
        return min(member.link_mbit for member in (*self.servers, *self.workers))

    def head_starts(self, credit_bytes: int) -> dict[int, int]:
        """Of CPU machines' servers, in bytes: see PushQueue. ``credit_bytes``: how much may be in flight, 0 for no
        limit; more than is usual for such links gives no server more of a start, it would keep other servers
        waiting."""
        cpu, is_shared = self.cpu_servers, self.gpu_machines_sum
        partition = tuning.partition_bytes(self.slowest_mbit, self.machines, is_shared)
        usual = tuning.credit_bytes(partition, self.machines, is_shared)
        in_flight = min(credit_bytes or usual, usual)
        return dict.fromkeys(cpu, tuning.head_start_bytes(in_flight, len(cpu), is_shared))

    def local_rank_of(self, rank: int) -> int | None:
        """The local rank of global ``rank`` if it is one of this machine's, else None."""
        local = rank - self.first_rank
        return local if 0 <= local < self.local_size else None

    def machine_of(self, rank: int) -> int:
        """Index of the machine of global ``rank``."""
        return bisect.bisect(self.workers, rank, key=lambda worker: worker.first_rank) - 1

    def ranks_of(self, machine: int) -> range:
        """Global ranks of a machine, by its index."""
        worker = self.workers[machine]
        return range(worker.first_rank, worker.first_rank + worker.local_size)

    def machines_in(self, spec: TensorSpec) -> int:
        """How many machines take part in a tensor; 0: all of several."""
        if spec.is_replicated and spec.op is Op.BROADCAST:
            return 1
        if not spec.group:
            return 0 if self.machines > 1 else 1
        return len(self.machines_of(spec))

    def machines_of(self, spec: TensorSpec) -> list[int]:
        """Indices of the machines whose ranks take part in a tensor, ascending."""
        if not spec.group:
            return list(range(self.machines))
        return sorted({self.machine_of(rank) for rank in spec.group})

    def describe_ranks(self, local_ranks: list[int]) -> str:
        """``rank 2`` or ``ranks 2, 3``, in global numbers."""
        ranks = [str(self.first_rank + r) for r in sorted(local_ranks)]
        return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(ranks)}"


def turn_starts(topology: Topology, credit_bytes: int) -> dict[int, int]:
    """By server, in bytes: its head start, and of many machines less than a partition by which servers differ, so that
    each machine begins its round of the servers with another one, as in a ring. If all machines began with the same
    one, its link would have to take a partition of each of them at once, which is more than its queue holds."""
    ahead = topology.head_starts(credit_bytes)
    if not tuning.needs_turns(topology.machines):
        return ahead
    count = len(topology.servers)
    first = topology.machine_index * count // topology.machines + 1
    for place, server in enumerate(topology.servers):
        left = count - (place - first) % count  # 1 for the last one
        ahead[server.member_id] = ahead.get(server.member_id, 0) + left * topology.partition_bytes // (count + 1)
    return ahead
