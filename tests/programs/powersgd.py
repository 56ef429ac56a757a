"""A training whose gradients travel as factors of low rank, compared with one process that is all ranks. Run by
tests/jobs/test_powersgd_process.py under bpslaunch; with BYTEPS_NONFINITE, rank 1 has a NaN in the third step."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for support
from support.low_rank import Emulated
from support.threaded import contract

import byteps_py as bps

torch.set_num_threads(1)
SHAPES = {"first": (40, 90), "second": (120, 30), "bias": (90,)}
STEPS, BAD_STEP = 6, 2
MODE = os.environ.get("BYTEPS_NONFINITE", "allow")


def gradient(name: str, rank: int, step: int) -> torch.Tensor:
    shape = SHAPES[name]
    found = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * len(name) + 100 * step + rank))
    if MODE != "allow" and (name, rank, step) == ("second", 1, BAD_STEP):
        found[3, 4] = torch.nan
    return found


def main() -> None:
    bps.init()
    n, local = bps.size(), bps.local_size()
    machines = [local] * (n // local)
    named = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(named.values(), lr=1.0), named.items(), bps.Compression.powersgd(min_compression_rate=1)
    )
    due = {name: parameter.detach().clone() for name, parameter in named.items()}
    emulated = {name: Emulated(name, SHAPES[name], machines) for name in ("first", "second")}
    for step in range(STEPS):
        loss = sum((parameter * gradient(name, bps.rank(), step)).sum() for name, parameter in named.items())
        loss.backward()  # type: ignore[union-attr]
        is_bad = MODE != "allow" and step == BAD_STEP
        due_error = pytest.raises(bps.NonFiniteError, match=r"rank 1.*'second'")
        with due_error if is_bad and MODE == "raise" else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()
        for name in SHAPES:
            given = [gradient(name, rank, step) for rank in range(n)]
            exact = name not in emulated
            mean = contract(given, machines, average=True) if exact else emulated[name].mean(given, not is_bad)
            if not is_bad:
                due[name] -= mean
            assert torch.equal(named[name], due[name]), (name, step)
    bps.shutdown()
    print("equal", flush=True)


if __name__ == "__main__":
    main()
