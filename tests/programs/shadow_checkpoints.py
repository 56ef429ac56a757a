"""Trains with ``shadow=True`` until its standard input, rank 0's, ends, and writes down what it has after each step.

    shadow_checkpoints.py OPTIMIZER FOLDER [CHECKPOINTS]

It goes on from CHECKPOINTS if the servers hold nothing. FOLDER/N.pt has the state_dicts of model and optimizer as they
are after step N on rank 0. Rank 0 prints the scheduler's address first, and ``at N`` after each step.
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


class Model(torch.nn.Sequential):
    """A parameter of 16 bits, buffers, and a parameter that has two names."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__(
            torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.Tanh(), torch.nn.Linear(64, 64),
            torch.nn.Tanh(), torch.nn.Linear(64, 20),
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
    names_of = {param: name for name, param in named}
    optimizer = bps.DistributedOptimizer(
        OPTIMIZERS[kind](param for _, param in named), named_parameters=named, shadow=True
    )
    optimizer.param_groups[0]["params"].reverse()  # the order of a group is its own
    begun = bps.restore(model, optimizer, *sys.argv[3:])
    if begun is not None and optimizer.shadow_extra != {"rank": bps.rank(), "step": begun}:
        raise SystemExit(f"wrong: {optimizer.shadow_extra} of step {begun}")
    if bps.rank() == 0:
        print(f"{os.environ['DMLC_PS_ROOT_URI']}:{os.environ['DMLC_PS_ROOT_PORT']} from {begun}", flush=True)
    step, is_over = begun or 0, torch.zeros(1)
    while not is_over:
        step += 1
        data = torch.Generator().manual_seed(2 * step + bps.rank())
        loss_of(model, torch.randn(8, 20, generator=data)).backward()
        optimizer.shadow_extra = {"rank": bps.rank(), "step": step}
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state_dict()
        if bps.rank() == 0:
            names = [names_of[param] for param in optimizer.param_groups[0]["params"]]
            save({"model": model.state_dict(), "optimizer": state, "names": names}, folder / f"{step}.pt")
            print(f"at {step}", flush=True)
        is_told = bps.rank() == 0 and bool(select.select([sys.stdin], [], [], 0)[0])
        is_over = bps.push_pull(torch.tensor([float(is_told)]), name="over", average=False)
    bps.shutdown()


if __name__ == "__main__":
    main()
