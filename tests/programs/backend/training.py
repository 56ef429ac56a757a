"""Data-parallel training: DistributedDataParallel in its forms, ZeroRedundancyOptimizer, FSDP2, HSDP.

Each against training in one process on the whole batch. Weights and inputs are small powers of two and the losses
linear, so that every sum is exact and the two are equal bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import byteps_py.torch as bps
from backend.common import feature, machines, raises, rank, same, size, values

STEPS = 3
ROWS = 2  # of each rank's batch


class Model(nn.Module):
    """``branch``: which of two layers is used; None for both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.left = nn.Linear(8, 4)
        self.right = nn.Linear(8, 4, bias=False)
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(values(number, *param.shape) / 16 - 1)

    def forward(self, x: torch.Tensor, branch: int | None = None) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        if branch is None:
            return torch.cat([self.left(hidden), self.right(hidden)], 1)
        return self.left(hidden) if branch == 0 else self.right(hidden)  # type: ignore[no-any-return]


def inputs(step: int, who: int) -> torch.Tensor:
    return values(1000 * step + who, ROWS, 6) / 4 - 3


def loss_of(model: nn.Module, step: int, who: int, branch: int | None = None) -> torch.Tensor:
    out: torch.Tensor = model(inputs(step, who).to(next(model.parameters()).dtype), branch)
    return out.sum() / 8


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=2**-9, momentum=0.5)


def reference(
    branch_of: Callable[[int, int], int | None] = lambda step, who: None, passes: int = 1, steps: int = STEPS
) -> Model:
    """Trained here on what all ranks train on, averaged over the ranks. In float64 for several passes, whose sums are
    not exact in float32."""
    model = Model() if passes == 1 else Model().double()
    optimizer = sgd(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for pass_ in range(passes):
            for who in range(size()):
                (loss_of(model, step * passes + pass_, who, branch_of(step, who)) / size()).backward()
        optimizer.step()
    return model


def check(model: nn.Module, expected: nn.Module) -> None:
    same([*model.parameters()], [*expected.parameters()])


def train(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    branch_of: Callable[[int, int], int | None] = lambda step, who: None,
    steps: int = STEPS,
) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(ddp, step, rank(), branch_of(step, rank())).backward()
        optimizer.step()


@feature
def ddp() -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.0001}):
        model = DistributedDataParallel(Model(), **options)
        train(model, sgd(model.parameters()))
        check(model.module, reference())


@feature
def ddp_unused_parameters() -> None:
    def branch_of(step: int, who: int) -> int:
        return (step + (who == 0)) % 2

    model = DistributedDataParallel(Model(), find_unused_parameters=True)
    train(model, sgd(model.parameters()), branch_of)
    check(model.module, reference(branch_of))


@feature
def ddp_no_sync() -> None:
    model = DistributedDataParallel(Model().double())
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, 2 * step, rank()).backward()
        loss_of(model, 2 * step + 1, rank()).backward()
        optimizer.step()
    check(model.module, reference(passes=2))


@feature
def ddp_starts_and_buffers() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        module[0].weight.fill_(rank())
    model = DistributedDataParallel(module)
    same(module[0].weight, torch.zeros(3, 3))
    for step in range(2):
        model(values(10 * step + rank(), 4, 3)).sum().backward()
    model(values(3, 4, 3))
    means = [torch.empty(3) for _ in range(size())]
    dist.all_gather(means, module[1].running_mean.clone())
    own = nn.BatchNorm1d(3)
    assert all(torch.equal(mean, means[0]) for mean in means), (means, own)


@feature
def ddp_comm_hooks() -> None:
    half = bps.CommHookOptions(bps.Compression.fp16)
    for hook, state, steps in (
        (default_hooks.allreduce_hook, None, STEPS),
        (default_hooks.fp16_compress_hook, None, 1),  # the first step's gradients are exact in float16
        (bps.ddp_comm_hook, None, STEPS),
        (bps.ddp_comm_hook, bps.CommHookOptions(), STEPS),
        (bps.ddp_comm_hook, half, 1),
    ):
        expected = reference(steps=steps)
        for options in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}):
            model = DistributedDataParallel(Model(), **options)
            model.register_comm_hook(state, hook)
            train(model, sgd(model.parameters()), steps=steps)
            check(model.module, expected)


@feature
def ddp_power_sgd() -> None:
    torch.manual_seed(0)
    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 0.5}
    model = DistributedDataParallel(Model())
    state = powerSGD_hook.PowerSGDState(process_group=None, **options)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = sgd(model.parameters())
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, step, rank()).backward()
        optimizer.step()
    for param in model.module.parameters():  # lossy, but alike everywhere
        copies = [torch.empty_like(param) for _ in range(size())]
        dist.all_gather(copies, param.detach())
        same(copies, [param] * size())


@feature
def ddp_errors() -> None:
    group = dist.new_group()
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    model(torch.ones(1, 4)).sum().backward()  # what is agreed on stays so

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations
        wrong = torch.ones(5000 + rank())
        future = dist.all_reduce(wrong, group=group, async_op=True).get_future()  # type: ignore[union-attr]
        return future.then(lambda done: (done.value(), bucket.buffer())[1])

    broken = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    broken.register_comm_hook(None, hook)
    raises(RuntimeError, "MismatchError", lambda: broken(torch.ones(1, 4)).sum().backward())


@feature
def zero_redundancy_optimizer() -> None:
    model = DistributedDataParallel(Model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=2**-9, momentum=0.5)
    train(model, optimizer)
    check(model.module, reference())
    optimizer.consolidate_state_dict(to=0)
    if rank() == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


def _train_sharded(model: FSDPModule) -> None:
    optimizer = sgd(model.parameters())  # type: ignore[attr-defined]
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rank()).backward()  # type: ignore[arg-type]
        optimizer.step()


def _check_sharded(model: nn.Module, expected: nn.Module) -> None:
    same([param.full_tensor() for param in model.parameters()], [*expected.parameters()])  # type: ignore[operator]


@feature
def fsdp2() -> None:
    for reshard in (True, False):
        model = Model()
        for layer in (model.first, model.left, model.right):
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        _train_sharded(model)  # type: ignore[arg-type]
        _check_sharded(model, reference())


@feature
def fsdp2_accumulates() -> None:
    model = fully_shard(Model().double())
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        model.set_requires_gradient_sync(False)
        loss_of(model, 2 * step, rank()).backward()
        model.set_requires_gradient_sync(True)
        loss_of(model, 2 * step + 1, rank()).backward()
        optimizer.step()
    _check_sharded(model, reference(passes=2))


@feature
def fsdp2_clips() -> None:
    model, expected = fully_shard(Model()), Model()
    loss_of(model, 0, rank()).backward()
    total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for who in range(size()):
        (loss_of(expected, 0, who) / size()).backward()
    torch.testing.assert_close(total.full_tensor(), nn.utils.clip_grad_norm_(expected.parameters(), 1.0))


@feature
def hsdp() -> None:
    if size() < 4:
        return
    mesh = init_device_mesh(torch.get_default_device().type, (2, size() // 2), mesh_dim_names=("replicate", "shard"))
    model = Model()
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _train_sharded(model)  # type: ignore[arg-type]
    _check_sharded(model, reference())


@feature
def beside_the_own_optimizer() -> None:
    model = Model()
    optimizer = bps.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rank()).backward()
        optimizer.step()
    check(model, reference())
    copied = copy.deepcopy(model)
    check(copied, model)
    assert sum(machines()) == size()
