"""One operation of Horovod's interface; what it carries is read from the job's report."""

from __future__ import annotations

import os
import sys

import torch

import byteps_py as hvd
from byteps_py.torch.collectives import context as contexts

ROWS = 3000  # of each rank, 16 bytes each


def main(kind: str) -> None:
    hvd.init()
    connections = contexts.current().connections
    assert connections is not None
    is_connected = os.environ.get("BYTEPS_DIRECT_CONNECTIONS") != "0"
    assert (connections.machines is not None) == is_connected  # all bytes for that have been carried
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
