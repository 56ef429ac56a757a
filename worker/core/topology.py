"""The machines and servers of an epoch, as one communication service sees them; and the owners of partitions, the
ranks whose services step with a sum and send the parameters. Pure.

A partition that a GPU machine's server adds is owned by that machine, so its sum does not leave the machine. One that a
CPU machine's server adds is owned by the GPU machine that owns the fewest bytes so far. Within a machine, it is the
rank that owns the fewest. All communication services enter the same tensors in the same order, and so agree.

Bytes of a step, of M bytes of gradients and as many of parameters, n machines, and CPU machines' servers that add the
share c of M: a GPU machine sends the partitions that other machines' servers add, (n-1) times the parameters that its
own server hands on, and its c/n of the others once: M + (n-2)/n (1-c) M + c/n M. It receives as much. A CPU machine
with the share s receives (n+1) s M, contributions and parameters, and sends n s M. An all-reduce takes c/n M less of a
GPU machine, and as much of all others.

Of replicated tensors each machine owns all: every machine divides them among its ranks in the same way, so that the
ranks with the same local rank own the same elements. Where machines have different numbers of ranks, the last ranks of
the larger ones own none.

An owner stays when its partition moves to another server: the states lie there.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from byteps_py.config import tuning
from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.tensors import Op, TensorSpec, split

#: As many as can be asked for (see variables.py): more, and memory would be taken for those that are not there.
MAX_LOCAL_SIZE = 1024
MAX_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Topology:
    """``machine_index``: this machine among ``workers``, which are in order of machine index. ``group``: the epoch
    since which the workers are these."""

    epoch: int
    machine_index: int
    workers: tuple[pb.Member, ...]
    servers: tuple[pb.Member, ...]
    partition_bytes: int
    group: int
    is_continued: bool = False  # of an elastic job: its ranks were in the group before, and are equal

    @classmethod
    def of(cls, membership: pb.Membership, machine_index: int) -> Topology:
        return cls(
            membership.epoch,
            machine_index,
            tuple(membership.workers),
            tuple(membership.servers),
            membership.partition_bytes,
            membership.workers_since,
            membership.continued,
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
        """Of all servers' data planes."""
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
        return len({self.machine_of(rank) for rank in spec.group})

    def describe_ranks(self, local_ranks: list[int]) -> str:
        """``rank 2`` or ``ranks 2, 3``, in global numbers."""
        ranks = [str(self.first_rank + r) for r in sorted(local_ranks)]
        return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(ranks)}"


class OwnedPiece(NamedTuple):
    """A partition with an owner. ``offset``, ``length``: bytes; ``server``: member id, -1 for none; ``owner``: global
    rank; ``source``: index of the sum's partition with the same elements."""

    offset: int
    length: int
    server: int
    owner: int
    source: int


class Owners:
    """The owners of the partitions of all sums, in the order in which these are entered."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._owned_bytes = [0] * topology.size  # by rank
        self._replicated_bytes = [0] * min(worker.local_size for worker in topology.workers)  # by local rank
        self._pieces: dict[str, list[OwnedPiece]] = {}
        self._specs: dict[str, TensorSpec] = {}

    def add(self, spec: TensorSpec, partitions: Sequence[tuple[int, int, int]]) -> None:
        """Enter a sum with the (offset, length, server) of its partitions. A name that is entered again, cut alike,
        keeps its owners."""
        before, known = self._pieces.pop(spec.name, []), self._specs.get(spec.name, spec)
        is_alike = known.is_replicated is spec.is_replicated
        if is_alike and [piece[:2] for piece in before] == [partition[:2] for partition in partitions]:
            self._pieces[spec.name] = [
                piece._replace(server=server) for piece, (_, _, server) in zip(before, partitions, strict=True)
            ]
            self._specs[spec.name] = spec
            return
        for piece in before:
            self._count(known, piece.owner, -piece.length)
        machines = {server.member_id: server.machine_id for server in self._topology.servers}
        pieces = self._pieces[spec.name] = []
        self._specs[spec.name] = spec
        for index, (offset, length, server) in enumerate(partitions):
            owner = self._local_owner() if spec.is_replicated else self._owner(machines.get(server))
            self._count(spec, owner, length)
            pieces.append(OwnedPiece(offset, length, server, owner, index))

    def _count(self, spec: TensorSpec, owner: int, nbytes: int) -> None:
        if spec.is_replicated:
            self._replicated_bytes[owner - self._topology.first_rank] += nbytes
        else:
            self._owned_bytes[owner] += nbytes

    def _local_owner(self) -> int:
        """The rank of this machine that owns the fewest bytes of replicated tensors."""
        owned = self._replicated_bytes
        return self._topology.first_rank + owned.index(min(owned))

    def _owner(self, machine_id: str | None) -> int:
        """The rank that owns the fewest bytes, of the machine with this id if there is one."""
        owned, topology = self._owned_bytes, self._topology
        machines = [i for i, worker in enumerate(topology.workers) if worker.machine_id == machine_id]
        if not machines:
            machines = [min(range(topology.machines), key=lambda i: sum(owned[r] for r in topology.ranks_of(i)))]
        return min(topology.ranks_of(machines[0]), key=lambda rank: owned[rank])

    def pieces(self, spec: TensorSpec, limit: int) -> list[OwnedPiece]:
        """The partitions of a tensor with owners, none of more than ``limit`` bytes, by offset. Raises ProtocolError
        for a broadcast whose sum is not agreed, or has another number of elements."""
        source = self._specs.get(spec.ownership)
        if source is None or source.count != spec.count:
            has = "is not agreed" if source is None else f"has {source.count} elements"
            raise ProtocolError(
                f"tensor {spec.name!r} has {spec.count} elements with the owners of {spec.ownership!r}, which {has}"
            )
        if spec.op is Op.SUM:
            return self._pieces[spec.name]
        found: list[OwnedPiece] = []
        for piece in self._pieces[spec.ownership]:
            first, count = piece.offset // source.dtype.itemsize, piece.length // source.dtype.itemsize
            itemsize = spec.dtype.itemsize
            for offset, length in split(count * itemsize, limit, itemsize):
                found.append(piece._replace(offset=first * itemsize + offset, length=length))
        return found
