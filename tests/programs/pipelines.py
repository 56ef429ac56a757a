"""Pipelines on real processes beside the same training in one process. Arguments: the number of data-parallel copies,
and the names of cases. Prints "NAME: right" on each rank."""

from __future__ import annotations

import contextlib
import copy
import shutil
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from cases import case, run
from pipe_models import HIDDEN, gpt, next_token_loss, perceptrons, tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import byteps_py as bps
from byteps_py.errors import PipelineError, UsageError
from byteps_py.parallel import checkpoint

CLOSE = 1e-12
mse = nn.functional.mse_loss


def workers() -> int:
    return dist.get_world_size() // COPIES


def mesh() -> Any:
    return init_device_mesh(torch.get_default_device().type, (COPIES, workers()), mesh_dim_names=("dp", "pp"))


def own(batch: torch.Tensor) -> torch.Tensor:
    """The part of this data-parallel copy."""
    return batch.chunk(COPIES)[dist.get_rank() // workers()]


def generator() -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(1)


def check_same(pipe: bps.parallel.Pipeline, reference: nn.Module, what: str, gradients: bool) -> None:
    expected = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters():
        one, other = (parameter.grad, expected[name].grad) if gradients else (parameter, expected[name])
        if one is None or other is None:
            assert one is other, f"{what}: {name} has a gradient on one side only"
        else:
            difference = (one - other).abs().max().item()
            assert difference <= CLOSE, f"{what}: {name} differs by {difference}"


def train_beside_one_process(name: str, micro_batches: int, **options: Any) -> None:
    """Five steps of a GPT with tied embeddings: gradients after each, and weights after the last."""
    blocks = 2 * workers()
    pipe = bps.parallel.Pipeline(gpt(blocks), name, micro_batches, mesh(), **options)
    reference = gpt(blocks)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (pipe, reference)]
    rng, pieces = generator(), COPIES * micro_batches
    for step in range(5):
        inputs, targets = tokens(rng, 2 * pieces), tokens(rng, 2 * pieces)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = pipe.step(own(inputs), own(targets), next_token_loss)
        expected = 0.0
        for one, other in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
            part = next_token_loss(reference(one), other) / pieces
            part.backward()
            expected += part.item()
        assert abs(loss.item() - expected) <= CLOSE, (loss.item(), expected)
        check_same(pipe, reference, f"step {step}", gradients=True)
        for optimizer in optimizers:
            optimizer.step()
    check_same(pipe, reference, "after five steps", gradients=False)


def check_bits(pipe: bps.parallel.Pipeline, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@case
def same_bits() -> None:
    """Schedules that add the gradients of micro-batches in order, without copies and tied weights."""
    p = workers()
    for name, options in (("gpipe", {}), ("dapple", {}), ("interleaved", {"chunks": 2})):
        pipe, reference = bps.parallel.Pipeline(perceptrons(2 * p), name, 2 * p, mesh(), **options), perceptrons(2 * p)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (pipe, reference)]
        rng = generator()
        for _ in range(5):
            x, y = (torch.randn(4 * p, HIDDEN, generator=rng) for _ in range(2))
            for optimizer in optimizers:
                optimizer.zero_grad()
            pipe.step(x, y, mse)
            for one, other in zip(x.chunk(2 * p), y.chunk(2 * p), strict=True):
                (mse(reference(one), other) * (1.0 / (2 * p))).backward()
            for optimizer in optimizers:
                optimizer.step()
        check_bits(pipe, reference)


def schedules() -> list[tuple[str, int, dict[str, Any]]]:
    p = workers()
    found: list[tuple[str, int, dict[str, Any]]] = [
        ("gpipe", 3, {}),
        ("dapple", 2 * p, {}),
        ("dapple", p + 1, {"warmup": "B", "recompute": True}),
        ("dapple", 1, {}),  # fewer micro-batches than workers
        ("interleaved", 2 * p, {"chunks": 2}),
        ("interleaved", 2 * p + 1, {"chunks": 2, "consecutive": p + 1}),
        ("interleaved", max(1, p - 1), {"chunks": 2}),
        ("gems", 3, {}),
    ]
    if p % 2 == 0:
        found += [
            ("chimera", p, {}),
            ("chimera", 2 * p, {"sync": "at-end"}),
            ("chimera", 2 * p, {"more": "doubling"}),
            ("chimera", p, {"more": "halving"}),
        ]
    if p % 4 == 0:
        found.append(("chimera", p, {"pipes": 4}))
    return found


@case
def equal() -> None:
    for name, micro_batches, options in schedules():
        train_beside_one_process(name, micro_batches, **options)


@case
def chimera() -> None:
    for name, micro_batches, options in schedules():
        if name == "chimera":
            train_beside_one_process(name, micro_batches, **options)


@case
def other_meshes() -> None:
    """The dimensions of the mesh in another order."""
    p = workers()
    grid = init_device_mesh(torch.get_default_device().type, (p, COPIES), mesh_dim_names=("pp", "dp"))
    copy = dist.get_rank() % COPIES
    pipe, reference = bps.parallel.Pipeline(gpt(p), "dapple", p, grid), gpt(p)
    rng = generator()
    inputs, targets = tokens(rng, COPIES * p), tokens(rng, COPIES * p)
    pipe.step(inputs.chunk(COPIES)[copy], targets.chunk(COPIES)[copy], next_token_loss)
    next_token_loss(reference(inputs), targets).backward()
    check_same(pipe, reference, "pp before dp", gradients=True)
    with expecting(UsageError, "a pipeline needs one named 'pp'"):
        bps.parallel.Pipeline(
            gpt(p),
            "dapple",
            p,
            init_device_mesh(torch.get_default_device().type, (p, COPIES), mesh_dim_names=("tp", "dp")),
        )


@case
def side_by_side() -> None:
    """Each part of a mesh has a pipeline of its own, with other stages, schedules and shared parameters."""
    p, copy = workers(), dist.get_rank() // workers()
    name, make = [("gems", gpt), ("interleaved", perceptrons)][copy % 2]
    pipe, reference = bps.parallel.Pipeline(make(2 * p), name, 2 * p, mesh()["pp"]), make(2 * p)
    rng = generator()
    for _ in range(1 + copy):  # independent of each other
        if make is gpt:
            x, y, loss = tokens(rng, 2 * p), tokens(rng, 2 * p), next_token_loss
        else:
            x, y, loss = *(torch.randn(2 * p, HIDDEN, generator=rng) for _ in range(2)), mse
        pipe.step(x, y, loss)
        loss(reference(x), y).backward()
    check_same(pipe, reference, "side by side", gradients=True)
    if COPIES == 1:
        return  # all ranks are in the one pipeline
    with expecting(UsageError, "pipelines of the ranks"):
        bps.parallel.Pipeline(perceptrons(p), "gpipe", 2, mesh()["pp"] if dist.get_rank() else mesh())
    with expecting(UsageError, f"rank {p} is not in the mesh of its pipeline, whose ranks are {[*range(p)]}"):
        first = init_device_mesh("cpu", (COPIES, p), mesh_dim_names=("dp", "pp")).mesh[0]
        bps.parallel.Pipeline(perceptrons(p), "gpipe", 2, DeviceMesh("cpu", first, mesh_dim_names=("pp",)))


@case
def of_torch() -> None:
    """torch's own schedules, by their names."""
    for name in ("zero-bubble", "zb-v", "dualpipev"):
        train_beside_one_process(name, 2 * workers())
        first_steps_are_like_others(name)


def first_steps_are_like_others(name: str) -> None:
    """They take as many random numbers, and change buffers as often, though torch makes a pass of its own in them."""
    count = 2 * workers()
    stages = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.5), CallCounter()) for _ in range(count)]
    pipe = bps.parallel.Pipeline(nn.Sequential(*stages), name, count, mesh())
    own_stages = [each for _, stage in pipe.named_stages() for each in stage.modules() if isinstance(each, CallCounter)]
    rng, state = generator(), torch.get_rng_state()
    x, y = (torch.randn(2 * count, HIDDEN, generator=rng) for _ in range(2))
    states = []
    for step in range(1, 4):
        torch.set_rng_state(state)
        pipe.step(x, y, mse)
        states.append(torch.get_rng_state())
        assert [each.calls.item() for each in own_stages] == [step * count] * 2, name
    assert not torch.equal(states[0], state), name
    assert torch.equal(states[0], states[1]), name
    assert torch.equal(states[0], states[2]), name


class CallCounter(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


@case
def stale() -> None:
    """Beside the rules of PipeDream and PipeDream-2BW in one process."""
    p = workers()
    for name, micro_batches, steps in (("pipedream", 4, 3), ("pipedream", 1, 2 * p + 1), ("pipedream-2bw", p, 4)):
        pipe = bps.parallel.Pipeline(perceptrons(p), name, micro_batches, mesh())
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.5)
        rng = generator()
        batches = [
            tuple(torch.randn(2 * micro_batches * COPIES, HIDDEN, generator=rng) for _ in range(2))
            for _ in range(steps)
        ]
        losses = [pipe.step(own(x), own(y), mse, optimizer=optimizer).item() for x, y in batches]
        pipe.flush()
        reference, expected = emulated(name, micro_batches, batches)
        check_same(pipe, reference, name, gradients=False)
        if COPIES == 1:
            check_bits(pipe, reference)
        assert all(abs(one - other) <= CLOSE for one, other in zip(losses, expected, strict=True)), name


def emulated(name: str, micro_batches: int, batches: list[Any]) -> tuple[nn.Module, list[float]]:
    """(model, loss of each step) by the rule of a schedule."""
    p = workers()
    model = perceptrons(p)
    stages = bps.parallel.split(model, p)
    optimizers = [torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.5) for stage in stages]
    history = [[{name: one.detach().clone() for name, one in stage.named_parameters()} for stage in stages]]
    parts = [[part.chunk(micro_batches) for tensor in batch for part in tensor.chunk(COPIES)] for batch in batches]
    updates: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for step in parts:
        each = [[(step[copy][m], step[COPIES + copy][m]) for copy in range(COPIES)] for m in range(micro_batches)]
        updates += each if name == "pipedream" else [[pair for some in each for pair in some]]
    losses = []
    for t, pairs in enumerate(updates):
        versions = [max(t - (p - r) + 1, 0) if name == "pipedream" else max(t - 1, 0) for r in range(p)]
        leaves = [
            {name: one.clone().requires_grad_() for name, one in history[version][r].items()}
            for r, version in enumerate(versions)
        ]
        whole = 0.0
        for x, y in pairs:
            for stage, some in zip(stages, leaves, strict=True):
                x = torch.func.functional_call(stage, some, (x,))
            loss = mse(x, y) / len(pairs)
            loss.backward()
            whole += loss.item()
        losses.append(whole)
        for stage, some, optimizer in zip(stages, leaves, optimizers, strict=True):
            for name_, one in stage.named_parameters():
                one.grad = some[name_].grad
            optimizer.step()
        history.append([{n: one.detach().clone() for n, one in stage.named_parameters()} for stage in stages])
    each = len(losses) // len(batches)
    return model, [sum(losses[first : first + each]) / each for first in range(0, len(losses), each)]


class Structured(nn.Module):
    """Passes tensors of several dtypes on, in a nested structure."""

    def __init__(self, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.is_first, self.is_last = is_first, is_last

    def forward(self, value: Any) -> Any:
        if self.is_first:
            value = {"x": value, "kept": (value.detach().float(), torch.arange(value.shape[0])), "count": 0}
        assert value["kept"][0].dtype is torch.float32
        x = torch.tanh(self.linear(value["x"])) + value["kept"][0].mean() + value["kept"][1].sum()
        return x if self.is_last else {**value, "x": x, "count": value["count"] + 1}


@case
def structures() -> None:
    """Several tensors in nested structures, of other shapes for each micro-batch and step."""
    p = workers()
    torch.manual_seed(0)
    reference = nn.Sequential(*(Structured(stage == 0, stage == p - 1) for stage in range(p)))
    stages = [Structured(stage == 0, stage == p - 1) for stage in range(p)]
    for stage, layer in zip(stages, reference, strict=True):
        stage.load_state_dict(layer.state_dict())
    pipe = bps.parallel.Pipeline(stages, "dapple", 3, mesh())
    rng = generator()
    for sizes in ((1, 2, 3), (1, 2, 3), (1, 2, 3), (3, 1, 2), (2, 2, 2)):
        batch = [torch.randn(size, HIDDEN, generator=rng) for _ in range(COPIES) for size in sizes]
        mine = batch[dist.get_rank() // p * 3 :][:3]
        pipe.step(bps.parallel.MicroBatches(mine), bps.parallel.MicroBatches(mine), mse)
        for x in batch:
            (mse(reference(x), x) / len(batch)).backward()
    check_same(pipe, reference, "structures", gradients=True)


class Wide(nn.Module):
    """Its values are large: beside a tensor, another dtype, none at all, and one with gaps in its memory."""

    def __init__(self, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.linear, self.is_first, self.is_last = nn.Linear(HIDDEN, HIDDEN), is_first, is_last
        self.fails = False

    def forward(self, value: Any) -> Any:
        x, rest = (value, {}) if self.is_first else (value["x"].transpose(0, 1), value["rest"])
        if self.fails:
            raise ArithmeticError("this stage can't go on")
        x = torch.tanh(self.linear(x))
        if not self.is_first:
            x = x + rest["more"].to(x) * 1e-3 + len(rest["none"])
        if self.is_last:
            return x
        return {"x": x.transpose(0, 1), "rest": {"more": x.detach().float(), "none": x.new_empty(0, 3)}}


@case
def large_values() -> None:
    """They are sent from where they are: right in each schedule, after a change of shapes, and after a failure."""
    p = workers()
    rows = (600 << 10) // HIDDEN // 4
    for name in ("dapple", "gpipe", *(("chimera",) if p % 2 == 0 else ())):
        torch.manual_seed(0)
        reference = nn.Sequential(*(Wide(stage == 0, stage == p - 1) for stage in range(p)))
        stages = [Wide(stage == 0, stage == p - 1) for stage in range(p)]
        for stage, layer in zip(stages, reference, strict=True):
            stage.load_state_dict(layer.state_dict())
        parts = 2 * p
        pipe = bps.parallel.Pipeline(stages, name, parts, mesh())
        rng = generator()
        for count in (rows, rows, rows + 8, 2, rows):  # 2: small ones
            x = torch.randn(parts, 2, count, HIDDEN, generator=rng)
            pipe.step(x.flatten(0, 1), x.flatten(0, 1), mse)
            for one in x:
                (mse(reference(one), one) / parts).backward()
            with expecting(PipelineError, "ArithmeticError: this stage can't go on"):
                for number, module in pipe.stages.items():
                    module.fails = number == p - 1
                pipe.step(x.flatten(0, 1), x.flatten(0, 1), mse)
            for module in pipe.stages.values():
                module.fails = False
        check_same(pipe, reference, f"large values, {name}", gradients=True)


class AddInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.bias
        return torch.tanh(x)


class Hooked(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return super().forward(x)


class WithView(nn.Module):
    def forward(self, x: Any) -> Any:
        return (x, x[:, :3]) if isinstance(x, torch.Tensor) else x[0] + x[1].sum(1, keepdim=True)


@case
def in_place() -> None:
    """Stages that begin with a change in place, with a hook of their input, or return it."""
    p = workers()
    for make in (lambda: nn.ReLU(inplace=True), AddInPlace, lambda: Hooked(HIDDEN, HIDDEN), WithView):
        for schedule, options in (("dapple", {}), ("dapple", {"recompute": True}), ("gems", {})):
            torch.manual_seed(0)
            layers = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN))]
            more = [] if make is WithView else [nn.Linear(HIDDEN, HIDDEN)]
            layers += [nn.Sequential(make(), *copy.deepcopy(more)) for _ in range(p - 1)]
            if make is WithView and p % 2 == 0:
                layers[-1].extend([WithView(), nn.Linear(HIDDEN, HIDDEN)])
            pipe = bps.parallel.Pipeline(layers, schedule, 2 * p, mesh(), **options)
            reference = copy.deepcopy(nn.Sequential(*layers))
            x = torch.randn(2 * p * COPIES, HIDDEN, generator=generator())
            pipe.step(own(x), own(x), mse)
            for one in x.chunk(2 * p * COPIES):
                (mse(reference(one), one) / (2 * p * COPIES)).backward()
            check_same(pipe, reference, "in place", gradients=True)


@case
def lists() -> None:
    """A list of two tensors is one value, however many micro-batches there are."""
    p = workers()
    for micro_batches in (2, 4):
        layers = [nn.Sequential(Summed(), nn.Linear(HIDDEN, HIDDEN)), *perceptrons(p)][:p]
        torch.manual_seed(1)
        x, y = (torch.randn(4 * COPIES, HIDDEN) for _ in range(2))
        pipe, reference = bps.parallel.Pipeline(layers, "dapple", micro_batches, mesh()), copy.deepcopy(layers)
        pipe.step([own(x), own(y)], [own(x), own(y)], lambda output, target: mse(output, target[1]))
        mse(nn.Sequential(*reference)([x, y]), y).backward()
        check_same(pipe, nn.Sequential(*reference), "lists", gradients=True)


class Summed(nn.Module):
    def forward(self, value: list[torch.Tensor]) -> torch.Tensor:
        return value[0] + value[1]


@case
def in_front() -> None:
    """Inputs that a trained module computes: it gets its gradients, or the step is refused."""
    p = workers()
    torch.manual_seed(0)
    front = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())

    def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (output - target).square().sum(), target.numel()

    x = torch.randn(2 * p * COPIES, HIDDEN, generator=generator())
    for loss_fn, options in ((mse, {}), (counted, {}), (mse, {"recompute": True})):
        pipe, reference = bps.parallel.Pipeline(perceptrons(p), "dapple", 2 * p, mesh(), **options), perceptrons(p)
        mine, whole = copy.deepcopy(front), copy.deepcopy(front)
        pipe.step(mine(own(x)), own(x), loss_fn)
        mse(reference(whole(x)), x).backward()
        check_same(pipe, reference, "in front", gradients=True)
        if 0 in pipe.stages:
            total = mine[0].weight.grad.clone()
            if COPIES > 1:
                dist.all_reduce(total, group=mesh()["dp"].get_group())
            assert (total - whole[0].weight.grad).abs().max() <= CLOSE
        else:
            assert mine[0].weight.grad is None
            if COPIES > 1:
                mesh()["dp"].get_group()
    pipe = bps.parallel.Pipeline(perceptrons(p), "gems", 2 * p, mesh())
    with expecting(PipelineError, "the inputs require gradients, but gems has the first stage on several workers"):
        pipe.step(front(own(x)), own(x), mse)
    pipe.step(front(own(x)).detach(), own(x), mse)


class Drifting(nn.Module):
    """Its output depends on a buffer that each training pass changes, once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.scale = self.scale * 1.25
        return x * self.weight * self.scale


def normalizing(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN, momentum=0.3), Drifting(), nn.Tanh())
            for _ in range(count)
        )
    )


def gathered_buffers(pipe: bps.parallel.Pipeline) -> dict[str, list[torch.Tensor]]:
    """Of all ranks, by name."""
    names = dict(pipe.named_parameters())
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, {name: one.clone() for name, one in pipe.state_dict().items() if name not in names})
    return {name: [each[name] for each in told if name in each] for name in set().union(*told)}


@case
def batch_norm() -> None:
    """Buffers are counted once, are the same on all copies, and stay as they are if a step fails."""
    p = workers()
    m = 2 * p
    schedules_ = [("dapple", {}), ("dapple", {"recompute": True}), ("gems", {}), ("gems", {"recompute": True})]
    for name, options in [*schedules_, *([("chimera", {})] if p % 2 == 0 else [])]:
        pipe, reference = bps.parallel.Pipeline(normalizing(p), name, m, mesh(), **options), normalizing(p)
        rng = generator()
        for _ in range(2):
            x = torch.randn(4 * m * COPIES, HIDDEN, generator=rng)
            pipe.step(own(x), own(x), mse)
            for one in x.chunk(m * COPIES):
                (mse(reference(one), one) / (m * COPIES)).backward()
            if COPIES == 1 and name == "dapple":  # the order of a buffer's changes is that of one process
                check_same(pipe, reference, f"{name} {options}", gradients=True)
        before = gathered_buffers(pipe)
        assert len(before) == 4 * p
        for buffer, copies in before.items():
            assert all(torch.equal(copies[0], other) for other in copies), buffer
            if COPIES == 1 and name == "dapple":
                assert torch.allclose(copies[0], reference.state_dict()[buffer], rtol=0, atol=CLOSE), (buffer, options)
        with expecting(PipelineError, "the loss function returns one number"):
            pipe.step(own(x), own(x), lambda output, target: output)
        with expecting(PipelineError, "the loss function returns one number"):
            pipe.evaluate(own(x), own(x), lambda output, target: output)  # in training mode
        after = gathered_buffers(pipe)
        assert all(
            torch.equal(one, other) for name in before for one, other in zip(before[name], after[name], strict=True)
        )
        pipe.evaluate(own(x), own(x), mse)
        assert all(torch.equal(each[0], other) for each in gathered_buffers(pipe).values() for other in each)
        pipe.eval()
        whole = normalizing(p).eval()
        whole.load_state_dict({k: v.clone() for k, v in whole_state(pipe).items()})
        assert abs(pipe.evaluate(own(x), own(x), mse).item() - mse(whole(x), x).item()) <= CLOSE


def whole_state(pipe: bps.parallel.Pipeline) -> dict[str, torch.Tensor]:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, pipe.state_dict())
    return {name: one for each in told for name, one in each.items()}


@case
def refused_modules() -> None:
    """What would wait for ranks with other stages, or divide gradients twice, is refused on all ranks at once."""
    p = workers()
    bps.init()
    for norm in (nn.SyncBatchNorm(HIDDEN), bps.SyncBatchNorm(HIDDEN)):
        with expecting(UsageError, "stage 0: 1 is a SyncBatchNorm over ranks"):
            layers = perceptrons(p)
            layers[0].insert(1, norm)
            bps.parallel.Pipeline(list(layers), "gpipe", 2, mesh())
    if p % 2 == 0:
        with expecting(UsageError, "has a BatchNorm, and chimera with more='halving' computes halves"):
            bps.parallel.Pipeline(normalizing(p), "chimera", p, mesh(), more="halving")
    norm = nn.BatchNorm1d(HIDDEN)
    with expecting(UsageError, f"stages 0 and {p - 1} share 1, a BatchNorm1d"):
        layers = perceptrons(p)
        layers[0].insert(1, norm)
        layers[-1].insert(1, norm)
        bps.parallel.Pipeline(list(layers), "gpipe", 2, mesh())
    model = perceptrons(p)
    strategy = bps.sharding.Strategy(sharding_degree=dist.get_world_size())
    bps.sharding.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    with expecting(UsageError, "weight is sharded, with SGD, and both a Pipeline and shard() divide"):
        bps.parallel.Pipeline(model, "gpipe", 2, mesh())
    model = perceptrons(p)
    pipe = bps.parallel.Pipeline(model, "gpipe", 2, mesh())
    with expecting(UsageError, "weight' is in a Pipeline"):
        stage = nn.ModuleList(pipe.stages.values())
        bps.sharding.shard(stage, torch.optim.SGD(stage.parameters(), lr=0.1), strategy)
    for schedule in ["gpipe", *(["chimera"] if p % 2 == 0 else [])]:
        pipe = bps.parallel.Pipeline(perceptrons(p), schedule, p, mesh())
        sgd, text = torch.optim.SGD(pipe.parameters(), lr=0.1), "weight' is in a Pipeline, whose ranks have different"
        stages = nn.ModuleList(pipe.stages.values())
        for options in ({"hosted": True}, {}):
            with expecting(UsageError, text):
                bps.DistributedOptimizer(sgd, pipe.named_parameters(), **options)
        with expecting(UsageError, text):
            bps.parallel.DistributedDataParallel(stages)


@case
def scalers() -> None:
    """All ranks skip a step if one of them has an infinity, whatever scaler is used."""
    p, world = workers(), dist.get_world_size()
    x = torch.randn(2 * p * COPIES, HIDDEN, generator=generator())
    strategy = bps.sharding.Strategy(sharding_degree=world)
    kinds: list[Any] = [
        lambda: torch.amp.GradScaler(torch.get_default_device().type, init_scale=8.0),
        lambda: ShardedGradScaler(device=torch.get_default_device().type, init_scale=8.0),
    ]
    for make, what in [(make, what) for make in kinds for what in ("pipeline", "tensor parallel", "sharded")]:
        pipe, model = None, perceptrons(p)
        scaler = make()
        if what == "pipeline":
            pipe = bps.parallel.Pipeline(model, "dapple", 2 * p, mesh())
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        else:
            if what == "tensor parallel":
                plan = {"0.0": bps.parallel.tensor.Column(), "1.0": bps.parallel.tensor.Row()}
                model = bps.parallel.tensor.parallelize(
                    nn.Sequential(*perceptrons(2), nn.LayerNorm(HIDDEN)), plan, dist.group.WORLD
                )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if what == "sharded":
                optimizer = bps.sharding.shard(model, optimizer, strategy)
        for step in range(3):
            optimizer.zero_grad()
            if pipe is not None:
                pipe.step(own(x), own(x), mse, scaler=scaler)
            else:
                scaler.scale(mse(model(x), x)).backward()
            had = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
            had = [one for one in had if not one.grad.is_sparse]
            holders: list[bool] = [False] * world  # an owner of whole parameters may have none
            dist.all_gather_object(holders, bool(had))
            if step == 1 and dist.get_rank() == max(rank for rank in range(world) if holders[rank]):
                had[0].grad.view(-1)[0] = float("inf")
            before = [one.detach().clone() for one in had]
            if step == 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            same = [torch.equal(one, other) for one, other in zip(had, before, strict=True)]
            assert all(same) if step == 1 else not any(same), (what, step, same)
            assert scaler.get_scale() == (8.0 if step == 0 else 4.0), (what, step, scaler.get_scale())


class Stashing(nn.Module):
    stashes = ("early",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bps.parallel.stash("early", torch.tanh(x))
        return self.linear(x)  # type: ignore[no-any-return]


class Popping(nn.Module):
    pops = ("early",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + bps.parallel.pop("early")


@case
def skips() -> None:
    """A skip connection past the stages in between, and one inside a stage."""

    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Stashing(), *perceptrons(workers()), Popping())

    for name in ("dapple", "chimera"):
        if name == "chimera" and workers() % 2:
            continue
        torch.manual_seed(0)
        reference = model()
        cut = model()
        cut.load_state_dict(reference.state_dict())
        pipe = bps.parallel.Pipeline(cut, name, 2 * workers(), mesh(), recompute=name == "dapple")
        x = torch.randn(2 * workers() * COPIES, HIDDEN, generator=generator())
        pipe.step(own(x), own(x), mse)
        mse(reference(x), x).backward()
        check_same(pipe, reference, "skips", gradients=True)


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x, {1, 2}


class Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls_left = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise ArithmeticError("this stage can't go on")
        return x


@case
def raises() -> None:
    """A stage that raises, and a batch that can't be cut, end the step on all ranks; the next step is right."""
    p = workers()
    for name in ("gpipe", "dapple", "chimera", "pipedream"):
        if name == "chimera" and p % 2:
            continue
        model = perceptrons(p)
        for layer in model:
            layer.append(Raising())  # type: ignore[operator]
        pipe = bps.parallel.Pipeline(model, name, 2 * p, mesh())
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        more = {"optimizer": optimizer} if name == "pipedream" else {}
        x = torch.randn(4 * p, HIDDEN, generator=generator())
        for victim, calls in ((0, 2), (p - 1, 1), (p // 2, 2)):
            for stage, module in pipe.stages.items():
                module[-1][-1].calls_left = calls if stage == victim else -1  # type: ignore[index]
            with expecting(PipelineError, "ArithmeticError: this stage can't go on"):
                pipe.step(x, x, mse, **more)
                pipe.flush()
        with expecting(PipelineError, "inputs: a tensor with a first dimension of 3 can't be cut"):
            pipe.step(x[:3], x, mse, **more)
        with expecting(PipelineError, "the loss function returns one number"):
            pipe.step(x, x, lambda output, target: output, **more)
        for stage, module in pipe.stages.items():
            module.add_module("odd", Odd() if stage == 0 else nn.Identity())
        with expecting(PipelineError, "a value between stages has a set in it" if p > 1 else ""):
            pipe.step(x, x, mse, **more)
        for module in pipe.stages.values():
            del module.odd
        optimizer.zero_grad()
        loss = pipe.step(x, x, mse, **more)
        pipe.flush()
        if name != "pipedream":
            assert abs(loss.item() - mse(perceptrons(p)(x), x).item()) <= CLOSE


@contextlib.contextmanager
def expecting(kind: type[Exception], text: str) -> Iterator[None]:
    said = ""
    try:
        yield
    except kind as error:
        said = str(error)
    assert text in said, said or f"nothing was raised; {kind.__name__} expected"


@case
def refused() -> None:
    """Arguments that can't work are an error on all ranks when the pipeline is created."""
    p = workers()
    with expecting(UsageError, f"a model of 1 layers can't be cut into {p} stages"):
        bps.parallel.Pipeline(nn.Sequential(nn.Linear(2, 2)), "gpipe", 2, mesh())
    with expecting(UsageError, "Linear can't be cut into stages"):
        bps.parallel.Pipeline(nn.Linear(2, 2), "gpipe", 2, mesh())
    with expecting(UsageError, "3 stages were given" if p != 3 else "2 stages were given"):
        bps.parallel.Pipeline([nn.Identity()] * (3 if p != 3 else 2), "gpipe", 2, mesh())
    with expecting(UsageError, "there is no schedule 'fast'"):
        bps.parallel.Pipeline(perceptrons(p), "fast", 2, mesh())
    with expecting(UsageError, "can't be cut at '77'"):
        bps.parallel.split(perceptrons(p), p, cuts=["77"] * (p - 1))
    with expecting(UsageError, "rank 0 has the schedule gpipe with" if dist.get_rank() else "the schedule dapple with"):
        bps.parallel.Pipeline(perceptrons(p), "gpipe" if dist.get_rank() == 0 else "dapple", 2, mesh())
    stages = [None, *perceptrons(p)[1:]] if dist.get_rank() == 0 else perceptrons(p)
    with expecting(UsageError, "worker 0 holds stage 0, but its module is None"):
        bps.parallel.Pipeline(list(stages), "gpipe", 2, mesh())
    with expecting(UsageError, "the skip connection 'early' is stashed"):
        bps.parallel.Pipeline(nn.Sequential(Stashing(), *perceptrons(p)), "gpipe", 2, mesh())
    if p % 2:
        with expecting(UsageError, "an even number of workers"):
            bps.parallel.Pipeline(perceptrons(p), "chimera", 2 * p, mesh())
    with expecting(UsageError, "share"):
        bps.parallel.Pipeline(gpt(p), "pipedream", p, mesh())


@case
def tokens_count() -> None:
    """A loss that counts: micro-batches with different numbers of tokens weigh as much as they have."""

    def summed(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = target.flatten()
        return nn.functional.cross_entropy(output.flatten(0, 1), flat, reduction="sum", ignore_index=0), (
            flat != 0
        ).sum()

    m = 2 * workers()
    pipe, reference = bps.parallel.Pipeline(gpt(workers()), "dapple", m, mesh()), gpt(workers())
    rng = generator()
    inputs, targets = tokens(rng, COPIES * m), tokens(rng, COPIES * m)
    targets[targets < 9] = 0
    loss = pipe.step(own(inputs), own(targets), summed)
    total, count = summed(reference(inputs), targets)
    (total / count).backward()
    assert abs(loss.item() - (total / count).item()) <= CLOSE
    check_same(pipe, reference, "counted", gradients=True)
    # Gradients of further steps are added; one that fails, and one without any token, add nothing.
    with expecting(PipelineError, "can't be cut"):
        pipe.step(own(inputs)[1:], own(targets), summed)
    assert pipe.step(own(inputs), own(targets) * 0, summed).item() == 0.0
    pipe.step(own(inputs), own(targets), summed)
    total, count = summed(reference(inputs), targets)
    (total / count).backward()
    check_same(pipe, reference, "accumulated", gradients=True)


@case
def tied_in_a_list() -> None:
    """Stages that are given one by one, and share a parameter."""
    p = workers()
    reference = perceptrons(p)
    reference[p - 1][0].weight = reference[0][0].weight
    stages = perceptrons(p)
    stages[p - 1][0].weight = stages[0][0].weight
    pipe = bps.parallel.Pipeline(list(stages), "dapple", p, mesh())
    x = torch.randn(p * COPIES, HIDDEN, generator=generator())
    pipe.step(own(x), own(x), mse)
    mse(reference(x), x).backward()
    norm = pipe.clip_grad_norm_(0.01)
    assert abs(norm - nn.utils.clip_grad_norm_(reference.parameters(), 0.01)) <= CLOSE
    check_same(pipe, reference, "tied", gradients=True)


@case
def clipping() -> None:
    """The norm over all stages counts each parameter once."""
    name = "chimera" if workers() % 2 == 0 else "dapple"
    m = 2 * workers()
    pipe, reference = bps.parallel.Pipeline(gpt(workers()), name, m, mesh()), gpt(workers())
    rng = generator()
    inputs, targets = tokens(rng, COPIES * m), tokens(rng, COPIES * m)
    for norm_type in (2.0, float("inf"), 1.0):
        for each in (pipe, reference):
            for parameter in each.parameters():
                parameter.grad = None
        pipe.step(own(inputs), own(targets), next_token_loss)
        next_token_loss(reference(inputs), targets).backward()
        norm = pipe.clip_grad_norm_(0.05, norm_type)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm_type)
        assert abs(norm.item() - expected.item()) <= CLOSE
        check_same(pipe, reference, f"clipped by {norm_type}", gradients=True)


@case
def mixed_precision() -> None:
    """Autocast in stages; a scaler that skips the step on all ranks if one gradient is infinite."""
    p = workers()
    pipe = bps.parallel.Pipeline(perceptrons(p).float(), "dapple", 2, mesh())
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device=torch.get_default_device().type, init_scale=256.0, process_group=pipe.group)
    x = torch.randn(2 * COPIES, HIDDEN, generator=generator(), dtype=torch.float32)
    weights = [parameter.detach().clone() for parameter in pipe.parameters()]
    for bad in (True, False):
        optimizer.zero_grad()
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            pipe.step(own(x), own(x), mse, scaler=scaler)
        if bad and dist.get_rank() == 0:
            next(pipe.parameters()).grad[0] = float("inf")  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(one, other) for one, other in zip(weights, pipe.parameters(), strict=True)]
        assert all(same) if bad else not any(same), (bad, same)
    assert scaler.get_scale() == 128.0


@case
def float32_gradients() -> None:
    """Gradients of bfloat16 parameters are accumulated in float32 and rounded once, unless that is switched off."""
    p, parts = workers(), 16 * COPIES
    x, y = (torch.randn(4 * parts, HIDDEN, generator=generator(), dtype=torch.float32).bfloat16() for _ in range(2))
    reference = perceptrons(p).bfloat16()
    exact: dict[str, torch.Tensor] = {}
    for one, other in zip(x.chunk(parts), y.chunk(parts), strict=True):
        reference.zero_grad()
        (mse(reference(one), other) * (1.0 / parts)).backward()
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            exact[name] = exact.get(name, torch.zeros(())) + parameter.grad.double()
    errors = []
    for is_on in (True, False):
        pipe = bps.parallel.Pipeline(
            perceptrons(p).bfloat16(), "dapple", parts // COPIES, mesh(), float32_gradients=is_on
        )
        for _ in range(2):  # the second step adds to the gradients of the first one
            pipe.step(own(x), own(y), mse)
        error = 0.0
        for name, parameter in pipe.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.bfloat16
            error = max(error, ((parameter.grad.double() - 2 * exact[name]).norm() / exact[name].norm()).item())
        errors.append(error)
    assert errors[0] < 0.006, errors  # a rounding to 8 bits, twice
    assert errors[1] > 1.5 * errors[0], errors


@case
def evaluation() -> None:
    """Forward passes only, also between steps; frozen and empty stages."""
    p = workers()
    model = perceptrons(p)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    stages = [*model[:-1], nn.Sequential(*model[-1])]
    if p > 2:
        stages[1] = nn.Sequential()  # an empty stage
    reference = nn.Sequential(*stages)
    expected = {f"{stage}.{name}": one for stage, each in enumerate(stages) for name, one in each.named_parameters()}
    pipe = bps.parallel.Pipeline(stages, "dapple", 4, mesh())
    x = torch.randn(4 * COPIES, HIDDEN, generator=generator())
    for _ in range(2):
        loss = pipe.eval().evaluate(own(x), own(x), mse)
        assert abs(loss.item() - mse(reference(x), x).item()) <= CLOSE
        outputs = pipe.outputs(own(x))
        if p - 1 in pipe.stages:
            for part, piece in enumerate(own(x).chunk(4)):
                assert torch.equal(outputs[part], reference(piece)), "outputs"
        pipe.train().step(own(x), own(x), mse)
    assert all(parameter.grad is None for name, parameter in pipe.named_parameters() if name.startswith("0."))
    assert set(dict(pipe.named_parameters())) <= set(expected)


class Signalling(nn.Module):
    """Waits, in the nth forward pass, for the key ``awaits[n]``; sets ``sets[n]`` after it, or after its backward."""

    def __init__(self, store: dist.Store, awaits: dict[int, str], sets: dict[int, str], in_backward: bool) -> None:
        super().__init__()
        self.store, self.awaits, self.sets, self.in_backward, self.count = store, awaits, sets, in_backward, -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count in self.awaits:
            self.store.wait([self.awaits[self.count]], timedelta(seconds=60))
        y, key = x * 2, self.sets.get(self.count)
        if key and self.in_backward:
            x.register_hook(lambda gradient: self.store.set(key, "set"))
        elif key:
            self.store.set(key, "set")
        return y


@case
def overlaps() -> None:
    """A stage never waits for its sends, nor for data that a later action needs; each would be a deadlock here."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(path, 0)
    store = dist.FileStore(f"{path[0]}/store", dist.get_world_size())
    x = torch.randn(4, 1 << 17)
    last = workers() - 1
    plans = {
        # The last worker begins once the first one has sent all.
        "gpipe": {0: ({}, {3: "sent"}, False), last: ({0: "sent"}, {}, False)},
        # The first worker's second forward pass begins once the last one's first backward pass is done.
        "dapple": {0: ({1: "back"}, {}, False), last: ({}, {0: "back"}, True)},
    }
    for name, plan in plans.items():
        stages = [
            Signalling(store, *plan.get(stage, ({}, {}, False)))  # type: ignore[arg-type]
            for stage in range(workers())
        ]
        pipe = bps.parallel.Pipeline(stages, name, 4, mesh())
        pipe.step(x.clone().requires_grad_(), x, mse)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path[0])


class Counting:
    """Something that autograd keeps for a backward pass, counted while it lives."""

    alive = most = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        Counting.alive += 1
        Counting.most = max(Counting.most, Counting.alive)

    def __del__(self) -> None:
        Counting.alive -= 1


class FirstSigmoid(nn.Sigmoid):
    """Keeps its output for a backward pass, also without trained parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.requires_grad_())


@case
def peaks() -> None:
    """The most activations that autograd keeps at once are those of the table."""
    p = workers()
    for name, micro_batches, options in schedules():
        if options.get("recompute"):
            continue
        torch.manual_seed(0)
        stages = [FirstSigmoid(), *(nn.Sigmoid() for _ in range(p * options.get("chunks", 1) - 1))]
        pipe = bps.parallel.Pipeline(stages, name, micro_batches, mesh(), **options)
        each = pipe.program.parts_of_micro_batch
        x = torch.randn(2 * micro_batches, HIDDEN)
        Counting.most = 0
        with torch.autograd.graph.saved_tensors_hooks(Counting, lambda kept: kept.tensor):
            inputs = bps.parallel.MicroBatches([x if each == 1 else x[:2]] * micro_batches)
            pipe.step(inputs, bps.parallel.MicroBatches([0.0] * micro_batches), first)
        expected = pipe.program.peak_in_flight()[dist.get_rank() % p]
        # The sum of the loss keeps nothing; of a halved micro-batch each half is kept.
        assert each * expected >= Counting.most >= expected, (name, options, Counting.most, expected)
        if each == 1:
            assert Counting.most == expected, (name, options, Counting.most, expected)


def first(output: torch.Tensor, target: Any) -> torch.Tensor:
    return output.flatten()[0]


@case
def checkpoints() -> None:
    """A run goes on with another schedule and other stages, and with another number of workers."""
    everyone = dist.get_world_size()
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(path, 0)
    x, y = tokens(generator(), 8), tokens(generator(), 8)
    reference = gpt(2 * everyone)
    # With the usual eps, Adam would make updates of the rounding errors of gradients that are 0 (biases of keys).
    expected = torch.optim.Adam(reference.parameters(), lr=0.01, eps=1e-3)
    plans: list[tuple[Any, str, dict[str, Any]]] = [
        (None, "dapple", {}),
        (None, "interleaved", {"chunks": 2}),
        (init_device_mesh(torch.get_default_device().type, (1, everyone), mesh_dim_names=("dp", "pp")), "gpipe", {}),
    ]
    if everyone % 2 == 0:
        halves = init_device_mesh(torch.get_default_device().type, (2, everyone // 2), mesh_dim_names=("dp", "pp"))
        plans += [(halves, "dapple", {}), (None, "chimera", {})]
    for number, (grid, name, options) in enumerate(plans):
        model = gpt(2 * everyone)
        if number:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        pipe = bps.parallel.Pipeline(model, name, 4, grid, **options)
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01, eps=1e-3)
        if number:
            checkpoint.load(pipe, f"{path[0]}/{number - 1}", optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            expected.zero_grad()
            pipe.step(x, y, next_token_loss)
            next_token_loss(reference(x), y).backward()
            optimizer.step()
            expected.step()
        check_same(pipe, reference, f"{name} after a checkpoint", gradients=False)
        checkpoint.save(pipe, f"{path[0]}/{number}", optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path[0])


if __name__ == "__main__":
    COPIES = int(sys.argv[1])
    torch.set_default_dtype(torch.float64)
    run(sys.argv[2:])
