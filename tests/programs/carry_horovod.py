"""One operation of Horovod's interface; what it carries is read from the job's report."""

from __future__ import annotations

import sys

import torch

import byteps_py as hvd

ROWS = 3000  # of each rank, 16 bytes each


def main(kind: str) -> None:
    hvd.init()
    x = torch.ones(ROWS, 4)
    if kind == "allgather":
        hvd.allgather(x)
    elif kind == "small allgather":
        hvd.allgather(x[:50])
    elif kind == "alltoall":
        hvd.alltoall(x)
    elif kind == "reducescatter":
        hvd.reducescatter(x)
    hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
