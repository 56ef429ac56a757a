"""The owners of partitions: the ranks whose services step with a sum, and send the parameters. Pure.

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

from collections.abc import Sequence
from typing import NamedTuple

from byteps_py.errors import ProtocolError
from byteps_py.tensors import Op, TensorSpec, split
from byteps_py.worker.core.topology import Topology


class OwnedPiece(NamedTuple):
    """A partition with an owner. ``offset``, ``length``: bytes; ``server``: member id, -1 for none; ``owner``: global
    rank; ``source``: index of the sum's partition with the same elements."""

    offset: int
    length: int
    server: int
    owner: int
    source: int


def machine_that_copies(key: int, index: int, machines: int) -> int:
    """The machine, of all that own a replicated partition, that tells servers of its steps. Machines take turns over
    the partitions of a tensor, and begin anywhere: most tensors have one partition."""
    return (key + index) % machines


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
