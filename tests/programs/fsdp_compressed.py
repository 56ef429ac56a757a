"""FSDP2 whose gradients travel compressed, beside machines and a server that are emulated in this process. Arguments:
names of cases; none: all. Prints "NAME: right" on each rank."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CASES, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # for support
from support.coded_sums import CodedPieces, CodedSums

import byteps_py as bps
from byteps_py.errors import NonFiniteError, UsageError
from byteps_py.parallel.collectives import all_gather_single

C = bps.Compression
WIDTH = 37  # uneven shards, and pieces that begin within blocks
STEPS = 4
CODECS = {
    "int8": C.int8,
    "int8_ef": C.with_error_feedback(C.int8),
    "float8": C.float8,
    "topk_ef": C.topk(0.05, error_feedback=True),
    "topk_of_2_bits": C.topk(0.05, error_feedback=True, bits=2),
    "onebit_ef": C.with_momentum(C.onebit(error_feedback=True), 0.9),
    "randomk": C.randomk(0.1, seed=5),
    "dithering": C.dithering(7, seed=3),
    "thc": C.thc(),
}


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.is_partial = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        return x + (y[..., :WIDTH] if self.is_partial else self.second(y))


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Unit(), Unit(), nn.Linear(WIDTH, 3))


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for layer in list(model)[:2]:
        fully_shard(layer, **options)
    return fully_shard(model, **options)  # type: ignore[return-value]


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss: torch.Tensor = model(batch).square().sum()
    return loss


def flat(gradients: Sequence[torch.Tensor], ranks: int) -> torch.Tensor:
    """As FSDP2 lays them out: of each parameter, filled up to equal shards of rows, a shard for each rank in turn."""
    padded = []
    for each in gradients:
        rows = -(-each.shape[0] // ranks) * ranks
        padded.append(torch.cat([each, each.new_zeros(rows - each.shape[0], *each.shape[1:])]).chunk(ranks))
    return torch.cat([shards[rank].flatten() for rank in range(ranks) for shards in padded])


def unflat(values: torch.Tensor, gradients: Sequence[torch.Tensor], ranks: int) -> list[torch.Tensor]:
    pieces, found = values.view(ranks, -1), []
    start = 0
    for each in gradients:
        count = -(-each.shape[0] // ranks) * each[0].numel()
        found.append(pieces[:, start : start + count].reshape(-1)[: each.numel()].view(each.shape))
        start += count
    return found


def sums(codec: Any, local_size: Any, name: str, members: int) -> CodedPieces | CodedSums:
    """Of pieces; of whole gradients where machines need answers."""
    return CodedSums(codec, local_size, name) if codec.is_thc else CodedPieces(codec, local_size, name, members)


class Emulated:
    """The same model in this process, with the gradients of all ranks."""

    def __init__(self, codec: Any, title: str) -> None:
        self.model = new_model()
        self.units = [list(layer.parameters()) for layer in self.model]
        names = ["0", "1", "(the model)"]
        self.sums = [
            sums(codec, bps.local_size(), f"FSDP.{name}{title}{self._count(codec, unit)}", bps.size())
            for name, unit in zip(names, self.units, strict=True)
        ]

    @staticmethod
    def _count(codec: Any, unit: Sequence[nn.Parameter]) -> str:
        return "" if codec.has_states else f" ({flat([each.detach() for each in unit], bps.size()).numel()})"

    def averages(self, step: int, passes: int = 1) -> None:
        """Put them into ``p.grad``."""
        ranks, given = bps.size(), []
        for rank in range(ranks):
            self.model.zero_grad()
            for each in range(passes):
                loss_of(self.model, passes * step + each, rank).backward()
            given.append([[p.grad.clone() for p in unit if p.grad is not None] for unit in self.units])
        for number, unit in enumerate(self.units):
            result = self.sums[number]([flat(each[number], ranks) for each in given], ranks)
            for parameter, gradient in zip(unit, unflat(result, given[0][number], ranks), strict=True):
                parameter.grad = gradient


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def check(model: nn.Module, expected: nn.Module, what: str) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        whole = mine.full_tensor()
        if not torch.equal(whole, theirs):
            sys.exit(f"rank {bps.rank()}: {what}: {name} differs by {(whole - theirs).abs().max()}")


#: How often the names of the modules were given: one model after the other has them.
_models = 0


def claimed() -> str:
    """The end of the next model's names."""
    global _models
    _models += 1
    return f"@{_models}" if _models > 1 else ""


def compressed(compression: Any, **options: Any) -> tuple[nn.Sequential, str]:
    model = shard(new_model(), **options)
    bps.parallel.fsdp.compress_gradients(model, compression)
    return model, claimed()


def train(compression: Any, is_cached: bool = False, passes: int = 1, **options: Any) -> None:
    model, title = compressed(compression, **options)
    if is_cached:
        bps.parallel.fsdp.cache_parameters(model)
    emulated = Emulated(compression.codec, title)
    optimizers = sgd(model), sgd(emulated.model)
    for step in range(STEPS):
        optimizers[0].zero_grad()
        for each in range(passes):
            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(each == passes - 1)
            loss_of(model, passes * step + each, bps.rank()).backward()
        emulated.averages(step, passes)
        for optimizer in optimizers:
            optimizer.step()
        check(model, emulated.model, f"{compression.__name__}, step {step}")


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


for _name, _compression in CODECS.items():
    CASES[_name] = functools.partial(train, _compression)


@case
def with_kept_parameters_and_several_passes() -> None:
    train(CODECS["int8_ef"], is_cached=True, passes=2, reshard_after_forward=False)


@case
def errors_go_on() -> None:
    """Through a checkpoint: a new model, which loads what machines have not sent."""
    compression = CODECS["topk_ef"]
    model, title = compressed(compression)
    emulated = Emulated(compression.codec, title)
    for step in range(2):
        model.zero_grad()
        loss_of(model, step, bps.rank()).backward()
        emulated.averages(step)
    check_gradients(model, emulated.model)
    saved = bps.compression_state_dict()
    bps.load_compression_state_dict(saved)
    model.zero_grad()
    loss_of(model, 2, bps.rank()).backward()
    emulated.averages(2)
    check_gradients(model, emulated.model)


def check_gradients(model: nn.Module, expected: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor)
        assert theirs.grad is not None
        assert torch.equal(mine.grad.full_tensor(), theirs.grad)


class EmulatedReduceScatter:
    """For a module that is not compressed: the sum with the codec, in each process. ``name``: of the module."""

    def __init__(self, codec: Any, name: str, group: Sequence[int]) -> None:
        sizes = [sum(rank // bps.local_size() == machine for rank in group) for machine in range(bps.cross_size())]
        self._sums = sums(codec, [size for size in sizes if size], name, len(group))

    @staticmethod
    def allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        count = group.size()
        every = torch.empty(count * input_tensor.numel())
        all_gather_single(every, input_tensor, group)
        result = self._sums(list(every.chunk(count)), count)
        output_tensor.copy_(result.chunk(count)[group.rank()])


def parallelized(data: Any, **dimensions: int) -> None:
    """parallelize_model, beside the same without compression whose reduce-scatters are emulated."""
    compression, gradients = CODECS["int8_ef"], []
    mesh = bps.parallel.Mesh(**dimensions)
    loss = torch.nn.functional.mse_loss
    for is_emulated in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        options = bps.parallel.ParallelOptions(
            data=data, micro_batches=2, compression=C.none if is_emulated else compression
        )
        training = bps.parallel.parallelize_model(
            model, mesh, loss, functools.partial(torch.optim.SGD, lr=0.1), options
        )
        if is_emulated:
            group = dist.get_process_group_ranks(mesh.gradient_group)
            for module in training.local_module.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_reduce_scatter(EmulatedReduceScatter(compression.codec, "", group))  # type: ignore[arg-type]
        for step in range(3):
            generator = torch.Generator().manual_seed(
                100 * step + bps.rank() // (bps.size() // dist.get_world_size(mesh.gradient_group))
            )
            inputs, targets = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
            training.step(inputs, targets)
            gradients.append([param.grad.to_local().clone() for param in training.local_module.parameters()])  # type: ignore[union-attr]
    for found, due in zip(gradients[:3], gradients[3:], strict=True):
        for mine, theirs in zip(found, due, strict=True):
            assert torch.equal(mine, theirs)


@case
def parallelize_zero3() -> None:
    parallelized("zero3")


@case
def parallelize_zero2() -> None:
    parallelized("zero2")


@case
def parallelize_a_pipeline() -> None:
    if bps.size() >= 4:
        parallelized("zero3", pp=2)


@case
def sixteen_bits() -> None:
    """A dtype is no codec: the piece of the backend's reduce-scatter of that dtype."""
    model, _ = compressed(C.bf16)
    plain = shard(new_model(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    for each in (model, plain):
        loss_of(each, 0, bps.rank()).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor)
        assert isinstance(theirs.grad, DTensor)
        assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())


@case
def not_all_parameters() -> None:
    """Errors belong to parameters: a step without some of them is refused, and one without errors is not."""
    model, _ = compressed(CODECS["int8_ef"])
    loss_of(model, 0, bps.rank()).backward()
    model[0].is_partial = True
    with pytest.raises(UsageError, match=r"only some parameters of module '0' have gradients"):
        loss_of(model, 1, bps.rank()).backward()
    model, _ = compressed(CODECS["int8"])
    model[0].is_partial = True
    loss_of(model, 1, bps.rank()).backward()
    model, _ = compressed(CODECS["int8_ef"])
    model[0].first.requires_grad_(False)  # frozen ones are known
    loss_of(model, 0, bps.rank()).backward()


@case
def refused() -> None:
    compress = bps.parallel.fsdp.compress_gradients
    model = shard(new_model())
    for wrong, why in (
        (C.powersgd(), r"powersgd of rank 4 is for the gradients of DistributedOptimizer"),
        (C.with_warmup(C.int8, 3), r"by rules, or with a warm-up"),
        ("int8", r"must be one of bps\.Compression"),
    ):
        with pytest.raises(UsageError, match=why):
            compress(model, wrong)
    with pytest.raises(UsageError, match=r"is for float32, float16 and bfloat16, not for float64"):
        compress(shard(new_model().double()), C.int8)
    if dist.get_world_size() % 2 == 0:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        with pytest.raises(UsageError, match=r"is sharded over a mesh with copies of its shards \(HSDP\)"):
            compress(shard(new_model(), mesh=mesh), C.int8)
    compress(model, C.int8)
    compress(model, C.none)  # as it was
    claimed()
    loss_of(model, 0, bps.rank()).backward()
    expected = shard(new_model())
    loss_of(expected, 0, bps.rank()).backward()
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor)
        assert isinstance(theirs.grad, DTensor)
        assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())


def not_finite() -> None:
    """With BYTEPS_NONFINITE=raise: all ranks name the last one."""
    model, _ = compressed(CODECS["int8_ef"])
    loss = loss_of(model, 0, bps.rank())
    if bps.rank() == bps.size() - 1:
        loss = loss * float("inf")
    with pytest.raises(NonFiniteError, match=rf"rank {bps.size() - 1}"):
        loss.backward()


if __name__ == "__main__":
    if "not_finite" in sys.argv:
        CASES["not_finite"] = not_finite
    run(sys.argv[1:], before=bps.init)
