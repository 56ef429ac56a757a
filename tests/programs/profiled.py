"""Profiles a step with torch.profiler, and prints the ranges of this package with their counts, as JSON."""

from __future__ import annotations

import collections
import json

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import byteps_py.torch as bps


def main() -> None:
    bps.init()
    dist.init_process_group("byteps")
    rank, size = dist.get_rank(), dist.get_world_size()
    models = [torch.nn.Linear(300, 300) for _ in range(2)]
    optimizers = [
        bps.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1),
            [(f"{number}.{name}", param) for name, param in model.named_parameters()],
            hosted=number == 1,
        )
        for number, model in enumerate(models)
    ]

    def step() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(300)).sum().backward()
            with torch.profiler.record_function(f"step {optimizers.index(optimizer)}"):
                optimizer.step()
        dist.all_reduce(torch.ones(100))
        dist.all_reduce(torch.ones(100), async_op=True).wait()
        bps.push_pull(torch.ones(10), name="x")
        sent = dist.isend(torch.ones(5), (rank + 1) % size)
        dist.recv(torch.ones(5), (rank - 1) % size)
        sent.wait()
        with torch.profiler.record_function("barrier"):
            bps.barrier()

    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    counts: collections.Counter[str] = collections.Counter()
    for event in profiler.events() or ():
        if event.name.startswith("byteps::"):
            parent = event.cpu_parent
            while parent is not None and not parent.name.startswith(("step ", "barrier")):
                parent = parent.cpu_parent
            counts[f"{event.name} in {parent.name}" if parent is not None else event.name] += 1
    print(f"rank {rank}: {json.dumps(counts)}", flush=True)
    bps.shutdown()


if __name__ == "__main__":
    main()
