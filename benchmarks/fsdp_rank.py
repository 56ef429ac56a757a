"""One rank of benchmarks/fsdp.py. Arguments: the contender, millions of parameters, micro-batches of a step, steps of a
turn."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.turns import measured, orders

WIDTH = 1000  # a million parameters in each matrix


def main() -> None:
    contender, count, micro_batches, steps = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if contender != "gloo":
        import byteps_py.torch  # the backend
    dist.init_process_group("gloo" if contender == "gloo" else "byteps")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
    for layer in model:
        fully_shard(layer)
    sharded = fully_shard(model)
    if contender == "kept":
        import byteps_py as bps

        bps.parallel.fsdp.cache_parameters(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    x = torch.ones(1, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        for turn in range(micro_batches):
            sharded.set_requires_gradient_sync(turn == micro_batches - 1)
            model(x).sum().backward()
        optimizer.step()

    with orders() as words:
        for _, answer in words:
            answer(measured(step, steps))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
