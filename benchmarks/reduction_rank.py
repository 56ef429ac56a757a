"""One rank of benchmarks/reduction.py: times a sum over all ranks, for one contender. Rank 0 prints JSON lines."""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

WARM_UP = 3

Prepared = tuple[Callable[[], object], Callable[[], "np.ndarray[Any, np.dtype[np.float32]]"]]


@dataclass(frozen=True)
class Contender:
    """``prepare(count)`` returns the timed call for float32[count], 1 everywhere, and what shows its result."""

    rank: int
    size: int
    barrier: Callable[[], object]
    prepare: Callable[[int], Prepared]
    close: Callable[[], object]


def arena() -> Contender:
    """This project, tensors that live in its shared memory, as gradients of a wrapped model do."""
    from byteps_py.session import open_session
    from byteps_py.tensors import DType, TensorSpec

    session = open_session()

    def prepare(count: int) -> Prepared:
        (slot,) = session.declare([TensorSpec(f"arena {count}", DType.FLOAT32, (count,))])
        for memory in slot.inputs:
            np.frombuffer(memory, np.float32)[:] = 1

        def call() -> None:
            session.hand_over(slot)
            session.wait(slot)

        return call, lambda: np.frombuffer(slot.result, np.float32)

    return Contender(session.rank, session.size, session.barrier, prepare, session.close)


def tensor() -> Contender:
    """This project, any torch tensor, in place, by name."""
    import torch

    import byteps_py as bps

    bps.init()

    def prepare(count: int) -> Prepared:
        values = torch.ones(count)
        return lambda: bps.push_pull_inplace(values, average=False, name=f"tensor {count}"), values.numpy

    return Contender(bps.rank(), bps.size(), bps.barrier, prepare, bps.shutdown)


def backend() -> Contender:
    """This project, any torch tensor, in place, as a backend of torch.distributed."""
    import byteps_py  # noqa: F401  registers it

    return _process_group("byteps")


def gloo() -> Contender:
    return _process_group("gloo")


def _process_group(name: str) -> Contender:
    import torch
    import torch.distributed as dist

    dist.init_process_group(name)

    def prepare(count: int) -> Prepared:
        values = torch.ones(count)
        return lambda: dist.all_reduce(values), values.numpy

    return Contender(dist.get_rank(), dist.get_world_size(), dist.barrier, prepare, dist.destroy_process_group)


def mpi() -> Contender:
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def prepare(count: int) -> Prepared:
        values = np.ones(count, np.float32)
        return lambda: world.Allreduce(MPI.IN_PLACE, values, op=MPI.SUM), lambda: values

    return Contender(world.Get_rank(), world.Get_size(), world.Barrier, prepare, lambda: None)


CONTENDERS = {"arena": arena, "tensor": tensor, "backend": backend, "gloo": gloo, "mpi": mpi}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=[*CONTENDERS])
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes")
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long to time each size")
    arguments = parser.parse_args()
    contender = CONTENDERS[arguments.contender]()
    for nbytes in arguments.sizes:
        call, result = contender.prepare(max(1, nbytes // 4))
        call()
        if not (result() == contender.size).all():
            raise SystemExit(f"{arguments.contender}: the sum of {nbytes} bytes is wrong")
        for _ in range(WARM_UP - 1):
            call()
        # Every rank must run the same number: estimated from the size alone, not from a clock.
        repeats = int(min(1000, max(4, arguments.seconds * 1e9 / (nbytes + 1e6))))
        contender.barrier()
        times = []
        used = resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(repeats):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        now = resource.getrusage(resource.RUSAGE_SELF)
        if contender.rank == 0:
            cpu_s = (now.ru_utime - used.ru_utime + now.ru_stime - used.ru_stime) / repeats
            print(json.dumps({"bytes": nbytes, "median_s": float(np.median(times)), "rank_cpu_s": cpu_s}), flush=True)
    contender.barrier()
    contender.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
