"""FSDP2 with gathered parameters kept, beside FSDP2 without, on real processes. Arguments: the names of cases. Prints
"NAME: right" on each rank."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import case, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import byteps_py as bps
from byteps_py.errors import BytePSError, UnsupportedError, UsageError

WIDTH = 37  # uneven shards
STEPS = 3


def new_model(dtype: torch.dtype = torch.float32, layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers))).to(dtype)


def shard(model: nn.Sequential, **options: Any) -> nn.Module:
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def batch(number: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * number + rank)).to(dtype)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [param.to_local().detach().clone() for param in model.parameters() if isinstance(param, DTensor)]


def train(model: nn.Module, step: int, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(batch(step, dist.get_rank())).square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


@contextlib.contextmanager
def pair(making: Callable[[], nn.Module], **options: Any) -> Iterator[list[nn.Module]]:
    """The same model without and with its gathered parameters kept."""
    models = [making(), making()]
    cache = bps.parallel.fsdp.cache_parameters(models[1], **options)
    yield models
    assert min(options.get("max_bytes", 1), 1) <= cache.kept_bytes <= options.get("max_bytes", 1 << 20)
    cache.close()
    assert cache.kept_bytes == 0


def same(models: list[nn.Module]) -> None:
    plain, kept = map(values, models)
    assert all(map(torch.equal, plain, kept))


def beside(making: Callable[[], nn.Module], **options: Any) -> None:
    """Train both, and evaluate between the steps."""
    with pair(making, **options) as models:
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
        for step in range(STEPS):
            losses = [train(*each) for each in zip(models, [step] * 2, optimizers, strict=True)]
            assert torch.equal(*losses)
            same(models)
            with torch.no_grad():
                assert torch.equal(*(model(batch(step, 7)) for model in models))
            with torch.inference_mode():
                assert torch.equal(*(model(batch(step, 8)) for model in models))


@case
def equal() -> None:
    beside(lambda: shard(new_model()))


@case
def large() -> None:
    """Pieces that do not fit into messages."""

    def making() -> nn.Module:
        torch.manual_seed(0)
        return shard(nn.Sequential(nn.Linear(WIDTH, 9001), nn.Linear(9001, WIDTH), nn.Linear(WIDTH, 9001)))

    beside(making, max_bytes=1 << 30)


@case
def stays_gathered() -> None:
    beside(lambda: shard(new_model(), reshard_after_forward=False))


@case
def to_smaller_groups() -> None:
    if dist.get_world_size() % 2 == 0:
        beside(lambda: shard(new_model(), reshard_after_forward=2))


@case
def mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    beside(lambda: shard(new_model(), mp_policy=policy))


@case
def bounded() -> None:
    layer = WIDTH * (WIDTH + dist.get_world_size()) * 4 + 4096
    beside(lambda: shard(new_model()), max_bytes=2 * layer)
    beside(lambda: shard(new_model()), max_bytes=0)


@case
def frozen() -> None:
    def making() -> nn.Module:
        model = new_model()
        model[0].requires_grad_(False)
        model[1][0].bias.requires_grad_(False)
        return shard(model)

    beside(making)


@case
def nested() -> None:
    """Modules in modules, the outermost with parameters of its own, and one that is used twice."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = shard(new_model(layers=2))
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner(self.inner(x) * self.scale)
            return found

    beside(lambda: fully_shard(Twice()))


@case
def prefetched() -> None:
    def making() -> nn.Module:
        model = shard(new_model())
        layers = [layer for layer in model.modules() if isinstance(layer, FSDPModule)][1:]
        for one, other in itertools.pairwise(layers):
            one.set_modules_to_forward_prefetch([other])
            other.set_modules_to_backward_prefetch([one])
        return model

    beside(making)


@case
def accumulated() -> None:
    with pair(lambda: shard(new_model())) as models:
        for reshards in (True, False):
            for step in range(2):
                for model in models:
                    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                    for turn in range(3):
                        is_last = turn == 2
                        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
                        model.set_reshard_after_backward(is_last or reshards)  # type: ignore[operator]
                        model(batch(10 * step + turn, dist.get_rank())).square().sum().backward()
                    optimizer.step()
                same(models)


@case
def changed_by_hand() -> None:
    """A change on one rank, of one element, through views that count no version; and a checkpoint."""
    with pair(lambda: shard(new_model())) as models:
        state = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
        for turn in range(6):
            assert torch.equal(*(model(batch(turn, dist.get_rank())) for model in models))
            for model, saved in zip(models, state, strict=True):
                local = next(model.parameters()).to_local()  # type: ignore[attr-defined]
                if turn == 1 and dist.get_rank() == 0:
                    local.detach().numpy()[0, 0] += 1
                elif turn == 2 and dist.get_rank() == dist.get_world_size() - 1:
                    local.data[-1] = float("nan")
                elif turn == 3:
                    model.load_state_dict(saved)
                elif turn == 4:
                    with torch.no_grad():
                        for param in model.parameters():
                            param.mul_(2)
            if turn == 2:  # NaN equals nothing, but is the same NaN
                outputs = [model(batch(turn, dist.get_rank())) for model in models for _ in range(2)]
                assert len({output.detach().numpy().tobytes() for output in outputs}) == 1
                for model, saved in zip(models, state, strict=True):
                    model.load_state_dict(saved)
        same(models)


@case
def changed_before_backward() -> None:
    model = shard(new_model())
    with contextlib.closing(bps.parallel.fsdp.cache_parameters(model)):
        loss = model(batch(0, dist.get_rank())).sum()
        with torch.no_grad():
            model[1][0].weight.mul_(2)  # type: ignore[index]
        with pytest.raises(UsageError, match=r"module '1' has changed between its forward and its backward pass"):
            loss.backward()


@case
def float64() -> None:
    """Against one process."""
    model, whole = new_model(torch.float64), new_model(torch.float64)
    sharded = shard(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (sharded, whole)]
    with contextlib.closing(bps.parallel.fsdp.cache_parameters(sharded)):
        for step in range(STEPS):
            for each, ranks in ((sharded, [dist.get_rank()]), (whole, range(dist.get_world_size()))):
                for rank in ranks:
                    loss = each(batch(step, rank, torch.float64)).square().sum() / len(ranks)
                    loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for one, other in zip(sharded.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(one.full_tensor(), other, rtol=1e-12, atol=1e-12)  # type: ignore[attr-defined]


@case
def hybrid() -> None:
    """HSDP: each replica on one machine, and each replica over all machines, whose ranks are not adjacent."""
    size = dist.get_world_size()
    if size == 4:
        ranks = torch.arange(size).view(2, size // 2)
        for mesh in (ranks, ranks.T.contiguous()):
            devices = DeviceMesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
            beside(lambda mesh=devices: shard(new_model(), mesh=mesh))


@case
def uneven_machines() -> None:
    """A group of all ranks but the last."""
    size = dist.get_world_size()
    if size > 2:
        mesh = DeviceMesh("cpu", list(range(size - 1)))
        if dist.get_rank() < size - 1:
            beside(lambda: shard(new_model(), mesh=mesh))


@case
def refused() -> None:
    keep = bps.parallel.fsdp.cache_parameters
    model = shard(new_model())
    with pytest.raises(UsageError, match="can't be negative"):
        keep(model, max_bytes=-1)
    with pytest.raises(UsageError, match=r"take 16,872 bytes of this machine's memory, and 16,871 are left"):
        keep(model, available_bytes=lambda: 16_871)
    cache = keep(model, max_bytes=100 + dist.get_rank())
    with pytest.raises(UsageError, match="already has a cache"):
        keep(model)
    with pytest.raises(bps.MismatchError, match=r"would keep \[100, 101"):
        model(batch(0, 0))
    cache.close()
    assert cache.is_closed
    keep(model).close()


@case
def another_backend() -> None:
    """Called with gloo."""
    if dist.get_backend() == "gloo":
        model = shard(new_model())
        bps.parallel.fsdp.cache_parameters(model)
        with pytest.raises(UnsupportedError, match="backend 'gloo'; it needs the backend \"byteps\""):
            model(batch(0, 0))


def ended() -> None:
    """A model outlives its process group."""
    model = shard(new_model())
    cache = bps.parallel.fsdp.cache_parameters(model)
    loss = model(batch(0, 0)).sum()
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(UsageError, match="was destroyed"):
        loss.backward()
    with pytest.raises(UsageError, match="was destroyed"):
        model(batch(0, 0))
    cache.close()
    print("ended: right", flush=True)


def killed() -> None:
    """The last rank is killed between its forward and its backward pass."""
    model = shard(new_model())
    bps.parallel.fsdp.cache_parameters(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, 0, optimizer)
    loss = model(batch(1, 0)).sum()
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss.backward()
    except BytePSError as error:
        print(f"killed: rank {dist.get_rank()} got {type(error).__name__}: {error}", flush=True)
        raise


ALONE = {"ended": ended, "killed": killed}

if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in ALONE:
        dist.init_process_group("byteps")
        ALONE[sys.argv[1]]()
    else:
        run(sys.argv[1:])
