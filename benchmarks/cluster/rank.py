"""One rank of benchmarks/cluster: times reductions of a list of float32 tensors. Rank 0 prints one JSON line."""

from __future__ import annotations

import argparse
import json
import os
import time

import numpy as np

WARM_UP = 1
GLOO_BUCKET_BYTES = 25 << 20  # DDP's


def ours(counts: list[int]) -> tuple[int, object, object, object]:
    from byteps_py.session import open_session
    from byteps_py.settings import Settings
    from byteps_py.tensors import TOGETHER, DType, TensorSpec
    from byteps_py.torch.gradients.bucket_layout import plan_buckets

    session = open_session()
    # As DistributedOptimizer does: small gradients travel together, back layers come first, as a backward pass produces
    # them, and none has priority.
    sizes = [count * 4 for count in counts]
    buckets = plan_buckets(sizes, [0] * len(counts), Settings.from_env().fusion_bytes)
    specs = [TensorSpec(f"t{min(b)}", DType.FLOAT32, (sum(counts[i] for i in b),), priority=TOGETHER) for b in buckets]
    slots = session.declare(specs)
    for slot in slots:
        for memory in slot.inputs:
            np.frombuffer(memory, np.float32)[:] = 1 + session.rank

    def call() -> None:
        for slot in slots:
            session.hand_over(slot)
        for slot in slots:
            session.wait(slot)

    def check() -> None:
        expected = sum(range(1, session.size + 1))
        if any(
            (np.frombuffer(slot.result, np.float32) != expected).any() for slot in slots if session.num_machines > 1
        ):
            raise SystemExit("wrong sum")

    def close() -> None:
        check()
        session.barrier()
        session.close()

    return session.rank, session.barrier, call, close


def gloo(counts: list[int]) -> tuple[int, object, object, object]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    buckets: list[int] = []
    for count in counts:
        if buckets and (buckets[-1] + count) * 4 <= GLOO_BUCKET_BYTES:
            buckets[-1] += count
        else:
            buckets.append(count)
    tensors = [torch.ones(count) for count in buckets]

    def call() -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    return dist.get_rank(), dist.barrier, call, dist.destroy_process_group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=["ours", "gloo"])
    parser.add_argument("--counts", required=True, help="elements of each tensor, in order of the forward pass")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.counts.split(",")]
    rank, barrier, call, close = {"ours": ours, "gloo": gloo}[arguments.contender](counts)
    for _ in range(WARM_UP):
        call()  # type: ignore[operator]
    times = []
    for _ in range(arguments.repeats):
        barrier()  # type: ignore[operator]
        began = time.perf_counter()
        call()  # type: ignore[operator]
        times.append(time.perf_counter() - began)
    if rank == 0:
        print(json.dumps({"times_s": times}), flush=True)
    close()  # type: ignore[operator]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
