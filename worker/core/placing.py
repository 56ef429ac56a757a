"""Which server adds which partition: this service's copy of the placement table. Pure.

Every communication service applies the scheduler's verdicts in the same order, and so has the same table.

A broadcast is not placed, but handed on. The servers of the root's machine take no part: it sends everything once, and
not what they would hand on as well. The others share in proportion to their links' rates. So the root's link carries M,
every other machine's M inwards and, with n machines, at most (n-2)/(n-1) · M outwards: the least time there can be,
M/B.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from byteps_py.errors import ProtocolError, UsageError
from byteps_py.placement.placement_table import PlacementTable
from byteps_py.tensors import Op, TensorSpec, key_of, split
from byteps_py.worker.core.hosted_steps import OwnedPart
from byteps_py.worker.core.owners import OwnedPiece, Owners
from byteps_py.worker.core.scatter import pieces as scattered_pieces
from byteps_py.worker.core.tensor import Part
from byteps_py.worker.core.topology import Topology

NO_SERVER = -1
#: Of all tensors: those of other ranks, too, take room in the table here.
MAX_PARTITIONS = 1 << 22


class Placing:
    """The servers and their weights are those of ``topology``. ``local_sum_bytes``: a partition of a tensor that stays
    on one machine has at most so many; ``chunk_bytes``: see TensorChunks. Raises ProtocolError for weights that can't
    be."""

    table_class: type[PlacementTable] = PlacementTable
    owners_class: type[Owners] = Owners

    def __init__(self, topology: Topology, local_sum_bytes: int, chunk_bytes: int) -> None:
        self._local_sum_bytes = local_sum_bytes
        self._chunk_bytes = chunk_bytes
        self._table: PlacementTable | None = None
        self._owners = self.owners_class(topology)
        self._partitions: dict[int, int] = {}  # by key: about so many
        self._count = 0  # of all
        self._topology = topology
        if topology.machines == 1:
            return
        try:
            servers = [(server.member_id, server.weight) for server in topology.servers]
            self._table = self.table_class(servers, topology.partition_bytes)
        except UsageError as error:
            raise ProtocolError(f"the scheduler's membership can't hold tensors: {error}") from error

    def change(self, topology: Topology) -> None:
        """Go over to the servers of a new epoch."""
        self._topology = topology
        if self._table is not None:
            self._table.rebalance((server.member_id, server.weight) for server in topology.servers)

    def server_of(self, part: Part) -> int:
        """Member id of the server of a partition that has one, in this epoch."""
        spec, key = part.tensor.spec, part.tensor.key
        if isinstance(part, OwnedPart) and not part.is_sum and self._table is not None:
            sums = self._table.partitions(key_of(spec.ownership)) if self._table.has(key_of(spec.ownership)) else ()
            if part.source < len(sums):
                return sums[part.source].server
        if self._table is not None and self._is_placed(spec) and self._table.has(key):
            parts = self._table.partitions(key)  # perhaps of a newer generation, cut otherwise
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
            key, count = key_of(spec.name), -(-spec.nbytes // size)
            self._count += count - self._partitions.get(key, 0)
            self._partitions[key] = count
        if self._count > MAX_PARTITIONS:
            raise ProtocolError(
                f"tensors would be cut into {self._count} partitions of {size} bytes, {MAX_PARTITIONS} are the "
                "most; raise BYTEPS_PARTITION_BYTES"
            )
        self._table.add((key_of(spec.name), spec.nbytes, spec.dtype.itemsize) for spec in placed)

    def _is_placed(self, spec: TensorSpec) -> bool:
        """It is summed by servers; else it stays on one machine, goes from machine to machine, or is handed on."""
        return spec.op is not Op.BROADCAST and not spec.scatters and self._topology.machines_in(spec) != 1

    def pieces(self, spec: TensorSpec) -> Sequence[tuple[int, int, int]] | Sequence[OwnedPiece]:
        """(offset, length, server's member id, or the owner's rank if it scatters) of its partitions, by offset. Raises
        ProtocolError, see ``Owners.pieces``."""
        if not spec.ownership:
            return self._cut(spec)
        pieces = self._owners.pieces(spec, self._topology.partition_bytes)
        key = key_of(spec.ownership)
        if self._table is None or not self._table.has(key):
            return pieces
        sums = self._table.partitions(key)  # they may have moved since the sum was entered
        return [piece._replace(server=sums[piece.source].server) for piece in pieces]

    def _cut(self, spec: TensorSpec) -> Sequence[tuple[int, int, int]]:
        is_alone = self._topology.machines_in(spec) == 1
        if spec.scatters:
            limit = self._local_sum_bytes if is_alone else self._topology.partition_bytes
            return scattered_pieces(spec, self._topology.size, limit, self._chunk_bytes)
        if spec.op is Op.BROADCAST and not is_alone:
            return broadcast_pieces(spec, self._topology)
        if self._table is not None and not is_alone:
            return self._table.partitions(key_of(spec.name))
        return [(*piece, NO_SERVER) for piece in split(spec.nbytes, self._local_sum_bytes, spec.dtype.itemsize)]


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
