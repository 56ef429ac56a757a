"""Trains some steps with gradients in 16 bits, and prints what became of the weights: far_training.py STEPS WIDTH."""

from __future__ import annotations

import hashlib
import sys

import torch

import byteps_py as bps


def main() -> None:
    steps, width = map(int, sys.argv[1:])
    bps.init()
    torch.manual_seed(bps.rank())
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width))
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = bps.DistributedOptimizer(inner, model.named_parameters(), bps.Compression.fp16)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
    weights = b"".join(each.numpy().tobytes() for each in model.state_dict().values())
    print(f"rank {bps.rank()}: trained to {hashlib.sha256(weights).hexdigest()}", flush=True)
    bps.shutdown()


if __name__ == "__main__":
    main()
