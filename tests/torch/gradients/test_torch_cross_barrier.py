"""CrossBarrier ends bit for bit like the DistributedOptimizer that it wraps, whatever happens between steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clusters import bpslaunch
from support.threaded import ThreadedCluster
from torch import nn
from torch_training import (
    Net,
    assert_equal,
    assert_same,
    loss_of,
    reference,
    run_steps,
    sgd,
    state_of,
    wrap,
    wrap_and_cross,
)

import byteps_py.torch as bps
from byteps_py.tensors import PRIORITY_READY_ORDER

MACHINES = (2, 2)
STEPS = 4
PROGRAM = Path(__file__).parents[2] / "programs" / "cross_barrier.py"
SMALL_BUCKETS = 600  # bytes: several buckets, fused and single


def two_groups(params):
    params = list(params)
    return torch.optim.SGD([{"params": params[::2]}, {"params": params[1::2], "lr": 0.02}], lr=0.1, momentum=0.9)


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as some optimizers do, and uses the count."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["weight_decay"] = 0.01 * group["count"]
        return super().step(closure)


OPTIMIZERS = {
    "sgd": sgd,
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "tensor-lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01)),
    "groups": two_groups,
    "counting": lambda params: Counting(params, lr=0.1, momentum=0.9),
}


def zero_nothing(model: nn.Module, optimizer: Any) -> None:
    pass


ZEROING = {
    "optimizer-none": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer-zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model-none": lambda model, optimizer: model.zero_grad(),
    "model-zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "not-at-all": zero_nothing,
}


def train(crossing: bool, make=sgd, zero: Callable[[nn.Module, Any], None] = ZEROING["optimizer-none"], **options):
    """A rank's training, with what commonly surrounds it; returns all that should be equal."""
    passes = options.get("backward_passes_per_step", 1)

    def main(rank: int):
        model = Net()
        optimizer = (wrap_and_cross if crossing else wrap)(model, make, **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(STEPS):
            for batch in range(step * passes, (step + 1) * passes):
                loss_of(model, rank, batch).backward()
            optimizer.step()
            scheduler.step()
            zero(model, optimizer)
        state = state_of(model)
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        return state, gradients, optimizer.state_dict()

    return main


def compare(machines=MACHINES, fusion_bytes: int = SMALL_BUCKETS, shared_memory: bool = False, **how: Any) -> None:
    crossed, plain = (
        ThreadedCluster(machines, shared_memory, fusion_bytes=fusion_bytes).run(train(crossing, **how))
        for crossing in (True, False)
    )
    assert_equal(crossed, plain)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("fusion_bytes", [0, SMALL_BUCKETS])
def test_the_same_bits_with_every_optimizer(make, fusion_bytes) -> None:
    compare(make=make, fusion_bytes=fusion_bytes)


@pytest.mark.parametrize("zero", ZEROING.values(), ids=ZEROING)
@pytest.mark.parametrize("shared_memory", [True, False])
def test_gradients_are_zeroed_or_kept_as_told_while_under_way(zero, shared_memory) -> None:
    compare(zero=zero, shared_memory=shared_memory)


@pytest.mark.parametrize("options", [{"backward_passes_per_step": 3}, {"compression": bps.Compression.bf16}])
@pytest.mark.parametrize("zero", [ZEROING["optimizer-none"], ZEROING["model-zero"]])
def test_accumulation_and_compression(options, zero) -> None:
    compare(zero=zero, **options)


def test_one_rank() -> None:
    compare(machines=(1,))


def test_the_same_bits_as_the_contract() -> None:
    def main(rank: int):
        model = Net()
        optimizer = wrap_and_cross(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        return state_of(model)

    assert_same(ThreadedCluster(MACHINES, fusion_bytes=SMALL_BUCKETS).run(main), reference(sgd, STEPS, MACHINES))


def test_a_layer_waits_for_its_own_gradients_only() -> None:
    def main(rank: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = wrap_and_cross(model)
        x = torch.ones(1, 4)
        model(x).sum().backward()
        optimizer.step()
        assert all(p.grad.isnan().all() for p in model.parameters())
        before = model[1].weight.clone()
        model[0](x)
        assert not model[0].weight.grad.isnan().any()
        assert model[1].weight.grad.isnan().all()
        assert torch.equal(model[1].weight, before)
        model[1](x)
        assert not torch.equal(model[1].weight, before)

    ThreadedCluster((1, 1), fusion_bytes=0).run(main)


def rounds_of(crossing_at: int) -> list[tuple[str, int]]:
    """(gradient, priority) of 4 steps, the optimizer wrapped before one of them."""

    def main(rank: int) -> None:
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        optimizer = wrap(model)
        for step in range(4):
            if step == crossing_at:
                optimizer = bps.CrossBarrier(model, optimizer)
            loss = model(torch.full((1, 4), rank + step + 1.0)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    cluster = ThreadedCluster((1, 1), fusion_bytes=0)
    cluster.run(main)
    rounds = [(name, priority) for name, priority in cluster.rounds if name.startswith("Gradient.")]
    assert len(rounds) == 16
    return rounds


def test_gradients_have_priorities_only_where_layers_wait_one_by_one() -> None:
    assert {priority for _, priority in rounds_of(crossing_at=4)} == {PRIORITY_READY_ORDER}
    names = ["Gradient.0.weight", "Gradient.0.bias", "Gradient.1.weight", "Gradient.1.bias"]
    assert set(rounds_of(crossing_at=0)) == {(name, -number) for number, name in enumerate(names)}


def test_front_layers_are_most_urgent() -> None:
    cluster = ThreadedCluster((1, 1), fusion_bytes=0)

    def main(rank: int) -> None:
        model = Net()
        optimizer = wrap_and_cross(model)
        loss_of(model, 1, 0).backward()
        optimizer.step()
        optimizer.finish_updates()

    cluster.run(main)
    order = [name for name, _ in sorted(cluster.rounds, key=lambda item: -item[1])]
    assert order == [f"Gradient.{name}" for name, _ in Net().named_parameters()]


def test_who_wraps_after_steps_is_told_that_there_are_no_priorities() -> None:
    with pytest.warns(UserWarning, match=r"made steps already.*Wrap it before the first step"):
        rounds = rounds_of(crossing_at=2)
    assert {priority for _, priority in rounds} == {PRIORITY_READY_ORDER}


def test_step_returns_although_another_rank_is_not_there_yet() -> None:
    def main(rank: int) -> None:
        model = Net()
        optimizer = wrap_and_cross(model)
        if rank == 1:
            bps.barrier()
        loss_of(model, rank, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            bps.barrier()  # only now rank 1 begins
        optimizer.finish_updates()

    ThreadedCluster((1, 1)).run(main)


def test_step_hooks_see_the_new_weights() -> None:
    def main(rank: int) -> list[bool]:
        model = Net()
        optimizer = wrap_and_cross(model)
        seen = []
        before = model.first.weight.clone()
        optimizer.register_step_post_hook(lambda *_: seen.append(torch.equal(model.first.weight, before)))
        run_steps(model, optimizer, rank, range(1))
        return seen

    assert ThreadedCluster((1, 1)).run(main) == [[False]] * 2


class Tied(nn.Module):
    """A tied weight, a layer called twice, attention (which uses a child's weights), and parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embedding = nn.Embedding(7, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.scales = nn.ParameterList([torch.ones(8), torch.ones(8)])
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x, _ = self.attention(x, x, x)
        for scale in self.scales:
            x = torch.tanh(self.layer(x) * scale)
        return self.head(x)


def test_shared_parameters_and_modules_called_twice() -> None:
    def main(crossing: bool):
        def rank_main(rank: int):
            model = Tied()
            optimizer = (wrap_and_cross if crossing else wrap)(model)
            for step in range(STEPS):
                tokens = torch.randint(0, 7, (2, 3), generator=torch.Generator().manual_seed(10 * step + rank))
                model(tokens).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return state_of(model)

        return rank_main

    crossed, plain = (ThreadedCluster((1, 1), fusion_bytes=0).run(main(crossing)) for crossing in (True, False))
    assert_equal(crossed, plain)


class Sideways(nn.Module):
    """Uses a child's weight without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.child.weight)


def test_a_stale_weight_is_an_error_unless_declared() -> None:
    def main(rank: int) -> None:
        x = torch.ones(1, 2)
        model = Sideways()
        optimizer = wrap_and_cross(model)
        model(x).sum().backward()
        optimizer.step()
        with pytest.raises(bps.GradientOrderError, match=r"'child\.weight' was used while its update was pending"):
            model(x).sum().backward()
        optimizer.finish_updates()
        other = Sideways()
        whole = bps.CrossBarrier(other, wrap(other), whole=[other])
        for _ in range(2):
            other(x).sum().backward()
            whole.step()
            whole.zero_grad()

    ThreadedCluster((1, 1)).run(main)


def test_parameters_outside_the_model_are_updated_in_step() -> None:
    def main(rank: int) -> None:
        model, scale = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
        named = [*model.named_parameters(), ("scale", scale)]
        optimizer = torch.optim.SGD([param for _, param in named], lr=1.0)
        optimizer = bps.CrossBarrier(model, bps.DistributedOptimizer(optimizer, named))
        (model(torch.ones(1, 2)).sum().detach() * 0 + scale * (1 + rank)).sum().backward()
        optimizer.step()
        assert scale.item() == -0.5

    ThreadedCluster((1, 1), fusion_bytes=0).run(main)


def test_misuse() -> None:
    def main(rank: int) -> None:
        model = Net()
        plain = sgd(model.parameters())
        optimizer = bps.CrossBarrier(model, bps.DistributedOptimizer(plain, model.named_parameters()))
        with pytest.raises(ValueError, match="CrossBarrier already"):
            bps.CrossBarrier(model, optimizer)
        with pytest.raises(ValueError, match="closure"):
            optimizer.step(lambda: 0.0)
        loss_of(model, rank, 0).backward()
        with pytest.raises(bps.GradientOrderError, match=r"before optimizer\.step"):
            optimizer.zero_grad()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(bps.GradientOrderError, match="changed after backward"):
            optimizer.step()
        optimizer.zero_grad()
        run_steps(model, optimizer, rank, range(2))  # and it goes on

    ThreadedCluster((1, 1)).run(main)


def test_a_lost_peer_is_an_error_of_the_layer_that_waits() -> None:
    cluster = ThreadedCluster((1, 1))

    def main(rank: int) -> None:
        model = Net()
        optimizer = wrap_and_cross(model)
        if rank == 1:
            return
        loss_of(model, rank, 0).backward()
        optimizer.step()
        cluster.fail(bps.PeerLostError("rank 1 is gone"))
        with pytest.raises(bps.PeerLostError, match="rank 1 is gone"):
            model.first(torch.ones(1, 12))

    cluster.run(main)


def test_a_disagreement_is_told_and_the_names_are_free_again() -> None:
    def main(rank: int):
        wrong = nn.Sequential(nn.Linear(2, 2 + rank), nn.Linear(2 + rank, 1))
        optimizer = wrap_and_cross(wrong)
        wrong(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with pytest.raises(bps.MismatchError, match=r"rank 0 gave .*rank 1 gave"):
            wrong(torch.ones(1, 2))
        model = Net()
        run_steps(model, wrap_and_cross(model), rank, range(STEPS))
        return state_of(model)

    assert_same(ThreadedCluster((1, 1)).run(main), reference(sgd, STEPS, (1, 1)))


def test_shutdown_finishes_what_is_pending() -> None:
    def main(rank: int):
        model = Net()
        optimizer = wrap_and_cross(model)
        run_steps(model, optimizer, rank, range(STEPS))
        bps.shutdown()
        return {name: param.detach().clone() for name, param in model.named_parameters()}

    assert_same(ThreadedCluster(MACHINES).run(main), reference(sgd, STEPS, MACHINES))


@pytest.mark.parametrize(
    ("options", "ranks"),
    [pytest.param(["-np", "2"], 2, marks=pytest.mark.slow), (["-np", "1", "--machines", "2", "--servers", "1"], 2)],
    ids=str,
)
def test_with_processes(options, ranks) -> None:
    run = bpslaunch(options, [PROGRAM], BYTEPS_PARTITION_BYTES=str(256 << 10))
    assert (run.returncode, run.stdout) == (0, f"{ranks} ranks, equal weights\n"), run.stdout + run.stderr
