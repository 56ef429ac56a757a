"""Reduces everything there is to reduce, and compares with a reference computed in this process alone.

Run by tests/jobs/test_determinism.py under bpslaunch; prints one digest of all results on rank 0. Ranks come in a
random order, different in every run: the results must not depend on it.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time

import torch

import byteps_py as bps

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
]  # fmt: skip
SHAPES = [(), (0,), (1,), (3, 5), (70_001,), (150, 1001)]
OPS = {"sum": bps.Sum, "average": bps.Average, "min": bps.Min, "max": bps.Max, "product": bps.Product}


def contribution(rank: int, dtype: torch.dtype, shape: tuple[int, ...], salt: int) -> torch.Tensor:
    """What ``rank`` gives: known to all ranks, so that each can check the result."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * 3).to(dtype)
    return torch.randint(0, 7, shape, generator=generator, dtype=torch.int64).to(dtype)


def fold(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """One stage of the contract: left to right, accumulated in float32 (float64 for float64), rounded once."""
    dtype = tensors[0].dtype
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(dtype, dtype)
    combine = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}.get(op, torch.add)
    total = tensors[0].to(wide)
    for tensor in tensors[1:]:
        total = combine(total, tensor.to(wide))
    return total.to(dtype)


def reference(op: str, dtype: torch.dtype, shape: tuple[int, ...], salt: int, local_size: int) -> torch.Tensor:
    ranks = [contribution(rank, dtype, shape, salt) for rank in range(bps.size())]
    machines = [fold(op, ranks[start : start + local_size]) for start in range(0, len(ranks), local_size)]
    total = fold(op, machines)
    if op != "average":
        return total
    return total / bps.size() if dtype.is_floating_point else total // bps.size()


def main() -> None:
    bps.init()
    jitter = random.Random()
    digest = hashlib.sha256()
    cases = [(dtype, shape, op) for dtype in DTYPES for shape in SHAPES for op in OPS]
    handles = []
    for salt, (dtype, shape, op) in enumerate(cases):
        if jitter.random() < 0.05:
            time.sleep(jitter.random() / 500)  # not a wait: a shuffle of who comes first
        tensor = contribution(bps.rank(), dtype, shape, salt)
        handles.append(bps.push_pull_async(tensor, name=f"case {salt}", op=OPS[op]))
    for salt, (handle, (dtype, shape, op)) in enumerate(zip(handles, cases, strict=True)):
        result = bps.synchronize(handle)
        expected = reference(op, dtype, shape, salt, bps.local_size())
        if not torch.equal(result, expected):
            sys.exit(f"rank {bps.rank()}: {op} of {dtype}{list(shape)} is {result}, must be {expected}")
        digest.update(result.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    for root in range(bps.size()):
        mine = torch.tensor([-0.0, float("nan"), bps.rank()])
        bits = bps.broadcast(mine, root_rank=root, name=f"root {root}").view(torch.int32)
        if not torch.equal(bits, torch.tensor([-0.0, float("nan"), root]).view(torch.int32)):
            sys.exit(f"rank {bps.rank()}: the broadcast from rank {root} changed bits")
    if bps.broadcast_object(digest.hexdigest(), root_rank=0) != digest.hexdigest():
        sys.exit(f"rank {bps.rank()} has other results than rank 0")
    if bps.rank() == 0:
        print("digest", digest.hexdigest())
    bps.shutdown()


if __name__ == "__main__":
    main()
