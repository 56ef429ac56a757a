"""init(comm=…): some of the ranks form a job of their own, then others do, then all."""

from __future__ import annotations

import os

import torch

import byteps_py as hvd


class Communicator:
    """What is used of an mpi4py communicator: here its members are known beforehand."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks

    def Get_rank(self) -> int:  # noqa: N802  mpi4py's name
        return self.ranks.index(me)

    def Get_size(self) -> int:  # noqa: N802
        return len(self.ranks)

    def allgather(self, value: int) -> list[int]:
        if value != me:
            raise SystemExit(f"rank {me} took itself for {value}")
        return self.ranks


me = int(os.environ["BYTEPS_LOCAL_RANK"])
size = int(os.environ["BYTEPS_LOCAL_SIZE"])

if me != 1:
    outer = [rank for rank in range(size) if rank != 1]
    hvd.init(outer)
    if (hvd.rank(), hvd.size()) != (outer.index(me), len(outer)):
        raise SystemExit(f"rank {me} is {hvd.rank()} of {hvd.size()}")
    total = hvd.allreduce(torch.tensor([float(me)]), op=hvd.Sum).item()
    if total != sum(outer):
        raise SystemExit(f"the sum of ranks {outer} is not {total}")
    hvd.shutdown()
    hvd.init(comm=Communicator([me]))
    if hvd.size() != 1:
        raise SystemExit("not alone")
    hvd.shutdown()
    hvd.init(comm=Communicator(outer))
    if hvd.allgather_object(me) != outer:
        raise SystemExit("other ranks than those of the communicator")
    hvd.shutdown()
hvd.init(comm=list(range(size)))
if hvd.allgather_object(me) != list(range(size)):
    raise SystemExit("other ranks than all")
print(f"rank {me}: all is well")
hvd.shutdown()
