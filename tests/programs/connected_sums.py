"""Prints a digest of sums, gathers and messages of a process group: the same on every route."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

import byteps_py as bps

DTYPES = (torch.float32, torch.bfloat16, torch.int32)
#: Below and above what goes in one message, and in shares.
SIZES = (1, 40_001, 300_003)

bps.init()
dist.init_process_group("byteps")
rank, size = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(rank)
digest = hashlib.blake2b(digest_size=8)


def note(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())


for dtype in DTYPES:
    for count in SIZES:
        x = (torch.randn(count, generator=generator) * 100).to(dtype)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)[: 1 + dtype.is_floating_point]:
            for _ in range(2):  # the first one of a kind goes through the services
                dist.all_reduce(total := x.clone(), op)
                share = torch.empty_like(x)
                dist.reduce_scatter_tensor(share, x.repeat(size), op)
                totals = [x + number for number in range(3)]
                for work in [dist.all_reduce(each, op, async_op=True) for each in totals]:
                    work.wait()  # type: ignore[union-attr]
                dist.reduce(at_root := x.clone(), size - 1, op)
                note(total, share, *totals)
                if rank == size - 1:
                    note(at_root)
        whole = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(whole, x)
        dist.broadcast(taken := x.clone(), 0)
        note(*whole, taken)
        if rank == 0:
            works = [dist.isend(x + number, size - 1, tag=number) for number in range(3)]
        elif rank == size - 1:
            messages = [torch.empty_like(x) for _ in range(3)]
            works = [dist.irecv(message, 0, tag=number) for number, message in enumerate(messages)]
        for work in works if rank in (0, size - 1) else ():
            work.wait()  # type: ignore[union-attr]
        if rank == size - 1:
            note(*messages)
print(f"{rank}: {digest.hexdigest()}", flush=True)
dist.destroy_process_group()
