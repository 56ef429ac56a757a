"""parallel.checkpoint on two ranks: hosted optimizers, errors of one rank alone, saves in the background. Argument: a
folder. Prints "all right" on each rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import byteps_py as bps
from byteps_py.errors import CheckpointError, MismatchError, UsageError
from byteps_py.parallel import checkpoint, tensor


def new_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * number + dist.get_rank()))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def new_optimizer(model: nn.Module, hosted: bool) -> Any:
    return bps.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.1), model.named_parameters(), hosted=hosted
    )


def goes_on(folder: Path, hosted: bool, others: bool, asynchronous: bool) -> None:
    """From a checkpoint, with the bits of the run that saved it."""
    model = new_model(0)
    optimizer = new_optimizer(model, hosted)
    for number in range(2):
        step(model, optimizer, number)
    handle = checkpoint.save(model, folder, optimizer, asynchronous=asynchronous)
    step(model, optimizer, 2)
    handle.result()
    again = new_model(1)
    other = new_optimizer(again, others)
    step(again, other, 9)
    checkpoint.load(again, folder, other)
    step(again, other, 2)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        if hosted == others:
            assert torch.equal(one, two), (hosted, others, asynchronous)
        else:
            torch.testing.assert_close(one, two)


def fails_alike(folder: Path) -> None:
    """What one rank alone can't do, none does."""
    rank = dist.get_rank()
    model = new_model(0)
    before = [one.clone() for one in model.parameters()]
    wrong = nn.Sequential(nn.Linear(4, 9)) if rank else model
    with pytest.raises(UsageError) as raised:
        checkpoint.load(wrong, folder)
    assert ("rank 1: " in str(raised.value)) == (rank == 0), raised.value
    path = folder / "file" if rank else folder
    (folder / "file").touch()
    dist.barrier()
    with pytest.raises(CheckpointError, match="all ranks reach"):
        checkpoint.save(model, path)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), before, strict=True))
    checkpoint.load(new_model(1), folder)


def compares_copies(folder: Path) -> None:
    rank = dist.get_rank()
    model = nn.Sequential(new_model(0), nn.BatchNorm1d(2))
    bps.parallel.check_copies(model)
    with torch.no_grad():
        model[1].running_var += rank
    with pytest.raises(MismatchError, match=r"buffer '1.running_var': rank 0 has \w+, rank 1 has"):
        bps.parallel.check_copies(model)
    checkpoint.save(model, folder)
    checkpoint.load(model, folder)
    assert torch.equal(model[1].running_var, torch.ones(2))
    bps.parallel.check_copies(model)
    with torch.no_grad():
        model[0][2].bias[1] += 1e-7 * rank
        model[1].weight += rank
    for call in (bps.parallel.check_copies, lambda one: checkpoint.save(one, folder)):
        with pytest.raises(MismatchError, match=r"parameter '0\.2\.bias': rank 0 has \w+, rank 1 has"):
            call(model)
    checkpoint.load(model, folder)
    bps.parallel.check_copies(model)
    layer = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    plan = {"0": tensor.Column(), "1": tensor.Row()}
    tensor.parallelize(layer, plan, dist.group.WORLD)
    dist.broadcast(layer[1].bias.data, 0)
    bps.parallel.check_copies(layer)
    with torch.no_grad():
        layer[0].weight += rank  # ranks have other rows
        bps.parallel.check_copies(layer)
        layer[1].bias += rank
    with pytest.raises(MismatchError, match=r"parameter '1\.bias'"):
        bps.parallel.check_copies(layer)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("byteps")
    folder = Path(sys.argv[1])
    goes_on(folder / "plain", False, False, True)
    goes_on(folder / "hosted", True, True, False)
    goes_on(folder / "hosted", True, True, True)
    goes_on(folder / "mixed", True, False, False)
    goes_on(folder / "mixed", False, True, False)
    fails_alike(folder / "plain")
    compares_copies(folder / "copies")
    print("all right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
