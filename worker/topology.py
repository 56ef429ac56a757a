"""Who takes part in an epoch, as one communication service sees it. Pure."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from byteps_py.proto import control_pb2 as pb
from byteps_py.tensors import TensorSpec


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
        if not spec.group:
            return 0 if self.machines > 1 else 1
        return len({self.machine_of(rank) for rank in spec.group})

    def describe_ranks(self, local_ranks: list[int]) -> str:
        """``rank 2`` or ``ranks 2, 3``, in global numbers."""
        ranks = [str(self.first_rank + r) for r in sorted(local_ranks)]
        return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(ranks)}"
