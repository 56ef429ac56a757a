"""Sums of rows that many ranks have, by each front end: the same bits on all ranks, those of a sum in rank order. Run
by tests/jobs/test_sparse_rows.py under bpslaunch."""

from __future__ import annotations

import torch
import torch.distributed as dist

import byteps_py as bps

torch.set_num_threads(1)
ROWS, WIDTH = 3000, 64


def gradient(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    at = (torch.rand(4000, generator=generator) ** 3 * ROWS).long()
    values = torch.randn(4000, WIDTH, generator=generator) * 100
    return torch.sparse_coo_tensor(at[None], values.to(dtype), (ROWS, WIDTH), check_invariants=False).coalesce()


def total(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    found = torch.zeros(ROWS, WIDTH, dtype=torch.float32 if dtype is torch.bfloat16 else dtype)
    for rank in range(bps.size()):
        given = gradient(rank, step, dtype)
        found[given.indices()[0]] += given.values().to(found.dtype)
    return found


def main() -> None:
    bps.init()
    n = bps.size()
    param = torch.nn.Parameter(torch.zeros(ROWS, WIDTH))
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("table", param)])
    for step in range(3):
        param.grad = gradient(bps.rank(), step)
        optimizer.synchronize()
        assert torch.equal(param.grad.to_dense(), total(step) / n)
    for step, dtype in enumerate((torch.float32, torch.bfloat16, torch.int32)):
        handles = [
            bps.sparse_allreduce_async(gradient(bps.rank(), step + i, dtype), f"rows {i}", bps.Sum) for i in range(2)
        ]
        for i, wait in enumerate(handles):
            assert torch.equal(wait().to_dense(), total(step + i, dtype).to(dtype))
    dist.init_process_group("byteps")
    for step, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64)):
        tensor = gradient(bps.rank(), step, dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        expected = total(step, dtype)
        mean = expected.div(n, rounding_mode="floor") if dtype is torch.int64 else expected / n
        assert torch.equal(tensor.to_dense(), mean.to(dtype)), dtype
    dist.destroy_process_group()
    bps.shutdown()
    print("equal", flush=True)


if __name__ == "__main__":
    main()
