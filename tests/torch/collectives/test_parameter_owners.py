"""Parameters that are parts of larger ones, and gradients that something else averages already: refused by name, before
anything has changed. The right uses train: programs/parameter_owners.py."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.breaking import command
from support.clusters import ROOT
from support.threaded import ThreadedCluster
from torch import nn
from torch.utils.checkpoint import checkpoint

import byteps_py.torch as bps
from byteps_py import sharding
from byteps_py.errors import GradientOrderError, UsageError
from byteps_py.torch.collectives import parameter_owners

PROGRAM = str(ROOT / "tests" / "programs" / "parameter_owners.py")


class Half(nn.Module):
    """A layer of which each rank has a part, as those of tensor.parallelize."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        parameter_owners.announce_layer(self)

    def parts(self) -> Iterator[torch.Tensor]:
        yield self.weight

    def ranks_of_parts(self) -> list[int]:
        return [0, 1]


@pytest.fixture(scope="module")
def world() -> Iterator[dist.device_mesh.DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    bps.init()
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    bps.shutdown()
    dist.destroy_process_group()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def distributed(model: nn.Module, **how: Any) -> Any:
    return bps.DistributedOptimizer(sgd(model), model.named_parameters(), **how)


TAKES_WHOLE: dict[str, Callable[[nn.Module], Any]] = {
    "plain": distributed,
    "hosted": lambda model: distributed(model, hosted=True),
    "adasum": lambda model: distributed(model, op=bps.Adasum),
    "cross_barrier": lambda model: bps.CrossBarrier(model, sgd(model), model.named_parameters()),
    "ddp": bps.DistributedDataParallel,
    "diloco": lambda model: bps.local.DiLoCo(model, sgd(model), every=2),
    "broadcast": lambda model: bps.broadcast_parameters(model.state_dict(), 0),
    "broadcast of parameters": lambda model: bps.broadcast_parameters(list(model.named_parameters()), 0),
}


@pytest.mark.parametrize("how", TAKES_WHOLE)
def test_parts_are_refused_where_ranks_have_different_ones(how: str) -> None:
    def main(rank: int) -> str:
        model = nn.Sequential(Half())
        with pytest.raises(UsageError) as error:
            TAKES_WHOLE[how](model)
        assert torch.equal(model[0].weight, torch.ones(2, 2))
        return str(error.value)

    for text in ThreadedCluster((1, 1)).run(main):
        assert "tensor.parallelize has cut '0.weight', so that ranks [0, 1] have different parts of it" in text
        assert "mesh.ranks('dp', 'cp')" in text


def test_parts_are_right_among_ranks_with_the_same_ones() -> None:
    def main(rank: int) -> list[float]:
        sets = [bps.add_process_set([0, 2]), bps.add_process_set([1, 3])]
        same = sets[rank % 2]
        model = Half()
        model.weight.data.fill_(float(rank))
        bps.broadcast_parameters(model.state_dict(), same.ranks[0], process_set=same)
        first = model.weight[0, 0].item()
        optimizer = distributed(model, process_set=same)
        (model.weight.sum() * rank).backward()
        optimizer.step()
        wrapped = bps.DistributedDataParallel(Buffered(float(rank)), process_set=same)
        before = wrapped.module.count.item()
        wrapped(torch.tensor(float(rank))).backward()
        wrapped.module.count.fill_(float(rank))
        wrapped(torch.tensor(float(rank)))
        grad = wrapped.module.weight.grad
        assert grad is not None
        mine, averaging = Half(), {"every": 1, "process_set": same}
        local = bps.local.DiLoCo(mine, sgd(mine), torch.optim.SGD(mine.parameters(), lr=1.0), **averaging)
        (mine.weight.sum() * rank).backward()
        local.step()
        assert mine.weight[0, 0].item() == pytest.approx(1 - 0.1 * sum(same.ranks) / 2)
        return [first, model.weight[0, 0].item(), before, grad.item(), wrapped.module.count.item()]

    found = ThreadedCluster((2, 2)).run(main)
    assert found == [pytest.approx([own, own - 0.1 * (own + 1), own, own + 1, own]) for own in (0.0, 1.0, 0.0, 1.0)]


class Buffered(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("count", torch.tensor(value))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return self.weight * factor


def test_a_set_without_this_rank_is_refused() -> None:
    def main(rank: int) -> None:
        first = bps.add_process_set([0])
        if rank:
            with pytest.raises(UsageError, match="Rank 1 is not a member"):
                bps.DistributedDataParallel(nn.Linear(1, 1), process_set=first)

    ThreadedCluster((1, 1)).run(main)


def test_copies_of_layers_in_parts_are_known(world: dist.device_mesh.DeviceMesh) -> None:
    from byteps_py.parallel.tensor.layers import ParallelLayer

    layer = ParallelLayer(None, None)
    with pytest.raises(NotImplementedError):
        list(copy.deepcopy(layer).parts())
    assert sum(isinstance(each, ParallelLayer) for each in parameter_owners._layers) >= 1


@pytest.mark.parametrize("how", TAKES_WHOLE)
def test_dtensors_are_refused(how: str, world: dist.device_mesh.DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(2, 2)
    fully_shard(model, mesh=world)
    with pytest.raises(UsageError, match=r"'(weight|bias)' is a part of a parameter \(DTensor: FSDP"):
        TAKES_WHOLE[how](model)


WRAPPERS: dict[str, tuple[str, Callable[[nn.Module], Any]]] = {
    "torch": ("torch's DistributedDataParallel", nn.parallel.DistributedDataParallel),
    "bps": ("byteps_py's DistributedDataParallel", bps.DistributedDataParallel),
    "shard": ("sharding.shard", lambda model: sharding.shard(model, sgd(model), sharding.Strategy(sharding_degree=1))),
}


@pytest.mark.parametrize("how", ["plain", "hosted", "adasum", "cross_barrier", "diloco", "shard"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_second_wrapper_is_refused_by_name(wrapper: str, how: str, world: dist.device_mesh.DeviceMesh) -> None:
    if (wrapper, how) == ("shard", "shard"):
        pytest.skip("see test_sharding.py")
    name, wrap = WRAPPERS[wrapper]
    model = nn.Linear(2, 2)
    wrapped = wrap(model)
    second = WRAPPERS["shard"][1] if how == "shard" else TAKES_WHOLE[how]
    with pytest.raises(UsageError, match=f"{name} averages the gradient of '.*(weight|bias)' already"):
        second(model)
    del wrapped


def test_torch_s_wrapper_of_a_sharded_model_is_refused(world: dist.device_mesh.DeviceMesh) -> None:
    model = nn.Linear(2, 2)
    sharded = WRAPPERS["shard"][1](model)
    with pytest.raises(UsageError, match=r"sharding\.shard averages the gradients of this model already"):
        nn.parallel.DistributedDataParallel(model)
    with pytest.raises(UsageError, match=r"can't be copied.*copy the model before shard\(\)"):
        copy.deepcopy(model)
    del sharded


def test_fsdp2_s_own_refusals(world: dist.device_mesh.DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(2, 2)
    fully_shard(model, mesh=world)
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        torch.optim.swa_utils.AveragedModel(model)
    images = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    with pytest.raises(NotImplementedError, match="FSDP does not support non-contiguous parameters"):
        fully_shard(images, mesh=world)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torch_s_zero_optimizer_is_not_hosted(world: dist.device_mesh.DeviceMesh) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Linear(2, 2)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    with pytest.raises(UsageError, match=r"steps of SGD.*not of ZeroRedundancyOptimizer\. Leave hosted out"):
        bps.DistributedOptimizer(optimizer, model.named_parameters(), hosted=True)


def test_sharded_models_refuse_sparse_gradients_and_backward_passes_in_one_another(
    world: dist.device_mesh.DeviceMesh,
) -> None:
    words = nn.Embedding(4, 2, sparse=True)
    sharded = WRAPPERS["shard"][1](words)
    with pytest.raises(GradientOrderError, match=r"the gradient of 'weight' is sparse.*give its layer sparse=False"):
        words(torch.tensor([1])).sum().backward()
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    also_sharded = WRAPPERS["shard"][1](layers)
    output = layers[2](checkpoint(layers[1], layers[0](torch.ones(1, 2)), use_reentrant=True))
    with pytest.raises(UsageError, match="use activation checkpoints with use_reentrant=False"):
        output.sum().backward()
    del sharded, also_sharded


def test_a_wrapper_that_is_gone_is_in_nobodys_way(world: dist.device_mesh.DeviceMesh) -> None:
    model = nn.Linear(2, 2)
    for name in ("torch", "bps"):
        wrapped = WRAPPERS[name][1](model)
        del wrapped
    distributed(model)


def test_a_second_wrapper_that_comes_later_is_named() -> None:
    def main(rank: int) -> str:
        model = nn.Linear(2, 2)
        optimizer = distributed(model)
        wrapped = bps.DistributedDataParallel(model)
        wrapped(torch.full((1, 2), float(rank + 1))).sum().backward()
        with pytest.raises(GradientOrderError) as error:
            optimizer.step()
        return str(error.value)

    for text in ThreadedCluster((1, 1)).run(main):
        assert "byteps_py's DistributedDataParallel averages it, too" in text


@pytest.mark.timeout(180)
def test_a_model_that_parallelize_has_cut() -> None:
    with command(sys.executable, "-m", "byteps_py.launch", "-np", "4", sys.executable, PROGRAM) as job:
        assert job.end() == 0, job.text
    assert sum("right" in line for line in job.said) == 4
