"""Trains a model with and without CrossBarrier and fails unless both end bit for bit alike. Rank 0 says so."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

import byteps_py as bps

STEPS = 5


def train(crossing: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    # Large gradients of several partitions, small ones that travel together, and a layer that only odd ranks use.
    layers = [nn.Linear(16, 600), nn.Linear(600, 700), *(nn.Linear(700, 700, bias=False) for _ in range(2))]
    odd, head = nn.Linear(700, 700), nn.Linear(700, 3)
    model = nn.ModuleList([*layers, odd, head])
    groups = [{"params": layers[0].parameters(), "lr": 0.02}, {"params": [*model.parameters()][2:]}]
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(groups, lr=0.01, momentum=0.9), model.named_parameters())
    if crossing:
        optimizer = bps.CrossBarrier(model, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    generator = torch.Generator().manual_seed(bps.rank())
    for _ in range(STEPS):
        x = torch.randn(4, 16, generator=generator)
        for layer in layers:
            x = torch.tanh(layer(x))
        if bps.rank() % 2:
            x = x + odd(x)
        head(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    if not crossing:
        return [param.detach().clone() for param in model.parameters()]
    bps.suspend()  # with updates pending
    bps.resume(int(os.environ["DMLC_NUM_WORKER"]), int(os.environ["DMLC_NUM_SERVER"]))
    return [param.detach().clone() for param in model.parameters()]


def main() -> None:
    torch.set_num_threads(1)
    bps.init()
    plain = train(crossing=False)
    crossed = train(crossing=True)
    if not all(torch.equal(a, b) for a, b in zip(plain, crossed, strict=True)):
        sys.exit(f"rank {bps.rank()}: the weights differ")
    total = bps.push_pull(torch.stack([param.double().sum() for param in crossed]), name="total")
    if not torch.equal(total, torch.stack([param.double().sum() for param in crossed])):
        sys.exit(f"rank {bps.rank()}: its weights are not the other ranks'")
    if bps.rank() == 0:
        print(f"{bps.size()} ranks, equal weights")
    bps.shutdown()


if __name__ == "__main__":
    main()
