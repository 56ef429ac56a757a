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
    lambda model: bps.AsyncOptimizer(sgd(model), model.named_parameters()),
    lambda model: bps.parallel.DistributedDataParallel(model),
    lambda model: bps.broadcast_parameters(model.state_dict(), 0),
]


def check_hosted(
    model: nn.Module, optimizer: Any, loss: Callable[[], torch.Tensor], mesh: bps.parallel.Mesh, same: bps.ProcessSet
) -> None:
    """What takes norms of whole parameters is refused; a scaler skips a step on all ranks of the model, or on none."""
    with pytest.raises(
        bps.UsageError, match=r"the norm for clipping is that of all .* cut '0\.weight', of which ranks"
    ):
        optimizer.clip_grad_norm_(1.0)
    lamb = bps.optim.LAMB(model.parameters(), lr=0.1)
    with pytest.raises(bps.UsageError, match="a step of LAMB takes norms of whole parameters"):
        bps.DistributedOptimizer(lamb, model.named_parameters(), process_set=same, hosted=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number, factor in enumerate((1.0, float("inf"), 1.0)):
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        worse = model[0].weight.register_hook(lambda grad, factor=factor: grad * (factor if mesh.rank("tp") else 1.0))
        scaler.scale(loss()).backward()
        worse.remove()
        if number != 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        is_skipped = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert is_skipped is (number == 1), number
        assert scaler.get_scale() == (4.0 if number == 0 else 2.0)


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
    for how in ("optimizer", "hosted", "module"):
        model = tensor.parallelize(copy.deepcopy(whole), PLAN, mesh.group("tp"))
        before = copy.deepcopy(model.state_dict())
        for wrap in TAKES_WHOLE:
            with pytest.raises(bps.UsageError, match=r"tensor\.parallelize has cut"):
                wrap(model)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        optimizer = sgd(model)
        if how != "module":
            options = {"process_set": same, "hosted": how == "hosted"}
            optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters(), **options)
            runs: nn.Module = model
        else:
            runs = bps.parallel.DistributedDataParallel(model, process_set=same)
        runs(inputs[mesh.rank("dp")]).square().mean().backward()
        optimizer.step()
        step = {name: value.detach() - 0.1 * value.grad for name, value in expected.named_parameters()}
        for name, shard in tensor.sharded_parameters(model).items():
            assert torch.allclose(model.get_parameter(name), shard.cut(step[name]), rtol=0, atol=1e-12), (how, name)
        if how == "hosted":
            check_hosted(model, optimizer, lambda runs=runs: runs(inputs[mesh.rank("dp")]).square().mean(), mesh, same)
    model = tensor.parallelize(copy.deepcopy(whole), PLAN, mesh.group("tp"), sequence_dim=0)
    for wrap in TAKES_WHOLE:
        with pytest.raises(bps.UsageError, match=r"tensor\.parallelize has cut"):
            wrap(model)
    os.write(1, b"right\n")
    dist.destroy_process_group()
    bps.shutdown()


if __name__ == "__main__":
    main()
