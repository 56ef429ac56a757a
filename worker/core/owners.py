"""The owners of partitions: the ranks whose services step with a sum, and send the parameters. Pure.

Owners are ranks of the sum's group, and machines in what follows are those with such ranks. A partition that a GPU
machine's server adds is owned by that machine, so its sum does not leave the machine. One that another server adds is
owned by the GPU machine that owns the fewest bytes so far. Within a machine, it is the rank that owns the fewest, of
all groups together. All communication services enter the same tensors in the same order, also those in which they take
no part, and so agree.

Bytes of a step, of M bytes of gradients and as many of parameters, n machines, and CPU machines' servers that add the
share c of M: a GPU machine sends the partitions that other machines' servers add, (n-1) times the parameters that its
own server hands on, and its c/n of the others once: M + (n-2)/n (1-c) M + c/n M. It receives as much. A CPU machine
with the share s receives (n+1) s M, contributions and parameters, and sends n s M. An all-reduce takes c/n M less of a
GPU machine, and as much of all others.

Of replicated tensors each machine owns all: every machine divides them among its ranks of the group in the same way, so
that the first of each machine own the same elements, and so on. Where machines have different numbers of such ranks,
the last ones of those that have more own none.

An owner stays when its partition moves to another server: the states lie there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from byteps_py.errors import ProtocolError
from byteps_py.tensors import Op, TensorSpec, split
from byteps_py.worker.core.topology import Topology

#: The owner of a replicated partition on a machine without ranks of its group.
NOBODY = -1


class OwnedPiece(NamedTuple):
    """A partition with an owner. ``offset``, ``length``: bytes; ``server``: member id, -1 for none; ``owner``: global
    rank; ``source``: index of the sum's partition with the same elements."""

    offset: int
    length: int
    server: int
    owner: int
    source: int


def machine_that_copies(key: int, index: int, machines: Sequence[int]) -> int:
    """The machine, of all ``machines`` that own a replicated partition, that tells servers of its steps. They take
    turns over the partitions of a tensor, and begin anywhere: most tensors have one partition."""
    return machines[(key + index) % len(machines)]


class Owners:
    """The owners of the partitions of all sums, in the order in which these are entered."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._owned_bytes = [0] * topology.size  # by rank
        #: Of replicated tensors: by group, and by position in it of its ranks on one machine.
        self._replicated_bytes: dict[tuple[int, ...], list[int]] = {}
        self._pieces: dict[str, list[OwnedPiece]] = {}
        self._specs: dict[str, TensorSpec] = {}

    def add(self, spec: TensorSpec, partitions: Sequence[tuple[int, int, int]]) -> None:
        """Enter a sum with the (offset, length, server) of its partitions. A name that is entered again, cut alike,
        keeps its owners."""
        before, known = self._pieces.pop(spec.name, []), self._specs.get(spec.name, spec)
        is_alike = (known.is_replicated, known.group) == (spec.is_replicated, spec.group)
        if is_alike and [piece[:2] for piece in before] == [partition[:2] for partition in partitions]:
            self._pieces[spec.name] = [
                piece._replace(server=server) for piece, (_, _, server) in zip(before, partitions, strict=True)
            ]
            self._specs[spec.name] = spec
            return
        for piece in before:
            self._count(known, piece.owner, -self._state_bytes(known, piece.length))
        machines = {server.member_id: server.machine_id for server in self._topology.servers}
        pieces = self._pieces[spec.name] = []
        self._specs[spec.name] = spec
        for index, (offset, length, server) in enumerate(partitions):
            owner = self._local_owner(spec) if spec.is_replicated else self._owner(spec, machines.get(server))
            self._count(spec, owner, self._state_bytes(spec, length))
            pieces.append(OwnedPiece(offset, length, server, owner, index))

    def _state_bytes(self, spec: TensorSpec, length: int) -> int:
        """What a partition of ``length`` bytes weighs: its states, which no codec makes smaller."""
        codec = spec.codec if self._topology.machines_in(spec) != 1 else None
        return length if codec is None else length // codec.item_bytes * codec.block * spec.dtype.itemsize

    def _count(self, spec: TensorSpec, owner: int, nbytes: int) -> None:
        if not spec.is_replicated:
            self._owned_bytes[owner] += nbytes
        elif owner != NOBODY:
            self._replicated_of(spec)[self._members_here(spec).index(owner)] += nbytes

    def _members_here(self, spec: TensorSpec) -> Sequence[int]:
        return _members(self._topology, self._topology.machine_index, spec)

    def _replicated_of(self, spec: TensorSpec) -> list[int]:
        """By position among the group's ranks of each machine."""
        topology = self._topology
        if spec.group not in self._replicated_bytes:
            fewest = min(len(_members(topology, machine, spec)) for machine in topology.machines_of(spec))
            self._replicated_bytes[spec.group] = [0] * fewest
        return self._replicated_bytes[spec.group]

    def _local_owner(self, spec: TensorSpec) -> int:
        """The rank of this machine that owns the fewest bytes of the group's replicated tensors."""
        members = self._members_here(spec)
        if not members:
            return NOBODY
        owned = self._replicated_of(spec)
        return members[owned.index(min(owned))]

    def _owner(self, spec: TensorSpec, machine_id: str | None) -> int:
        """The rank that owns the fewest bytes, of the machine with this id if it has ranks of the group."""
        owned, topology = self._owned_bytes, self._topology
        able = topology.machines_of(spec)
        machines = [i for i in able if topology.workers[i].machine_id == machine_id]
        if not machines:
            machines = [min(able, key=lambda i: sum(owned[rank] for rank in topology.ranks_of(i)))]
        return min(_members(topology, machines[0], spec), key=lambda rank: owned[rank])

    def pieces(self, spec: TensorSpec, limit: int) -> list[OwnedPiece]:
        """The partitions of a tensor with owners, none of more than ``limit`` bytes, by offset. Raises ProtocolError
        for a broadcast whose sum is not agreed, or has another number of elements or another group."""
        source = self._specs.get(spec.ownership)
        if source is None or (source.count, source.group) != (spec.count, spec.group):
            has = "is not agreed" if source is None else f"has {source.count} elements of ranks {source.group or 'all'}"
            raise ProtocolError(
                f"tensor {spec.name!r} has {spec.count} elements with the owners of {spec.ownership!r}, which {has}"
            )
        if spec.op is Op.SUM:
            return self._pieces[spec.name]
        found: list[OwnedPiece] = []
        codec = source.codec if self._topology.machines_in(source) != 1 else None
        size, elements = (codec.item_bytes, codec.block) if codec is not None else (source.dtype.itemsize, 1)
        coded = spec.codec if self._topology.machines_in(spec) != 1 else None
        for piece in self._pieces[spec.ownership]:
            first = piece.offset // size * elements
            count = min(piece.length // size * elements, source.count - first)
            itemsize = spec.dtype.itemsize if coded is None else coded.item_bytes
            start, nbytes = first * itemsize, count * itemsize
            if coded is not None:
                if first % coded.block:
                    raise ProtocolError(
                        f"tensor {spec.name!r} travels in blocks of {coded.block} elements, and a partition of "
                        f"{spec.ownership!r} begins within one: BYTEPS_PARTITION_BYTES must be a multiple of 4096"
                    )
                start, nbytes = first // coded.block * itemsize, coded.coded_nbytes(count)
            for offset, length in split(nbytes, max(limit, itemsize), itemsize):
                found.append(piece._replace(offset=start + offset, length=length))
        return found


def _members(topology: Topology, machine: int, spec: TensorSpec) -> Sequence[int]:
    """Global ranks of a machine that take part in a tensor, ascending."""
    ranks = topology.ranks_of(machine)
    return [rank for rank in spec.group if rank in ranks] if spec.group else ranks
