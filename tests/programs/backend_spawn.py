"""Ranks by torch.multiprocessing: no launcher says which machine they are on. Prints ``RANK: done`` for each."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import multiprocessing


def main(rank: int, size: int, store: str) -> None:
    import byteps_py.torch as bps

    dist.init_process_group("byteps", init_method=f"file://{store}", rank=rank, world_size=size)
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(size))] * 3
    assert (bps.local_rank(), bps.local_size(), bps.cross_size()) == (rank, size, 1)
    dist.destroy_process_group()
    os.write(1, f"{rank}: done\n".encode())


if __name__ == "__main__":
    multiprocessing.spawn(main, (2, sys.argv[1]), nprocs=2)
