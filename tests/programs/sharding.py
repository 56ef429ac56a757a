"""Sharded states on real processes beside one process in float64. Arguments: the names of cases. Prints "NAME: right"
on each rank."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import case, run
from support.paper_formulas import whole_owner_bytes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import byteps_py as bps
from byteps_py.errors import GradientOrderError, MismatchError, UsageError
from byteps_py.parallel import Mesh, checkpoint
from byteps_py.parallel.sharding import ShardedOptimizer, ShardOptions, Strategy, partitioned_checkpoint, shard
from byteps_py.parallel.sharding.rank_memory import tally_memory
from byteps_py.parallel.tensor import Column, Row, copy_to_ranks, parallelize
from byteps_py.tools.plan.formulas import state_bytes

CLOSE = 1e-12
WIDTH, ROWS = 6, 24
#: A segment for about each layer.
SMALL_MB = 300 / 2**20
Making = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """Layers of uneven sizes, attention that reads its submodules' parameters, and a tied output."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.middle = nn.Sequential(nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 16))
        self.scale = nn.Parameter(torch.full((16,), 0.5))
        self.last = nn.Linear(16, 16)
        self.unused = nn.Parameter(torch.ones(3))
        if tied:
            self.last.weight = self.attention.out_proj.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        hidden = hidden + self.attention(hidden[None], hidden[None], hidden[None])[0][0] * self.scale
        return self.last(hidden + self.middle(hidden))


def new_model(**options: Any) -> Net:
    torch.manual_seed(3)
    return Net(**options)


def micro_batches(step: int, count: int) -> list[torch.Tensor]:
    """For all ranks; a rank takes its rows."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(step)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(count)]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def loss_of(net: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Rows attend to each other, so a rank's rows are a sequence of their own."""
    loss: torch.Tensor = net(rows).square().mean()
    return loss


def degrees() -> list[tuple[int, int]]:
    world = dist.get_world_size()
    return [(shards, world // shards) for shards in (1, 2, 4) if world % shards == 0]


def reference_step(
    net: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[torch.Tensor], clip: float
) -> Any:
    optimizer.zero_grad()
    world = dist.get_world_size()
    for batch in batches:
        for rows in batch.chunk(world):
            (loss_of(net, rows) / (world * len(batches))).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), clip) if clip else None
    optimizer.step()
    return norm


def sharded_step(net: nn.Module, optimizer: ShardedOptimizer, batches: Sequence[torch.Tensor], clip: float) -> Any:
    if clip:  # without it, a step begins with no gradients, too
        optimizer.zero_grad()
    for batch in batches:
        loss_of(net, batch.chunk(dist.get_world_size())[dist.get_rank()]).backward()
    norm = optimizer.clip_grad_norm_(clip) if clip else None
    optimizer.step()
    return norm


def compare(mine: nn.Module, theirs: nn.Module, what: Any, close: float = CLOSE) -> None:
    """Parameters of a sharded model, from its state dict, beside those of one process."""
    expected = theirs.state_dict()
    for name, value in mine.state_dict().items():
        difference = (value - expected[name]).abs().max().item() if value.numel() else 0.0
        assert difference <= close, f"{what}: {name} differs by {difference}"


def raises(kind: type[BaseException], text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert text in str(raised.value), f"{raised.value!r} does not say {text!r}"


def check(
    strategy: Strategy,
    options: ShardOptions | None = None,
    making: Making = adamw,
    clip: float = 0.0,
    before: Callable[[nn.Module, int], None] = lambda net, step: None,
    tied: bool = False,
) -> tuple[Net, ShardedOptimizer, Net, torch.optim.Optimizer]:
    """Train beside one process."""
    mine, theirs = new_model(tied=tied), new_model(tied=tied)
    optimizer, reference = shard(mine, making(mine.parameters()), strategy, options), making(theirs.parameters())
    for step in range(4):
        for net in (mine, theirs):
            before(net, step)
        batches = micro_batches(step, strategy.gradient_merge_acc_step)
        norms = sharded_step(mine, optimizer, batches, clip), reference_step(theirs, reference, batches, clip)
        if clip:
            assert abs(norms[0] - norms[1]) <= CLOSE * norms[1], norms
        compare(mine, theirs, (strategy, step))
    return mine, optimizer, theirs, reference


@case
def equal() -> None:
    """All degrees; gradient merge of 1 and 3, at both places; sums over copies at both times."""
    for shards, dp in degrees():
        for merge, late in ((1, False), (3, False), (3, True)):
            strategy = Strategy(
                shards,
                dp,
                gradient_merge_acc_step=merge,
                segment_broadcast_MB=SMALL_MB,
                pp_allreduce_in_optimize=late,
            )
            for where in ("owner", "rank") if merge > 1 else ("owner",):
                check(strategy, ShardOptions(accumulate=where))  # type: ignore[arg-type]


@case
def clips() -> None:
    for shards, dp in degrees():
        for late in (False, True):
            strategy = Strategy(shards, dp, segment_broadcast_MB=SMALL_MB, pp_allreduce_in_optimize=late)
            check(strategy, ShardOptions(fused_buffer_bytes=1024), sgd, clip=0.05)


@case
def states_from_the_beginning() -> None:
    """Adagrad's constructor makes them: only the owner's stay."""

    def adagrad(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1)

    for shards, dp in degrees():
        _, optimizer, _, _ = check(Strategy(shards, dp, segment_broadcast_MB=SMALL_MB), making=adagrad)
        own = {member.parameter for member in optimizer._parts.members if member.piece.is_own}
        assert set(optimizer.state) == own


class Said(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@case
def penalties() -> None:
    """A penalty on a weight outside of modules: NaN where the weight is not, which is said; right where it is held."""
    rows = micro_batches(0, 1)[0]
    for is_held in (False, True):
        net = new_model()
        optimizer = shard(net, sgd(net.parameters()), Strategy(dist.get_world_size(), segment_broadcast_MB=SMALL_MB))
        said = Said()
        logging.getLogger("byteps_py").addHandler(said)
        with optimizer.gathered_parameters() if is_held else contextlib.nullcontext():
            loss = loss_of(net, rows) + net.middle[0].weight.square().sum()
            loss.backward()
        optimizer.step()
        logging.getLogger("byteps_py").removeHandler(said)
        is_owner = optimizer.owner_of(net.middle[0].weight) == dist.get_rank()
        heard = [text for text in said.texts if "the gradient of 'middle.0.weight' is NaN" in text]
        assert len(said.texts) == len(heard) == (not is_held and not is_owner), said.texts
        assert bool(loss.isnan()) is (not is_held and not is_owner)
        if is_held:
            theirs = new_model()
            whole = sgd(theirs.parameters())
            (loss_of(theirs, rows) + theirs.middle[0].weight.square().sum()).backward()
            whole.step()
            with optimizer.gathered_parameters():
                compare(net, theirs, "a penalty")


@case
def tied() -> None:
    for shards, dp in degrees():
        check(Strategy(shards, dp, segment_broadcast_MB=SMALL_MB), tied=True)
        check(Strategy(shards, dp, segment_broadcast_MB=SMALL_MB), ShardOptions(reshard_after_forward=False), tied=True)


@case
def freezes() -> None:
    def before(net: nn.Module, step: int) -> None:
        net.first.requires_grad_(step > 1)  # type: ignore[union-attr]
        net.middle.requires_grad_(step != 2)  # type: ignore[union-attr]

    for shards, dp in degrees():
        check(Strategy(shards, dp, segment_broadcast_MB=SMALL_MB), making=sgd, before=before)


@case
def anchors() -> None:
    anchors = ["attention", "middle.2", "last.bias"]
    for shards, dp in degrees():
        strategy = Strategy(shards, dp, sharding_segment_strategy="segment_anchors", segment_anchors=anchors)
        _, optimizer, _, _ = check(strategy)
        segments = optimizer._parts.gathering.memory.segments
        assert [one.members[0].name for one in segments][1:] == [
            "attention.in_proj_weight",
            "middle.2.weight",
            "last.bias",
        ]


@case
def offloads() -> None:
    for shards, dp in degrees():
        strategy = Strategy(shards, dp, segment_broadcast_MB=SMALL_MB, optimize_offload=True)
        mine, optimizer, _, reference = check(strategy)
        tally = tally_memory(mine, optimizer)
        own = sum(one.numel for one in optimizer._parts.members if one.piece.is_own and one.name != "unused")
        assert (tally.states, tally.offloaded) == (0, 2 * 8 * own), tally
        states_equal(optimizer.state_dict(), reference.state_dict())


def states_equal(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for place, state in theirs["state"].items():
        assert state.keys() == mine["state"][place].keys()
        for name, value in state.items():
            torch.testing.assert_close(mine["state"][place][name], value, rtol=0, atol=CLOSE)


@case
def states_move() -> None:
    """To and from torch's own optimizer, in the middle of a training."""
    for (shards, dp), offload in itertools.product(degrees(), (False, True)):
        strategy = Strategy(shards, dp, segment_broadcast_MB=SMALL_MB, optimize_offload=offload)
        mine, optimizer, theirs, reference = check(strategy)
        states_equal(optimizer.state_dict(), reference.state_dict())
        weights, states = copy.deepcopy(mine.state_dict()), copy.deepcopy(optimizer.state_dict())
        other = new_model()
        again = shard(other, adamw(other.parameters()), strategy)
        other.load_state_dict(weights)
        again.load_state_dict(states)
        theirs.load_state_dict(weights)
        reference.load_state_dict(copy.deepcopy(states))  # torch shares tensors
        batches = micro_batches(9, 1)
        sharded_step(other, again, batches, 0.0)
        reference_step(theirs, reference, batches, 0.0)
        compare(other, theirs, "after loading")
        before = copy.deepcopy(again.state_dict())
        wrong = copy.deepcopy(states)
        wrong["state"][0]["exp_avg"] = torch.zeros(2, 2)
        raises(UsageError, "exp_avg of scale has the shape (2, 2)", lambda: again.load_state_dict(wrong))  # noqa: B023
        short = copy.deepcopy(states)
        short["param_groups"][0]["params"].pop()
        raises(UsageError, "it is of another model. Nothing was loaded", lambda: again.load_state_dict(short))  # noqa: B023
        states_equal(again.state_dict(), before)


@case
def saves() -> None:
    """torch.distributed.checkpoint: from one number of owners to another."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    world = dist.get_world_size()
    mine, optimizer, theirs, reference = check(Strategy(world, segment_broadcast_MB=SMALL_MB))
    checkpoint.save(mine, str(path[0]), optimizer)
    other = new_model()
    again = shard(other, adamw(other.parameters()), Strategy(world // 2, 2, segment_broadcast_MB=SMALL_MB))
    checkpoint.load(other, str(path[0]), again)
    states_equal(again.state_dict(), reference.state_dict())
    for parameter in other.parameters():
        assert again.owns(parameter) or not again.state.get(parameter)
    batches = micro_batches(9, 1)
    sharded_step(other, again, batches, 0.0)
    reference_step(theirs, reference, batches, 0.0)
    compare(other, theirs, "after loading")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(str(path[0]))


@case
def recomputes() -> None:
    """Non-reentrant activation checkpoints inside of the model, and a module that is called twice."""

    class Repeats(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            from torch.utils.checkpoint import checkpoint as activation_checkpoint

            hidden = activation_checkpoint(self.first, x, use_reentrant=False).tanh()
            hidden = activation_checkpoint(self.middle, hidden, use_reentrant=False) * self.scale
            hidden = partitioned_checkpoint(self.middle, hidden, group=None)
            return activation_checkpoint(self.last, hidden, use_reentrant=False)

    for (shards, dp), reshards in itertools.product(degrees(), (True, False)):
        nets = []
        for _ in range(2):
            torch.manual_seed(1)
            nets.append(Repeats())
        strategy = Strategy(shards, dp, segment_broadcast_MB=SMALL_MB)
        optimizer = shard(nets[0], adamw(nets[0].parameters()), strategy, ShardOptions(reshard_after_forward=reshards))
        reference = adamw(nets[1].parameters())
        for step in range(3):
            batches = micro_batches(step, 1)
            sharded_step(nets[0], optimizer, batches, 0.0)
            reference_step(nets[1], reference, batches, 0.0)
            compare(*nets, (shards, dp, step))


@case
def goes_on() -> None:
    """After an exception in a forward pass, and with evaluations in between."""
    failing = [False]

    class Fails(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = super().forward(x)
            if failing[0]:
                raise RuntimeError("on purpose")
            return result

    def before(net: nn.Module, step: int) -> None:
        rows = micro_batches(50 + step, 1)[0]
        with torch.no_grad():
            evaluated = net.eval()(rows)
        failing[0] = True
        raises(RuntimeError, "on purpose", lambda: net.train()(rows))
        failing[0] = False
        results.append(evaluated)

    for shards, dp in degrees():
        results: list[torch.Tensor] = []
        nets: list[Any] = []
        for _ in range(2):
            torch.manual_seed(3)
            nets.append(Fails())
        optimizer = shard(nets[0], adamw(nets[0].parameters()), Strategy(shards, dp, segment_broadcast_MB=SMALL_MB))
        reference = adamw(nets[1].parameters())
        for step in range(3):
            for net in nets:
                before(net, step)
            assert (results[-1] - results[-2]).abs().max() <= CLOSE
            batches = micro_batches(step, 1)
            sharded_step(nets[0], optimizer, batches, 0.1)
            reference_step(nets[1], reference, batches, 0.1)
            compare(*nets, (shards, dp, step))
        with optimizer.gathered_parameters():
            for mine, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
                assert (mine - theirs).abs().max() <= CLOSE
        assert all(optimizer.owns(one) or one.isnan().all() for one in nets[0].parameters())


@case
def beside_tensor_parallelism() -> None:
    """mp_degree 2: each tensor-parallel rank shards its part with the ranks that have the same part."""
    world, own = dist.get_world_size(), dist.get_rank()
    mesh = Mesh(tp=2, sharding=world // 2, dp=1, order="paddle")
    nets = []
    for _ in range(2):
        torch.manual_seed(2)
        nets.append(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 3)))
    parallelize(nets[0], {"0": Column(), "2": Row()}, mesh.group("tp"))
    nets[0].register_forward_pre_hook(lambda _, rows: copy_to_ranks(rows[0], mesh.group("tp")))
    strategy = Strategy(world // 2, mp_degree=2, segment_broadcast_MB=1e-5)
    optimizer = shard(nets[0], adamw(nets[0].parameters()), strategy, ShardOptions(mesh=mesh))
    reference = adamw(nets[1].parameters())
    for step in range(3):
        rows = micro_batches(step, 1)[0]
        optimizer.zero_grad()
        reference.zero_grad()
        nets[0](rows.chunk(world // 2)[mesh.rank("sharding")]).square().mean().backward()
        nets[1](rows).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(nets[1].parameters(), 0.1)
        assert abs(optimizer.clip_grad_norm_(0.1) - norm) <= CLOSE, (own, step)
        optimizer.step()
        reference.step()
        assert (nets[0](rows) - nets[1](rows)).abs().max() <= CLOSE, (own, step)


@case
def in_pipelines() -> None:
    """pp_degree 2, two micro-batches in flight: each worker shards its stage, and clips by the norm of all stages."""
    world = dist.get_world_size()
    for shards, late in dict.fromkeys([(world // 2, False), (1, True), (1, False)]):
        dp = world // 2 // shards
        strategy = Strategy(
            shards,
            dp,
            pp_degree=2,
            gradient_merge_acc_step=2,
            segment_broadcast_MB=1e-5,
            pp_allreduce_in_optimize=late,
        )
        mesh = Mesh(sharding=shards, pp=2, dp=dp, order="paddle")
        torch.manual_seed(2)
        whole = nn.Sequential(
            nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)
        )
        stage = copy.deepcopy(whole[:3] if mesh.rank("pp") == 0 else whole[3:])
        other = mesh.ranks("pp")[1 - mesh.rank("pp")]
        optimizer = shard(stage, adamw(stage.parameters()), strategy, ShardOptions(mesh=mesh))
        reference = adamw(whole.parameters())
        for step in range(3):
            batches = micro_batches(step, 2)
            own = [batch.chunk(shards * dp)[mesh.rank("dp", "sharding")] for batch in batches]
            optimizer.zero_grad()
            reference.zero_grad()
            if mesh.rank("pp") == 0:
                hidden = [stage(rows) for rows in own]
                for one in hidden:
                    dist.send(one.detach(), other)
                for one in hidden:
                    gradient = torch.empty_like(one)
                    dist.recv(gradient, other)
                    one.backward(gradient)
            else:
                inputs = [torch.empty(len(rows), 4) for rows in own]
                for one in inputs:
                    dist.recv(one, other)
                losses = [stage(one.requires_grad_()).square().mean() for one in inputs]
                for one, loss in zip(inputs, losses, strict=True):
                    loss.backward()
                    dist.send(one.grad, other)
            for batch in batches:
                (whole(batch).square().mean() / 2).backward()
            norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
            assert abs(optimizer.clip_grad_norm_(0.1) - norm) <= CLOSE
            optimizer.step()
            reference.step()
            compare(stage, whole[:3] if mesh.rank("pp") == 0 else whole[3:], (strategy, step))


@case
def schedules() -> None:
    """Learning rates of a scheduler and of groups; parameters of two types in one segment, large ones in chunks."""

    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.full((3, 700), 0.001, dtype=torch.float32))
            self.empty = nn.Parameter(torch.empty(0, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.factor.double().sum() + self.empty.sum()

    def making(net: nn.Module) -> torch.optim.Optimizer:
        biases = [one for one in net.parameters() if one.dim() == 1]
        others = [one for one in net.parameters() if one.dim() > 1]
        return torch.optim.AdamW([{"params": others}, {"params": biases, "weight_decay": 0.0, "lr": 0.1}], lr=0.01)

    for shards, dp in degrees():
        nets: list[Any] = []
        for _ in range(2):
            torch.manual_seed(3)
            nets.append(Mixed())
        strategy = Strategy(shards, dp, optimize_offload=True)
        optimizer = shard(nets[0], making(nets[0]), strategy, ShardOptions(fused_buffer_bytes=1024))
        reference = making(nets[1])
        rates = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (optimizer, reference)]
        for step in range(3):
            batches = micro_batches(step, 1)
            sharded_step(nets[0], optimizer, batches, 0.0)
            reference_step(nets[1], reference, batches, 0.0)
            compare(*nets, (shards, dp, step), 1e-6 if step else 1e-7)
            for rate in rates:
                rate.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.01 / 8, 0.1 / 8]


@case
def starts_alike() -> None:
    """The first copy's owners say what parameters are; buffers are those of the first rank."""
    for shards, dp in degrees():
        torch.manual_seed(dist.get_rank())
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        net[1].running_mean.fill_(dist.get_rank() + 1.0)
        shard(net, sgd(net.parameters()), Strategy(shards, dp))
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, net.state_dict())
        for other in told:
            assert all(map(torch.equal, other.values(), told[0].values())), (shards, dp)
        assert told[0]["1.running_mean"].tolist() == [1.0] * 4


@case
def exact() -> None:
    """The same bits, where sums are exact, whatever the degrees."""

    def whole(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.25)

    results = []
    for shards, dp in degrees():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).float()
        for parameter in net.parameters():
            parameter.data = torch.randint(-4, 5, parameter.shape).float()
        reference = copy.deepcopy(net)
        optimizer = shard(net, whole(net.parameters()), Strategy(shards, dp, segment_broadcast_MB=1e-5))
        rows = torch.arange(4.0 * 4).view(4, 4).float().fmod(5)
        whole_reference = whole(reference.parameters())
        (reference(rows).sum() / 4).backward()
        whole_reference.step()
        own = rows.chunk(dist.get_world_size())[dist.get_rank()]
        (net(own).sum() / len(own)).backward()
        optimizer.step()
        results.append(net.state_dict())
        assert all(map(torch.equal, results[-1].values(), reference.state_dict().values())), (shards, dp)


@case
def scales() -> None:
    """A GradScaler: all ranks skip a step in which one gradient is infinite, also a rank that owns nothing."""
    for shards, dp in degrees():
        net = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
        optimizer = shard(net, sgd(net.parameters()), Strategy(shards, dp, segment_broadcast_MB=1e-5))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step, is_right in enumerate((True, False, True)):
            before = copy.deepcopy(net.state_dict())
            factor = 1.0 if is_right or dist.get_rank() else float("inf")  # of one gradient, with one owner
            hook = net[0].weight.register_hook(lambda gradient, factor=factor: gradient * factor)
            scaler.scale(net(torch.ones(2, 4)).sum()).backward()
            hook.remove()
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            changed = any(
                not torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True)
            )
            assert changed == is_right, (shards, dp, step)
        assert scaler.get_scale() == 2.0


@case
def frees() -> None:
    """At rest a rank has what it owns; in a forward pass, two segments of others; broadcasts twice in a step."""
    world = dist.get_world_size()
    net = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(8)])
    optimizer = shard(net, adamw(net.parameters()), Strategy(world, segment_broadcast_MB=16 * 16 * 8 / 2**20))
    memory = optimizer._parts.gathering.memory
    most = []
    for layer in net:
        layer.register_forward_hook(lambda *_: most.append(len(memory.resident())))
    net(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    size, others = 16 * 16 * 8, 8 - sum(optimizer.owns(one) for one in net.parameters())
    assert max(most) == (2 if world > 1 else 0), f"this segment and the next one: {most}"
    tally = tally_memory(net, optimizer)
    placeholder = 8 if others else 0
    assert tally.parameters == (8 - others) * size + placeholder, tally
    assert tally.gradients == (8 - others) * size, tally
    assert tally.states == 2 * (8 - others) * size, tally
    # In the backward pass, the last layer is still there, and the first one's weight is not needed.
    assert memory.broadcast_bytes == (8 + 6) * size * (world > 1), memory.broadcast_bytes
    assert whole_owner_bytes([256] * 8, world)[dist.get_rank()] * 2 == tally.total - placeholder
    assert not memory.resident()
    with torch.no_grad():
        net(torch.ones(2, 16))
    assert not memory.resident()


@case
def fills_memory_as_zero_says() -> None:
    """FSDP2 with bfloat16: the bytes of ZeRO-1, 2 and 3, where gradients are whole, where parameters are, and where
    neither is. Copies do not matter."""
    count = 4 * 64 * 64
    for (shards, dp), reduced in itertools.product(degrees(), (torch.bfloat16, torch.float32)):
        mesh = init_device_mesh("cpu", (dp, shards), mesh_dim_names=("dp", "sharding"))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
        net = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)]).float()
        for layer in (*net, net):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        optimizer = adamw(net.parameters())

        def backward(net: Any = net, optimizer: Any = optimizer) -> int:
            net(torch.ones(2, 64).float()).float().sum().backward()
            return tally_memory(net, optimizer).total

        backward()
        optimizer.step()
        assert tally_memory(net, optimizer).total == state_bytes(count, shards, 3), (shards, dp)
        # Float32 values of its part are there beside the bfloat16 values of all: 2Ψ. FSDP2's reduced gradients are of
        # float32, ZeRO's of 16 bits: 2Ψ/N.
        net.set_reshard_after_backward(False)
        assert backward() == state_bytes(count, shards, 2) + 2 * count // shards, (shards, dp)
        optimizer.zero_grad()
        if reduced is torch.bfloat16:
            net.set_requires_gradient_sync(False)
            assert backward() == state_bytes(count, shards, 1), (shards, dp)


@case
def divides_saved_inputs() -> None:
    """Each tensor-parallel rank saves 1/t of an input, and gradients are the same."""
    world, own = dist.get_world_size(), dist.get_rank()
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(world * 4, 8, generator=generator).requires_grad_()
    group = dist.group.WORLD
    nbytes = x.nbytes // world
    arena = bps.sharding.TensorArena(nbytes, torch.device("cpu"))
    kept: list[int] = []
    torch.manual_seed(7)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        result = partitioned_checkpoint(layer, x, group=group, arena=arena)
    assert not kept, "autograd keeps nothing itself"
    assert arena.used_bytes == nbytes, (arena.used_bytes, nbytes)
    raises(UsageError, "has 0 left", lambda: partitioned_checkpoint(layer, x, group=group, arena=arena))
    result.square().sum().backward()
    assert arena.used_bytes == 0
    assert x.grad is not None
    found = [x.grad.clone(), *[one.grad.clone() for one in layer.parameters() if one.grad is not None]]
    x.grad = None
    layer.zero_grad()
    torch.manual_seed(7)
    layer(x).square().sum().backward()
    expected = [x.grad, *[one.grad for one in layer.parameters()]]
    assert all(map(torch.equal, found, expected)), own
    uneven = torch.ones(5, 8).requires_grad_()
    partitioned_checkpoint(layer, uneven, group=group).sum().backward()


@case
def refused() -> None:
    world, own = dist.get_world_size(), dist.get_rank()
    strategy = Strategy(world, segment_broadcast_MB=SMALL_MB)
    net = new_model()
    raises(UsageError, f"but there are {world} ranks", lambda: shard(net, sgd(net.parameters()), Strategy(world + 1)))
    raises(UsageError, "the model does not have", lambda: shard(net, sgd([nn.Parameter(torch.ones(2))]), strategy))
    raises(UsageError, "LBFGS", lambda: shard(net, torch.optim.LBFGS(net.parameters()), strategy))
    if world > 1:
        raises(
            MismatchError,
            "different strategies",
            lambda: shard(net, sgd(net.parameters()), Strategy(world, gradient_merge_acc_step=1 + own)),
        )
        other = nn.Linear(2, 2 + own)
        raises(MismatchError, "different models", lambda: shard(other, sgd(other.parameters()), strategy))
    optimizer = shard(net, sgd(net.parameters()), strategy)
    raises(UsageError, "already sharded, with SGD", lambda: shard(net, adamw(net.parameters()), strategy))
    raises(UsageError, "no closure", lambda: optimizer.step(lambda: 0.0))
    raises(
        UsageError, "no more parameters", lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    )
    rows = micro_batches(0, 1)[0]
    loss_of(net, rows).backward()
    raises(GradientOrderError, "there were 1 backward passes of 1", lambda: loss_of(net, rows).backward())
    optimizer.zero_grad()
    before = copy.deepcopy(net.state_dict())
    loss = loss_of(net, rows)
    loss_of(net, rows).backward()
    optimizer.step()
    raises(GradientOrderError, "call backward() before step()", loss.backward)
    optimizer.zero_grad()
    net.load_state_dict(before)
    loss_of(net, rows).backward()
    net.extra = nn.Parameter(torch.ones(2))
    raises(UsageError, "the model has got the parameter extra", lambda: net(rows))
    del net.extra
    net.first.weight.data = torch.ones(3, 3)
    raises(UsageError, "first.weight had the shape (16, 6)", optimizer.step)
    dist.barrier()


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    os.environ.setdefault("TEST_BACKEND", "byteps")
    run(sys.argv[1:])
