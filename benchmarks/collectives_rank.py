"""One rank of benchmarks/collectives.py: times every collective of one torch.distributed backend.

Rank 0 prints a JSON line per collective and size. A size is that of the whole tensor: what all ranks have together
for a gather, what each rank has for a reduction.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

WARM_UP = 5  # two rounds of each of the memory that operations use in turn
FLOAT_BYTES = 4

Call = Callable[[], object]


def all_reduce(n: int) -> Call:
    tensor = torch.ones(n)
    return lambda: dist.all_reduce(tensor)


def reduce(n: int) -> Call:
    tensor = torch.ones(n)
    return lambda: dist.reduce(tensor, 0)


def broadcast(n: int) -> Call:
    tensor = torch.ones(n)
    return lambda: dist.broadcast(tensor, 0)


def all_gather(n: int) -> Call:
    whole, mine = torch.empty(n), torch.ones(n // dist.get_world_size())
    return lambda: dist.all_gather_into_tensor(whole, mine)


def reduce_scatter(n: int) -> Call:
    whole, mine = torch.ones(n), torch.empty(n // dist.get_world_size())
    return lambda: dist.reduce_scatter_tensor(mine, whole)


def all_to_all(n: int) -> Call:
    out, tensor = torch.empty(n), torch.ones(n)
    return lambda: dist.all_to_all_single(out, tensor)


def gather(n: int) -> Call:
    size = dist.get_world_size()
    mine = torch.ones(n // size)
    pieces = [torch.empty_like(mine) for _ in range(size)] if dist.get_rank() == 0 else None
    return lambda: dist.gather(mine, pieces, 0)


def scatter(n: int) -> Call:
    size = dist.get_world_size()
    mine = torch.empty(n // size)
    pieces = [torch.ones_like(mine) for _ in range(size)] if dist.get_rank() == 0 else None
    return lambda: dist.scatter(mine, pieces, 0)


def send_recv(n: int) -> Call:
    """There and back between ranks 0 and 1."""
    tensor = torch.ones(n)
    rank = dist.get_rank()

    def call() -> None:
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)

    return call


def barrier(_: int) -> Call:
    return dist.barrier


COLLECTIVES = {
    make.__name__: make
    for make in (
        all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, gather, scatter, send_recv, barrier,
    )
}  # fmt: skip


def measure(call: Call, nbytes: int, seconds: float) -> float:
    """The median over the calls of the longest that one of the ranks takes; a barrier before each."""
    for _ in range(WARM_UP):
        call()
    repeats = int(min(300, max(4, seconds * 1e9 / (4 * nbytes + 1e6))))
    times = []
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)  # a root that only sends would be done before anybody has anything
    return float(slowest.median())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=["byteps", "gloo"])
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--collectives", nargs="+", default=list(COLLECTIVES))
    parser.add_argument("--seconds", type=float, default=1.0, help="for each collective and size, about")
    arguments = parser.parse_args()
    if arguments.backend == "byteps":
        import byteps_py.torch  # noqa: F401  registers the backend
    dist.init_process_group(arguments.backend)
    for name in arguments.collectives:
        for nbytes in arguments.sizes if name != "barrier" else [0]:
            count = max(dist.get_world_size(), nbytes // FLOAT_BYTES)
            try:
                median_s = measure(COLLECTIVES[name](count), nbytes, arguments.seconds)
            except RuntimeError as error:
                if "support" not in str(error) and "implement" not in str(error):
                    raise
                median_s = float("nan")  # the backend has no such collective
            if dist.get_rank() == 0:
                print(json.dumps({"collective": name, "bytes": nbytes, "median_s": median_s}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
