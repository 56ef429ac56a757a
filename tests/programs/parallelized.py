"""``parallel.parallelize_model`` with mixed precision, and what it refuses. Arguments: "TPxCPxPPxDP:DATA" layouts; DATA
may also be "machine" or "sharded", for a hosted optimizer. Prints "LAYOUT: right" on each rank."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import cases  # noqa: F401  (the default device)
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import byteps_py.torch as bps
from byteps_py.errors import UsageError
from byteps_py.parallel import Mesh, ParallelOptions, ParallelTraining, Pipeline, parallelize_model
from byteps_py.parallel.tensor import Column, Row, sharded_parameters

WIDTH, ROWS = 8, 8
HOSTED = ("machine", "sharded")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.w1(x)
        self.seen = hidden.dtype
        return x + self.w2(hidden.relu())


def options_of(data: str, **others: Any) -> ParallelOptions:
    how = {"hosted": data} if data in HOSTED else {"data": data}
    return ParallelOptions(plan={"*.w1": Column(), "*.w2": Row()}, micro_batches=2, **how, **others)


def new_training(mesh: Mesh, data: str, autocast: torch.dtype, factor: Callable[[], float]) -> ParallelTraining:
    torch.manual_seed(1)
    model = nn.Sequential(*(Block() for _ in range(4)))
    options = options_of(data, autocast=autocast, max_norm=10.0)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output.float() - target) ** 2).mean() * factor()

    return parallelize_model(model, mesh, loss, functools.partial(torch.optim.SGD, lr=0.1), options)


def local_parameters(training: ParallelTraining) -> list[torch.Tensor]:
    return [
        (one.to_local() if isinstance(one, DTensor) else one).detach().clone() for one in training.module.parameters()
    ]


def batch(mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(2)
    inputs = torch.randn(ROWS, WIDTH, generator=generator)
    own = inputs.chunk(mesh.dp * mesh.cp)[mesh.rank("dp", "cp")]
    return own, own.flip(1)


def reference(autocast: torch.dtype) -> list[float]:
    torch.manual_seed(1)
    model = nn.Sequential(*(Block() for _ in range(4)))
    generator = torch.Generator(torch.get_default_device()).manual_seed(2)
    inputs = torch.randn(ROWS, WIDTH, generator=generator)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast(inputs.device.type, autocast):
            output = model(inputs)
        loss = ((output.float() - inputs.flip(1)) ** 2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def check_autocast(mesh: Mesh, data: str, autocast: torch.dtype) -> None:
    training = new_training(mesh, data, autocast, lambda: 1.0)
    losses = [float(training.step(*batch(mesh))) for _ in range(3)]
    expected = reference(autocast)
    assert losses[-1] < losses[0]
    assert all(abs(one - other) < 0.02 * other for one, other in zip(losses, expected, strict=True)), (
        f"{losses} {expected}"
    )
    roots = training.module.stages.values() if isinstance(training.module, Pipeline) else [training.module]
    seen = {one.seen for root in roots for one in root.modules() if isinstance(one, Block)}
    assert seen == {autocast}, seen
    assert training.scaler.is_enabled() is (autocast is torch.float16)


def check_skipped_step(mesh: Mesh, data: str) -> None:
    """The loss of one copy overflows in the second step: no rank makes it, and all go on with half the scale."""
    step = 0
    is_one = mesh.rank("dp", "cp") == 0
    training = new_training(mesh, data, torch.float16, lambda: 1e38 if step == 2 and is_one else 1.0)
    for step in (1, 2, 3):
        before, scale = local_parameters(training), training.scaler.get_scale()
        training.step(*batch(mesh))
        after = local_parameters(training)
        is_same = all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        assert is_same is (step == 2), f"step {step}"
        assert training.scaler.get_scale() == (scale / 2 if step == 2 else scale), f"step {step}"


def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows count that begin with more than -0.2: other numbers of them on each rank, and in each micro-batch."""
    counts = target[:, :1] > -0.2
    return (((output - target) ** 2) * counts).sum(), counts.sum()


def check_beside_one_process(mesh: Mesh, data: str) -> None:
    """In float64, clipped: weights and statistics of all layers; and what is refused."""
    torch.manual_seed(1)
    whole = nn.Sequential(Block(), nn.LayerNorm(WIDTH), Block(), nn.BatchNorm1d(WIDTH, affine=False), Block()).double()
    whole[3].eval().requires_grad_(False)
    model = copy.deepcopy(whole)
    if dist.get_rank():  # the first copy's weights count
        for each in model.parameters() if mesh.tp == mesh.pp == 1 else ():
            each.detach().add_(1.0)
    new_optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    training = parallelize_model(model, mesh, counted, new_optimizer, options_of(data, max_norm=0.05))
    optimizer = new_optimizer(whole.parameters())
    for step in range(4):
        generator = torch.Generator(torch.get_default_device()).manual_seed(3 + step)
        inputs = torch.randn(ROWS, WIDTH, generator=generator).double()
        own = inputs.chunk(mesh.dp * mesh.cp)[mesh.rank("dp", "cp")]
        found = training.step(own, own.flip(1))
        optimizer.zero_grad()
        total, count = counted(whole(inputs), inputs.flip(1))
        (total / count).backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
        optimizer.step()
        assert abs(found - (total / count).detach()) < 1e-12, step
        assert training.norm is not None
        assert abs(training.norm - norm) < 1e-12 * norm, step
    module = training.module
    shards = module.sharded_parameters() if isinstance(module, Pipeline) else sharded_parameters(module)
    for name, parameter in module.named_parameters():
        due = whole.get_parameter(name).detach()
        due = shards[name].cut(due) if name in shards else due
        assert torch.allclose(parameter.detach(), due, rtol=0, atol=1e-12), (name, (parameter - due).abs().max())
    with pytest.raises(UsageError, match="a hosted optimizer clips by the norm of type 2"):
        training.clip_grad_norm_(1.0, 1.0)
    with pytest.raises(UsageError, match=f"hosted='{data}' does not go together with data='zero1'"):
        parallelize_model(model, mesh, counted, new_optimizer, ParallelOptions(data="zero1", hosted=data))


def check_refusals(mesh: Mesh) -> None:
    def refused(text: str, **options: object) -> None:
        model = nn.Sequential(*(Block() for _ in range(4)))
        given = ParallelOptions(**options)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=text):
            parallelize_model(model, mesh, nn.functional.mse_loss, torch.optim.SGD, given)

    int8 = bps.Compression.int8
    refused("compression does not go together with data='zero1'", data="zero1", compression=int8)
    if mesh.tp == 1:
        top = bps.Compression.topk(0.1)
        refused("compression topk .* with a hosted optimizer needs hosted='machine'", hosted=True, compression=top)
        owed = bps.Compression.with_error_feedback(int8)
        refused("compression int8 with error feedback is not for shadow=True", shadow=True, compression=owed)
        refused(r"compression must be one of bps\.Compression", compression="int8")
    refused("data='zero4': give one of ddp, zero1, zero2, zero3, hsdp", data="zero4")
    if mesh.cp == 1:
        refused("data='hsdp' shares parameters among the ranks of cp", data="hsdp")
    sharing = Mesh(order="paddle", sharding=mesh.dp) if mesh.dp > 1 else None
    if sharing is not None:
        model = nn.Sequential(Block())
        with pytest.raises(UsageError, match=f"data='zero3' takes no mesh with sharding={mesh.dp}"):
            parallelize_model(model, sharing, nn.functional.mse_loss, torch.optim.SGD, ParallelOptions(data="zero3"))
    if mesh.tp > 1:
        refused(f"tp={mesh.tp} needs a plan")
    elif mesh.pp > 1:
        refused("pipedream changes weights within its steps", schedule="pipedream")


def check_second_averages(mesh: Mesh, data: str) -> None:
    """A DistributedOptimizer around what sums its gradients itself, or has parts of parameters, is refused by name."""
    reason = "averages the gradient of"
    if mesh.tp > 1:
        reason = "tensor.parallelize has cut"
    elif data in HOSTED and mesh.pp == 1:
        return
    elif mesh.pp > 1:
        reason = "is in a Pipeline"
    elif data in ("zero2", "zero3", "hsdp"):
        reason = "DTensor: FSDP"
    for hosted in (False, True):

        def new_optimizer(parameters: Iterable[nn.Parameter], hosted: bool = hosted) -> torch.optim.Optimizer:
            return bps.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), hosted=hosted)

        options = options_of(data)
        with pytest.raises(UsageError, match=f"DistributedOptimizer: .*{reason}"):
            parallelize_model(nn.Sequential(Block(), Block()), mesh, nn.functional.mse_loss, new_optimizer, options)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("byteps")
    for layout in sys.argv[1:]:
        sizes, _, data = layout.partition(":")
        mesh = Mesh(*(int(one) for one in sizes.split("x")))
        check_refusals(mesh)
        check_second_averages(mesh, data or "ddp")
        for autocast in (torch.bfloat16, torch.float16):
            check_autocast(mesh, data or "ddp", autocast)
        check_skipped_step(mesh, data or "ddp")
        if data in HOSTED:
            check_beside_one_process(mesh, data)
        print(f"{layout}: right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
