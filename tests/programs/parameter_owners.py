"""Data parallelism around a model that tensor.parallelize has cut, on 4 ranks (tp 2, dp 2): refused over all ranks, and
right among the ranks with the same parts, beside the whole model in plain torch. Prints "right" on each rank."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import byteps_py as bps
from byteps_py.parallel import tensor

PLAN = {"0": tensor.Column(), "2": tensor.Row()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


#: Over all ranks.
TAKES_WHOLE: list[Callable[[nn.Module], Any]] = [
    lambda model: bps.DistributedOptimizer(sgd(model), model.named_parameters()),
    lambda model: bps.DistributedOptimizer(sgd(model), hosted=True),
    lambda model: bps.CrossBarrier(model, sgd(model)),
    lambda model: bps.parallel.DistributedDataParallel(model),
    lambda model: bps.broadcast_parameters(model.state_dict(), 0),
]


def main() -> None:
    dist.init_process_group("byteps")
    bps.init()
    torch.manual_seed(0)
    mesh = bps.parallel.Mesh(tp=2, dp=2)
    whole = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    sets = [
        bps.add_process_set(list(ranks))
        for ranks in sorted({mesh.layout.ranks(rank, ("dp", "cp")) for rank in range(bps.size())})
    ]
    same = next(each for each in sets if each.included())
    inputs = torch.randn(2, 5, 4, dtype=torch.float64)
    expected = copy.deepcopy(whole)
    expected(inputs.flatten(0, 1)).square().mean().backward()
    for how in ("optimizer", "module"):
        model = tensor.parallelize(copy.deepcopy(whole), PLAN, mesh.group("tp"))
        before = copy.deepcopy(model.state_dict())
        for wrap in TAKES_WHOLE:
            with pytest.raises(bps.UsageError, match=r"tensor\.parallelize has cut"):
                wrap(model)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        optimizer = sgd(model)
        if how == "optimizer":
            optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters(), process_set=same)
            runs: nn.Module = model
        else:
            runs = bps.parallel.DistributedDataParallel(model, process_set=same)
        runs(inputs[mesh.rank("dp")]).square().mean().backward()
        optimizer.step()
        step = {name: value.detach() - 0.1 * value.grad for name, value in expected.named_parameters()}
        for name, shard in tensor.sharded_parameters(model).items():
            assert torch.allclose(model.get_parameter(name), shard.cut(step[name]), rtol=0, atol=1e-12), (how, name)
    model = tensor.parallelize(copy.deepcopy(whole), PLAN, mesh.group("tp"), sequence_dim=0)
    for wrap in TAKES_WHOLE:
        with pytest.raises(bps.UsageError, match=r"tensor\.parallelize has cut"):
            wrap(model)
    os.write(1, b"right\n")
    dist.destroy_process_group()
    bps.shutdown()


if __name__ == "__main__":
    main()
