"""Trains with ``shadow=True`` until its standard input, rank 0's, ends, and writes down what it has after each step.

    shadow_checkpoints.py OPTIMIZER FOLDER

FOLDER/N.pt has the model's and the optimizer's state_dict after step N, as rank 0 has them, and what each rank has
attached. Rank 0 prints the scheduler's address first, and ``at N`` after each step.
"""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path
from typing import Any

import torch
from shadowed import OPTIMIZERS, loss_of

import byteps_py as bps
from byteps_py.torch.gradients.hosted_restore import restore


class Model(torch.nn.Sequential):
    """A parameter of 16 bits, buffers, and a parameter that has two names."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__(
            torch.nn.Linear(20, 300), torch.nn.BatchNorm1d(300), torch.nn.Tanh(), torch.nn.Linear(300, 300),
            torch.nn.Tanh(), torch.nn.Linear(300, 20),
        )  # fmt: skip
        self[3].to(torch.bfloat16)
        self[5].bias = self.shared = torch.nn.Parameter(torch.zeros(20))


def save(value: Any, path: Path) -> None:
    torch.save(value, path.with_suffix(".new"))
    os.rename(path.with_suffix(".new"), path)


def main() -> None:
    bps.init()
    kind, folder = sys.argv[1], Path(sys.argv[2])
    model = Model()
    named = list(model.named_parameters())
    optimizer = bps.DistributedOptimizer(
        OPTIMIZERS[kind](param for _, param in named), named_parameters=named, shadow=True
    )
    optimizer.param_groups[0]["params"].reverse()  # the order of a group is its own
    torch.manual_seed(100 + bps.rank())
    begun = restore(model, optimizer)
    if bps.rank() == 0:
        print(f"{os.environ['DMLC_PS_ROOT_URI']}:{os.environ['DMLC_PS_ROOT_PORT']} from {begun}", flush=True)
    step, is_over = begun or 0, torch.zeros(1)
    while not is_over:
        step += 1
        loss_of(model, torch.randn(8, 20)).backward()
        optimizer.shadow_extra = {"rank": bps.rank(), "step": step}
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state_dict()
        if bps.rank() == 0:
            names = [dict((param, name) for name, param in named)[p] for p in optimizer.param_groups[0]["params"]]
            save({"model": model.state_dict(), "optimizer": state, "names": names}, folder / f"{step}.pt")
            print(f"at {step}", flush=True)
        is_told = bps.rank() == 0 and bool(select.select([sys.stdin], [], [], 0)[0])
        is_over = bps.push_pull(torch.tensor([float(is_told)]), name="over", average=False)
    bps.shutdown()


if __name__ == "__main__":
    main()
