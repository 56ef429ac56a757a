"""Mixed precision in each dimension of parallelism, beside one process that trains the same way. Arguments: names of
cases. Prints "NAME: right" on each rank.

In bfloat16 nothing is scaled. In float16 a scaler multiplies the loss, and in one step a gradient of a single rank is
infinite: all ranks skip this step, and one process does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from cases import case, run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention

import byteps_py as bps
from byteps_py.parallel import Mesh, Pipeline, context, sharding, tensor

STEPS, INFINITE, SCALE = 5, 2, 2.0**10
WIDTH, ROWS, TOKENS, VOCABULARY = 16, 8, 16, 256
PARTS = 2  # micro-batches
Batch = tuple[torch.Tensor, torch.Tensor]
Values = Mapping[str, torch.Tensor]
Passes = Callable[[int, torch.amp.GradScaler], None]
INFINITY = float("inf")


# ---- one process ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Language(nn.Module):
    """One layer of attention. ``attend``: (q, k, v) -> output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = self.embedding(ids)
        q, k, v = self.qkv(x).unflatten(-1, (6, -1)).transpose(1, 2).chunk(3, 1)
        return self.head(x + attend(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def new_language() -> Language:
    torch.manual_seed(0)
    return Language()


def sgd(model: nn.Module | Pipeline) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def batch(step: int, count: int = ROWS) -> Batch:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(count, WIDTH, generator=generator) for _ in range(2))
    return x, y


def tokens(step: int) -> Batch:
    ids = torch.randint(VOCABULARY, (4, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def new_scaler(low: torch.dtype, kind: type[torch.amp.GradScaler] = torch.amp.GradScaler, **how: Any) -> Any:
    return kind("cpu", init_scale=SCALE, growth_interval=2, enabled=low is torch.float16, **how)


def train(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, passes: Passes) -> list[float]:
    """The scale after each step."""
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        passes(step, scaler)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def spoil(parameter: torch.Tensor, step: int, scaler: torch.amp.GradScaler, is_here: bool = True) -> None:
    if scaler.is_enabled() and step == INFINITE and is_here:
        assert parameter.grad is not None
        parameter.grad.view(-1)[0] = INFINITY


def infinite(step: int, scaler: torch.amp.GradScaler, is_here: bool = True) -> float:
    """A factor of the loss."""
    return INFINITY if scaler.is_enabled() and step == INFINITE and is_here else 1.0


def in_one_process(low: torch.dtype | None, parts: int, is_mean: bool = False) -> tuple[nn.Module, list[float]]:
    """Train with these parts of each batch, one after the other. ``low``: None trains in float64, and skips what
    float16 skips. ``is_mean``: the loss of a part is divided by their number, not the gradient."""
    exact = low is None
    model = new_model().double() if exact else new_model()
    scaler = new_scaler(low or torch.float16)

    def passes(step: int, scaler: torch.amp.GradScaler) -> None:
        for x, y in zip(*(each.chunk(parts) for each in batch(step)), strict=True):
            with torch.autocast("cpu", low, enabled=not exact):
                dtype = torch.float64 if exact else torch.float32
                loss = mse_loss(model(x.to(dtype)), y.to(dtype))
            scaler.scale(loss * (1.0 / parts if is_mean else 1.0)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1.0 if is_mean else 1.0 / parts)
        spoil(next(model.parameters()), step, scaler)

    return model, train(sgd(model), scaler, passes)


def language_in_one_process(low: torch.dtype | None) -> tuple[nn.Module, list[float]]:
    exact = low is None
    model = new_language().double() if exact else new_language()

    def passes(step: int, scaler: torch.amp.GradScaler) -> None:
        ids, targets = tokens(step)
        with torch.autocast("cpu", low, enabled=not exact):
            loss = cross_entropy(model(ids, full_attention).flatten(0, 1), targets.flatten())
        scaler.scale(loss).backward()
        spoil(next(model.parameters()), step, scaler)

    return model, train(sgd(model), new_scaler(low or torch.float16), passes)


# ---- comparisons ---------------------------------------------------------------------------------------------


def same(found: Iterator[tuple[str, nn.Parameter]], expected: nn.Module, what: object) -> None:
    """The bits of these parameters, of float32."""
    whole = dict(expected.named_parameters())
    for name, parameter in found:
        assert parameter.dtype == torch.float32, (what, name, parameter.dtype)
        assert torch.equal(parameter, whole[name]), (what, name, (parameter - whole[name]).abs().max().item())


def close(
    found: Iterator[tuple[str, nn.Parameter]], low: nn.Module, exact: nn.Module, shards: Mapping[str, Any], what: object
) -> None:
    """These parameters are about as far from exact ones as those of one process: sums in another order differ in 16
    bits, too."""
    errors = torch.zeros(2, dtype=torch.float64)
    whole = [dict(each.named_parameters()) for each in (low, exact)]
    for name, parameter in found:
        assert parameter.dtype == torch.float32, (what, name, parameter.dtype)
        rounded, wanted = (shards[name].cut(each[name]) if name in shards else each[name] for each in whole)
        errors[0] += (parameter.detach().double() - wanted).square().sum()
        errors[1] += (rounded.double() - wanted).square().sum()
    dist.all_reduce(errors)
    ours, its = errors.sqrt().tolist()
    assert its > 1e-5, f"{what}: nothing was rounded to 16 bits"
    assert 0.3 * its < ours < 2 * its, f"{what}: off by {ours}, one process by {its}"


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def own(each: Batch) -> Batch:
    """This rank's part of a batch."""
    x, y = (one.chunk(dist.get_world_size())[dist.get_rank()] for one in each)
    return x, y


# ---- dimensions ----------------------------------------------------------------------------------------------


def in_both(function: Callable[[torch.dtype], None]) -> None:
    """A case of bfloat16 and float16."""

    @case
    @functools.wraps(function)
    def both() -> None:
        for low in (torch.bfloat16, torch.float16):
            function(low)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def copies(model: nn.Module, wrapped: nn.Module, optimizer: Any, low: torch.dtype) -> None:
    """Each rank has the whole model, and a part of the batch."""

    def passes(step: int, scaler: torch.amp.GradScaler) -> None:
        x, y = own(batch(step))
        with torch.autocast("cpu", low):
            loss = mse_loss(wrapped(x), y) * infinite(step, scaler, is_last())
        scaler.scale(loss).backward()

    scales = train(optimizer, new_scaler(low), passes)
    reference, expected = in_one_process(low, dist.get_world_size())
    assert scales == expected, (low, scales, expected)
    with getattr(optimizer, "gathered_parameters", torch.no_grad)():
        same(model.named_parameters(), reference, low)


def named(model: nn.Module, prefix: str) -> list[tuple[str, nn.Parameter]]:
    return [(f"{prefix}.{name}", parameter) for name, parameter in model.named_parameters()]


@in_both
def data_parallel(low: torch.dtype) -> None:
    model = new_model()
    copies(model, model, bps.DistributedOptimizer(sgd(model), named(model, f"plain.{low}")), low)
    model = new_model()
    copies(model, bps.DistributedDataParallel(model), sgd(model), low)


@in_both
def hosted(low: torch.dtype) -> None:
    model = new_model()
    copies(model, model, bps.DistributedOptimizer(sgd(model), named(model, f"hosted.{low}"), hosted=True), low)


@in_both
def hosted_masters(low: torch.dtype) -> None:
    """Parameters of 16 bits. One process has float32 masters of them, and steps these with the averages."""
    ranks = dist.get_world_size()
    model, masters = new_model().to(low), new_model().to(low).float()
    optimizer = bps.DistributedOptimizer(sgd(model), named(model, f"masters.{low}"), hosted=True)

    def passes(step: int, scaler: torch.amp.GradScaler) -> None:
        x, y = (each.to(low) for each in own(batch(step)))
        loss = mse_loss(model(x), y).float() * infinite(step, scaler, is_last())
        scaler.scale(loss).backward()

    def master_passes(step: int, scaler: torch.amp.GradScaler) -> None:
        replica = new_model().to(low)
        replica.load_state_dict(masters.state_dict())
        sums = [torch.zeros_like(one) for one in masters.parameters()]
        for x, y in zip(*(each.to(low).chunk(ranks) for each in batch(step)), strict=True):
            replica.zero_grad()
            scaler.scale(mse_loss(replica(x), y).float()).backward()
            for total, one in zip(sums, replica.parameters(), strict=True):
                assert one.grad is not None
                total += one.grad
        for one, total in zip(masters.parameters(), sums, strict=True):
            one.grad = (total / ranks).to(low).float()
        spoil(next(masters.parameters()), step, scaler)

    scales = [train(optimizer, new_scaler(low), passes), train(sgd(masters), new_scaler(low), master_passes)]
    assert scales[0] == scales[1], (low, scales)
    for (name, one), master in zip(model.named_parameters(), masters.parameters(), strict=True):
        assert torch.equal(one, master.to(low)), (low, name, (one - master.to(low)).abs().max())
    states = optimizer.state_dict()["state"].values()
    assert {state["momentum_buffer"].dtype for state in states} == {torch.float32}, low


@in_both
def sharded(low: torch.dtype) -> None:
    model = new_model()
    copies(model, model, sharding.shard(model, sgd(model), sharding.Strategy(dist.get_world_size())), low)


@in_both
def fsdp(low: torch.dtype) -> None:
    """FSDP2 casts parameters itself; gradients are added in float32."""
    model = new_model()
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for block in (*model, model):
        fully_shard(block, mp_policy=policy)

    def passes(step: int, scaler: torch.amp.GradScaler) -> None:
        x, y = own(batch(step))
        scaler.scale(mse_loss(model(x), y)).backward()
        gradient = next(model.parameters()).grad
        assert isinstance(gradient, DTensor)
        if is_last():
            gradient.to_local().view(-1)[0] *= infinite(step, scaler)

    scales = train(sgd(model), new_scaler(low), passes)
    reference, expected = in_one_process(low, dist.get_world_size())
    assert scales == expected, (low, scales, expected)
    whole = ((name, one.full_tensor()) for name, one in model.named_parameters())  # type: ignore[attr-defined]
    close(whole, reference, in_one_process(None, dist.get_world_size())[0], {}, ("fsdp", low))


PLAN = {"*.up": tensor.Column(), "*.down": tensor.Row()}


def scalers(low: torch.dtype, group: dist.ProcessGroup | None) -> list[Any]:
    """torch's, with which ranks decide together; and that of FSDP, which asks the ranks itself."""
    return [new_scaler(low), new_scaler(low, ShardedGradScaler, process_group=group)]


def in_columns(low: torch.dtype, scaler: torch.amp.GradScaler) -> None:
    model = tensor.parallelize(new_model(), PLAN, world())

    def passes(step: int, scaler: torch.amp.GradScaler) -> None:
        x, y = batch(step)
        with torch.autocast("cpu", low):
            loss = mse_loss(model(x), y)
        scaler.scale(loss).backward()
        spoil(next(model.parameters()), step, scaler, is_last())  # of its own columns

    scales = train(sgd(model), scaler, passes)
    reference, expected = in_one_process(low, 1)
    assert scales == expected, (low, scales, expected)
    exact, _ = in_one_process(None, 1)
    close(model.named_parameters(), reference, exact, tensor.sharded_parameters(model), (low, type(scaler)))


@in_both
def tensor_parallel(low: torch.dtype) -> None:
    for scaler in scalers(low, world()):
        in_columns(low, scaler)


@in_both
def tensor_parallel_language(low: torch.dtype) -> None:
    """With a divided vocabulary: the loss is of float32, as torch's is under autocast."""
    plan: dict[str, tensor.Style] = {
        "embedding": tensor.Embedding(),
        "qkv": tensor.Replicated(sum_gradients=False),
        "head": tensor.Column(vocabulary=True),
    }
    model = tensor.parallelize(new_language(), plan, world())

    def passes(step: int, scaler: torch.amp.GradScaler) -> None:
        ids, targets = tokens(step)
        with torch.autocast("cpu", low):
            loss = tensor.parallel_cross_entropy(model(ids, full_attention), targets, world(), VOCABULARY)
        assert loss.dtype == torch.float32, loss.dtype
        scaler.scale(loss).backward()
        spoil(next(model.parameters()), step, scaler, is_last())

    scales = train(sgd(model), new_scaler(low), passes)
    reference, expected = language_in_one_process(low)
    assert scales == expected, (low, scales, expected)
    shards = tensor.sharded_parameters(model)
    close(model.named_parameters(), reference, language_in_one_process(None)[0], shards, low)


def in_sequences(low: torch.dtype, attention: Callable[..., torch.Tensor]) -> None:
    model, mask = new_language(), context.DocumentMask.causal(TOKENS)

    def passes(step: int, scaler: torch.amp.GradScaler) -> None:
        ids, targets = (context.shard_sequence(each, world(), 1) for each in tokens(step))
        with torch.autocast("cpu", low):
            logits = model(ids, lambda q, k, v: attention(q, k, v, mask, world())).flatten(0, 1)
            losses = cross_entropy(logits, targets.flatten(), reduction="sum")
        loss = context.token_mean_loss(losses, targets.numel(), world())
        scaler.scale(loss * infinite(step, scaler, is_last())).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    scales = train(sgd(model), new_scaler(low), passes)
    reference, expected = language_in_one_process(low)
    assert scales == expected, (low, scales, expected)
    close(model.named_parameters(), reference, language_in_one_process(None)[0], {}, (low, attention))


@in_both
def context_parallel(low: torch.dtype) -> None:
    """Gradients are summed over the ranks that share a sequence. In both ways of attention."""
    for attention in (context.attention, context.ring_attention):
        in_sequences(low, attention)


def train_pipe(pipe: Pipeline, low: torch.dtype, scaler: torch.amp.GradScaler) -> nn.Module:
    """One process that trains so."""

    def passes(step: int, scaler: torch.amp.GradScaler) -> None:
        with torch.autocast("cpu", low):
            pipe.step(*batch(step), mse_loss, scaler=scaler)
        spoil(next(pipe.parameters()), step, scaler, dist.get_rank() == 0)  # of its own stage

    scales = train(sgd(pipe), scaler, passes)
    reference, expected = in_one_process(low, PARTS, is_mean=True)
    assert scales == expected, (low, scales, expected)
    return reference


@in_both
def pipeline(low: torch.dtype) -> None:
    for number in range(2):
        pipe = Pipeline(new_model(), "dapple", PARTS)
        same(pipe.named_parameters(), train_pipe(pipe, low, scalers(low, pipe.group)[number]), (low, number))


@in_both
def several(low: torch.dtype) -> None:
    """Stages of layers that are cut: 4 ranks."""
    mesh = Mesh(tp=2, pp=2)
    exact, _ = in_one_process(None, PARTS)
    for scaler in scalers(low, mesh.group("tp", "pp")):
        pipe = Pipeline(tensor.parallelize(new_model(), PLAN, mesh.group("tp")), "dapple", PARTS, mesh)
        reference = train_pipe(pipe, low, scaler)
        close(pipe.named_parameters(), reference, exact, pipe.sharded_parameters(), (low, type(scaler)))


@in_both
def copies_in_columns(low: torch.dtype) -> None:
    """Copies of layers that are cut: 4 ranks."""
    mesh = Mesh(tp=2, dp=2)
    sets = [bps.add_process_set([rank, rank + 2]) for rank in range(2)]
    model = tensor.parallelize(new_model(), PLAN, mesh.group("tp"))
    copy = bps.DistributedDataParallel(model, process_set=next(each for each in sets if each.included()))

    def passes(step: int, scaler: torch.amp.GradScaler) -> None:
        x, y = (each.chunk(2)[mesh.rank("dp")] for each in batch(step))
        with torch.autocast("cpu", low):
            loss = mse_loss(copy(x), y)
        scaler.scale(loss).backward()
        spoil(next(model.parameters()), step, scaler, mesh.rank("tp") == 1)

    scales = train(sgd(model), new_scaler(low), passes)
    reference, expected = in_one_process(low, 2)
    assert scales == expected, (low, scales, expected)
    shards = tensor.sharded_parameters(model)
    close(model.named_parameters(), reference, in_one_process(None, 2)[0], shards, low)
    for each in sets:
        bps.remove_process_set(each)


if __name__ == "__main__":
    run(sys.argv[1:])
