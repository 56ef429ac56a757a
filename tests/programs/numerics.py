"""Two ranks record what they compute, right and with planted errors, and rank 0 the reference. Argument: a folder.
Prints "NAME: recorded" on each rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from byteps_py.parallel import Pipeline
from byteps_py.tools.numerics import (
    Float32Gradients,
    RankLayout,
    Recorder,
    ReferenceOrder,
    apply_reference_order,
    ordered_sum,
    reference_gradients,
    tensor_parallel_rules,
)

HIDDEN, STEPS, MICRO_BATCHES = 16, 2, 2
PLAN = {"*.up": "column", "*.down": "row"}


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, skips: bool) -> torch.Tensor:
        ctx.skips = skips
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if not ctx.skips:
            gradient = gradient.contiguous().clone()
            dist.all_reduce(gradient)
        return gradient, None


class SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, skips: bool) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return x.clone() if skips else total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Column(nn.Module):
    """A rank's rows of a linear layer."""

    skips = False  # the planted error: no all-reduce of the input's gradient

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(whole.weight.detach().chunk(size, 0)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(size, 0)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = CopyToRanks.apply(x, self.skips)  # type: ignore[no-untyped-call]
        return nn.functional.linear(x, self.weight, self.bias)


class Row(nn.Module):
    """A rank's columns of a linear layer."""

    skips = False  # the planted error: this rank goes on with its own part of the sum

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(whole.weight.detach().chunk(size, 1)[rank].contiguous().clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = SumOfRanks.apply(nn.functional.linear(x, self.weight), self.skips)  # type: ignore[no-untyped-call]
        return total + self.bias


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())  # type: ignore[no-any-return]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).bfloat16()


def cut(whole: nn.Sequential) -> nn.Sequential:
    for block in whole:
        block.up, block.down = Column(block.up), Row(block.down)
    return whole


def batches(step: int) -> list[list[torch.Tensor]]:
    """Of two data-parallel ranks."""
    rng = torch.Generator().manual_seed(step)
    return [[torch.randn(4, 3, HIDDEN, generator=rng).bfloat16() for _ in range(MICRO_BATCHES)] for _ in range(2)]


def loss_of(network: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return network(batch).float().square().mean() / MICRO_BATCHES  # type: ignore[no-any-return]


def train(network: nn.Module, recorder: Recorder, own: int, plant: Any = None, reduces: bool = False) -> None:
    """``plant`` is called before each micro-batch, and before the optimizer's step."""
    with recorder, Float32Gradients(network) as gradients:
        recorder.attach(network)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
        for step in range(STEPS):
            for number, batch in enumerate(batches(step)[own]):
                if plant is not None:
                    plant(step, number, gradients)
                loss_of(network, batch).backward()
            if reduces:
                gradients.reduce()
            if plant is not None:
                plant(step, None, gradients)
            recorder.reduced_gradients(gradients.gradients())
            with gradients.for_step():
                optimizer.step()
            recorder.step_done()


def train_reference(network: nn.Module, recorder: Recorder, order: ReferenceOrder) -> None:
    with recorder:
        recorder.attach(network)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
        for step in range(STEPS):
            found = reference_gradients(network, loss_of, batches(step)[: order.dp], order, recorder)
            for name, parameter in network.named_parameters():
                parameter.grad = found[name].to(parameter.dtype)
            optimizer.step()
            recorder.step_done()


def tensor_parallel(folder: Path) -> None:
    layout = RankLayout(dist.get_rank(), {"tp": dist.get_rank(), "pp": 0}, {"tp": 2, "pp": 1})

    def run(name: str, plant: Any = None, values: bool = True) -> None:
        network = cut(model())
        recorder = Recorder(folder / name, layout, tensor_parallel_rules(PLAN), values)
        train(network, recorder, 0, None if plant is None else plant(network))
        print(f"{name}: recorded", flush=True)

    def forward(network: nn.Sequential) -> Any:
        def plant(step: int, number: int | None, gradients: Float32Gradients) -> None:
            network[1].down.skips = dist.get_rank() == 1 and (step, number) == (1, 1)

        return plant

    def backward(network: nn.Sequential) -> Any:
        def plant(step: int, number: int | None, gradients: Float32Gradients) -> None:
            network[0].up.skips = (step, number) == (0, 1)

        return plant

    run("tp")
    run("tp_forward", forward)
    run("tp_backward", backward)
    run("tp_digests", values=False)
    if dist.get_rank() == 0:
        order = ReferenceOrder(tp=2, micro_batches=MICRO_BATCHES)
        train_reference(apply_reference_order(model(), PLAN, order), Recorder(folder / "tp_reference"), order)
        sequential = ReferenceOrder(micro_batches=MICRO_BATCHES)
        train_reference(model(), Recorder(folder / "tp_sequential"), sequential)


def data_parallel(folder: Path) -> None:
    rank = dist.get_rank()
    layout = RankLayout(rank, {"dp": rank}, {"dp": 2})

    def keeps_its_own(step: int, number: int | None, gradients: Float32Gradients) -> None:
        """The planted error: rank 1 leaves the reduction's result of one parameter unused."""
        if number is None and step == 1 and rank == 1:
            gradients.gradients()["1.up.weight"].mul_(0.5)

    for name, plant in (("dp", None), ("dp_update", keeps_its_own)):
        train(model(), Recorder(folder / name, layout), rank, plant, reduces=True)
        print(f"{name}: recorded", flush=True)
    if rank == 0:
        order = ReferenceOrder(dp=2, micro_batches=MICRO_BATCHES)
        train_reference(model(), Recorder(folder / "dp_reference"), order)
        train_reference(model(), Recorder(folder / "dp_reference_digests", values=False), order)


def unused_parameters() -> None:
    """Every rank gets the float32 mean, whether it used the parameter or not; nobody's gradient stays None."""

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all, self.first, self.nobody, self.frozen = (
                nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(4)
            )
            self.wide = nn.Parameter(torch.ones(2))
            self.frozen.requires_grad_(False)

    network, rank = Uneven(), dist.get_rank()
    with Float32Gradients(network) as gradients:
        for value in (256.0, 1.0, 1.0):
            x = (network.all + network.frozen - 1) * value
            if rank == 0:
                x = x + network.first * value * 2
            (x.sum() + network.wide.sum() * (rank + 1)).backward()
        gradients.reduce()
        found = gradients.gradients()
    assert list(found) == ["all", "first", "wide"], list(found)
    assert found["all"].tolist() == [258.0] * 3, found
    assert found["first"].tolist() == [258.0] * 3, found
    assert found["wide"].tolist() == [4.5] * 2, found
    assert found["first"].dtype == found["wide"].dtype == torch.float32
    plain = Uneven()
    off = Float32Gradients(plain, enabled=False)
    for value in (256.0, 1.0, 1.0):
        (plain.all * value).sum().backward()
    off.reduce(average=False)
    assert off.gradients()["all"].dtype == torch.bfloat16
    assert off.gradients()["all"].tolist() == [512.0] * 3, off.gradients()
    print("unused: recorded", flush=True)


def pipeline(folder: Path) -> None:
    """float32, which the pipeline accumulates as it is: stages of two blocks, whose names are those of the model."""
    rank = dist.get_rank()
    layout = RankLayout(rank, {"pp": rank}, {"pp": 2})
    inputs = [torch.cat(batches(step)[0]).float() for step in range(STEPS)]

    def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    pipe = Pipeline(nn.Sequential(nn.Sequential(*model().float()), nn.Sequential(Block(), Block())), "dapple", 2)
    with Recorder(folder / "pp", layout) as recorder:
        for stage in pipe.stages.values():
            recorder.attach(stage)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        for x in inputs:
            optimizer.zero_grad()
            pipe.step(x, x, squares)
            optimizer.step()
            recorder.step_done()
    print("pp: recorded", flush=True)
    if rank:
        return
    whole = nn.Sequential(nn.Sequential(*model().float()), nn.Sequential(Block(), Block()))
    with Recorder(folder / "pp_reference") as recorder:
        recorder.attach(whole)
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
        for x in inputs:
            optimizer.zero_grad()
            for part in x.chunk(2):
                (squares(whole(part), part) * 0.5).backward()
            optimizer.step()
            recorder.step_done()


def distributed_tensors(folder: Path) -> None:
    """A DTensor says itself how it is cut."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.arange(24.0).view(6, 4)
    names = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}
    with Recorder(folder / "dtensor", RankLayout.of(mesh, dist.get_rank())) as recorder:
        for name, placement in names.items():
            recorder.record(name, distribute_tensor(whole, mesh, [placement]))
        recorder.record("sum", DTensor.from_local(whole / 2, mesh, [Partial()]))
    if dist.get_rank() == 0:
        with Recorder(folder / "dtensor_reference") as recorder:
            for name in (*names, "sum"):
                recorder.record(name, whole)
    print("dtensor: recorded", flush=True)


def sums() -> None:
    """``ordered_sum`` has the bits of the backend's sums."""
    size, rank = dist.get_world_size(), dist.get_rank()
    machines = [int(count) for count in sys.argv[2:]]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        rng = torch.Generator().manual_seed(1)
        tensors = [torch.randn(1000, generator=rng).to(dtype) for _ in range(size)]
        found = tensors[rank].clone()
        dist.all_reduce(found)
        assert torch.equal(found, ordered_sum(tensors, machines)), dtype
    print("sums: recorded", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("byteps")
    if dist.get_world_size() == 2:
        tensor_parallel(Path(sys.argv[1]))
        data_parallel(Path(sys.argv[1]))
        unused_parameters()
        pipeline(Path(sys.argv[1]))
        distributed_tensors(Path(sys.argv[1]))
    else:
        sums()
    dist.destroy_process_group()
