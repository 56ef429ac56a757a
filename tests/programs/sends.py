"""Ranks 0 and 1 of two machines send each other tensors until a file is there: sends.py FILE ELEMENTS.

Every tensor that arrives is compared with what was due, bit for bit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import byteps_py.torch_backend  # noqa: F401  the backend


def values(rank: int, step: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(2 * step + rank))


def main() -> None:
    stop, count = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("byteps")
    rank, step, is_last = dist.get_rank(), 0, False
    while not is_last:
        mine, theirs = values(rank, step, count), torch.empty(count)
        mine[0] = float(stop.exists())
        works = [dist.isend(mine, 1 - rank), dist.irecv(theirs, 1 - rank)]
        for work in works:
            work.wait()
        due = values(1 - rank, step, count)
        due[0] = theirs[0]
        if not torch.equal(theirs, due):
            raise SystemExit(f"step {step}: what rank {1 - rank} sent has come as something else")
        is_last = bool(theirs[0]) and bool(mine[0])
        step += 1
    print(f"rank {rank}: all as sent", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
