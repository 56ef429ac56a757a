"""Which server adds which partition: this service's copy of the placement table. Pure.

Every communication service applies the scheduler's verdicts in the same order, and so has the same table.

A broadcast is not placed, but handed on. The servers of the root's machine take no part: it sends everything once, and
not what they would hand on as well. The others share in proportion to their links' rates. So the root's link carries M,
every other machine's M inwards and, with n machines, at most (n-2)/(n-1) · M outwards: the least time there can be,
M/B.

Sums with one owner (owners.py) are placed in a table of their own, and those that are shadowed in a third one.
byteps_py/placement/hosted_shares.py has their weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from byteps_py.errors import ProtocolError, UsageError
from byteps_py.placement.hosted_shares import copies_of_sums, owned_factors, shadowed_factors
from byteps_py.placement.placement_table import PlacementTable
from byteps_py.proto import control_pb2 as pb
from byteps_py.tensors import Op, TensorSpec, key_of, split
from byteps_py.worker.core.hosted_steps import OwnedPart
from byteps_py.worker.core.owners import OwnedPiece, Owners
from byteps_py.worker.core.scatter import pieces as scattered_pieces
from byteps_py.worker.core.tensor import Part
from byteps_py.worker.core.topology import Topology

NO_SERVER = -1
#: Of all tensors: those of other ranks, too, take room in the table here. And of one that a machine sums alone.
MAX_PARTITIONS = 1 << 22


class PlacementView:
    """The servers and their weights are those of ``topology``. ``local_sum_bytes``: a partition of a tensor that stays
    on one machine has at most so many; ``chunk_bytes``: see TensorChunks. Raises ProtocolError for weights that can't
    be."""

    table_class: type[PlacementTable] = PlacementTable
    owners_class: type[Owners] = Owners
    max_partitions = MAX_PARTITIONS

    def __init__(self, topology: Topology, local_sum_bytes: int, chunk_bytes: int) -> None:
        self._local_sum_bytes = local_sum_bytes
        self._chunk_bytes = chunk_bytes
        self._table: PlacementTable | None = None
        self._owned_table: PlacementTable | None = None
        self._shadowed_table: PlacementTable | None = None
        self._owners = self.owners_class(topology)
        self._partitions: dict[int, int] = {}  # by key: about so many
        self._count = 0  # of all
        self._topology = topology
        if topology.machines == 1:
            return
        try:
            self._table = self.table_class(_weights(topology), topology.partition_bytes)
            self._owned_table = self.table_class(_weights(topology, *_owned(topology)), topology.partition_bytes)
            self._shadowed_table = self.table_class(_weights(topology, *_shadowed(topology)), topology.partition_bytes)
        except UsageError as error:
            raise ProtocolError(f"the scheduler's membership can't hold tensors: {error}") from error

    def change(self, topology: Topology) -> None:
        """Go over to the servers of a new epoch."""
        self._topology = topology
        for table, factors in (
            (self._table, (1, 1)),
            (self._owned_table, _owned(topology)),
            (self._shadowed_table, _shadowed(topology)),
        ):
            if table is not None:
                table.rebalance(_weights(topology, *factors))

    def server_of(self, part: Part) -> int:
        """Member id of the server of a partition that has one, in this epoch."""
        spec, key = part.tensor.spec, part.tensor.key
        table = self._table_of(spec)
        if isinstance(part, OwnedPart) and not part.is_sum and table is not None:
            sums = table.partitions(key_of(spec.ownership)) if table.has(key_of(spec.ownership)) else ()
            if part.source < len(sums):
                return sums[part.source].server
        if table is not None and self._is_placed(spec) and table.has(key):
            parts = table.partitions(key)  # perhaps of a newer generation, cut otherwise
            if part.index < len(parts) and parts[part.index][:2] == (part.offset, part.length):
                return parts[part.index].server
        ids = [server.member_id for server in self._topology.servers]
        if part.server in ids:
            return part.server
        return ids[(key + part.tensor.generation + part.index) % len(ids)]

    def add(self, batch: Iterable[TensorSpec]) -> None:
        """Enter the tensors of one message of verdicts: those whose partitions the table places. Raises ProtocolError
        if they would be too many."""
        batch = list(batch)
        if self._table is not None:
            self._place(batch)
        for spec in batch:
            if spec.ownership == spec.name:
                self._owners.add(spec, self._cut(spec))

    def _place(self, batch: Iterable[TensorSpec]) -> None:
        if self._table is None:
            return
        placed = [spec for spec in batch if self._is_placed(spec)]
        size = self._topology.partition_bytes
        for spec in placed:
            key, count = key_of(spec.name), -(-spec.sent_nbytes // size)
            self._count += count - self._partitions.get(key, 0)
            self._partitions[key] = count
        if self._count > self.max_partitions:
            raise ProtocolError(
                f"tensors would be cut into {self._count} partitions of {size} bytes, {self.max_partitions} are the "
                "most; raise BYTEPS_PARTITION_BYTES"
            )
        for table in (self._table, self._owned_table, self._shadowed_table):
            its = [spec for spec in placed if self._table_for(spec) is table]
            if table is not None and its:
                table.add((key_of(spec.name), spec.sent_nbytes, spec.sent_itemsize) for spec in its)

    def _table_of(self, spec: TensorSpec) -> PlacementTable | None:
        if not spec.ownership or spec.is_replicated:
            return self._table
        table = self._shadowed_table
        return table if table is not None and table.has(key_of(spec.ownership)) else self._owned_table

    def _table_for(self, spec: TensorSpec) -> PlacementTable | None:
        """Where a sum is to be entered."""
        owned = self._shadowed_table if spec.is_shadowed else self._owned_table
        return owned if spec.ownership and not spec.is_replicated else self._table

    def _is_placed(self, spec: TensorSpec) -> bool:
        """It is summed by servers; else it stays on one machine, goes from machine to machine, or is handed on."""
        return spec.op is not Op.BROADCAST and not spec.scatters and self._topology.machines_in(spec) != 1

    def pieces(self, spec: TensorSpec) -> Sequence[tuple[int, int, int]] | Sequence[OwnedPiece]:
        """(offset, length, server's member id, or the owner's rank if it scatters) of its partitions, by offset. Raises
        ProtocolError, see ``Owners.pieces``."""
        if not spec.ownership:
            return self._cut(spec)
        pieces = self._owners.pieces(spec, self._topology.partition_bytes)
        key, table = key_of(spec.ownership), self._table_of(spec)
        if table is None or not table.has(key):
            return pieces
        sums = table.partitions(key)  # they may have moved since the sum was entered
        return [piece._replace(server=sums[piece.source].server) for piece in pieces]

    def _cut(self, spec: TensorSpec) -> Sequence[tuple[int, int, int]]:
        is_alone = self._topology.machines_in(spec) == 1
        limit = self._local_sum_bytes if is_alone else self._topology.partition_bytes
        if spec.is_shadowed:  # a server that keeps copies is sent the sums of a machine alone, too
            limit = min(limit, self._topology.partition_bytes)
        if spec.nbytes // limit > self.max_partitions:  # no other check looks at a tensor that is in no table
            raise ProtocolError(
                f"tensor {spec.name[:80]!r}: {spec.nbytes} bytes would be cut into pieces of {limit} bytes, "
                f"{self.max_partitions} are the most: set a larger BYTEPS_PARTITION_BYTES"
            )
        if spec.scatters:
            codec = None if is_alone else spec.codec
            return scattered_pieces(spec, self._topology.size, limit, self._chunk_bytes, codec)
        if spec.op is Op.BROADCAST and not is_alone:
            return broadcast_pieces(spec, self._topology)
        table = self._table_of(spec)
        if table is not None and not is_alone:
            return table.partitions(key_of(spec.name))
        return [(*piece, NO_SERVER) for piece in split(spec.nbytes, limit, spec.dtype.itemsize)]


def _weights(topology: Topology, cpu: int = 1, gpu: int = 1) -> list[tuple[int, int]]:
    """(member id, weight) of the servers; those of CPU machines and of GPU machines have so many times theirs."""
    return [
        (server.member_id, server.weight * (gpu if server.kind == pb.MACHINE_KIND_GPU else cpu))
        for server in topology.servers
    ]


def _owned(topology: Topology) -> tuple[int, int]:
    """Factors of CPU and GPU machines' weights for sums with owners."""
    return owned_factors(topology.machines, any(server.kind == pb.MACHINE_KIND_GPU for server in topology.servers))


def _shadowed(topology: Topology) -> tuple[int, int]:
    """The same for shadowed sums."""
    return shadowed_factors(topology.machines, len(topology.cpu_servers))


def replicated_gain(topology: Topology, is_shadowed: bool = False) -> float:
    """Return the time of a sharded hosted step on the links, divided by that of one with states on each machine. At
    least 1.

    Of M bytes of gradients and as many of parameters, see byteps_py/placement/hosted_shares.py, which has the same of
    equal links.
    """
    if topology.machines == 1:
        return 1.0
    factors = _shadowed(topology) if is_shadowed else _owned(topology)
    machine_s = _slowest_s(topology, _weights(topology), 0, is_shadowed)
    return max(1.0, _slowest_s(topology, _weights(topology, *factors), 1, is_shadowed) / machine_s)


def _slowest_s(topology: Topology, weights: Sequence[tuple[int, int]], has_owners: int, is_shadowed: bool) -> float:
    """The time of the machine that takes longest, for 1 byte over a link of rate 1 if rates are not known."""
    total = sum(weight for _, weight in weights) or 1
    k = len(topology.cpu_servers)
    copies = copies_of_sums(topology.machines, k, bool(has_owners)) if is_shadowed else 0.0
    n = topology.machines
    share = {server: weight / total for server, weight in weights}
    cpu = sum(share[server] for server in topology.cpu_servers)
    of_machine = {server.machine_id: share[server.member_id] for server in topology.servers}
    times = [
        (1 + (n - 2 + copies) * of_machine.get(worker.machine_id, 0.0) + has_owners * cpu / n)
        / (worker.link_mbit or 1.0)
        for worker in topology.workers
    ]
    times += [
        ((n + has_owners) * share[server.member_id] + copies * (1 - cpu) / k) / (server.link_mbit or 1.0)
        for server in topology.servers
        if server.member_id in topology.cpu_servers
    ]
    return max(times)


def broadcast_pieces(spec: TensorSpec, topology: Topology) -> list[tuple[int, int, int]]:
    """(offset, length, server's member id) of a broadcast's partitions, by offset."""
    root = topology.workers[topology.machine_of(spec.root)].machine_id
    able = [server for server in topology.servers if server.machine_id != root] or list(topology.servers)
    rates = [server.link_mbit for server in able]
    rates = rates if all(rates) else [1.0] * len(able)
    cuts = split(spec.nbytes, topology.partition_bytes, spec.dtype.itemsize)
    return [(*cut, able[turn].member_id) for cut, turn in zip(cuts, _turns(rates, len(cuts)), strict=True)]


def _turns(rates: Sequence[float], count: int) -> list[int]:
    """``count`` indices, each as often as its rate says, and as evenly spread as can be."""
    given = [0] * len(rates)
    turns = []
    for _ in range(count):
        turn = min(range(len(rates)), key=lambda i: ((given[i] + 1) / rates[i], i))
        given[turn] += 1
        turns.append(turn)
    return turns
