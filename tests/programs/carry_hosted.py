"""Steps of a hosted optimizer, whose bytes are counted: carry_hosted.py ELEMENTS STEPS."""

from __future__ import annotations

import sys

import torch

import byteps_py as bps


def main() -> None:
    elements, steps = map(int, sys.argv[1:])
    bps.init()
    param = torch.nn.Parameter(torch.zeros(elements))
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("param", param)], hosted=True)
    for _ in range(steps):
        param.grad = None
        param.sum().backward()
        optimizer.step()
    if not torch.equal(param, torch.full_like(param, -float(steps))):
        raise SystemExit(f"wrong: {param}")
    bps.shutdown()


if __name__ == "__main__":
    main()
