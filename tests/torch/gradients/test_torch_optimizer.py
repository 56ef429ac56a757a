"""DistributedOptimizer on four ranks ends bit for bit like one process that averages by the contract."""

from __future__ import annotations

import copy

import pytest
import torch
from support.threaded import ThreadedCluster, contract
from torch import nn
from torch_training import MakeOptimizer, Net, assert_same, loss_of, reference, sgd, state_of, wrap

import byteps_py.torch as bps
from byteps_py.tensors import PRIORITY_READY_ORDER
from byteps_py.torch.collectives.context import current

MACHINES = (2, 2)
STEPS = 4
SMALL_BUCKETS = 600  # bytes: several buckets, fused and single


def train(make: MakeOptimizer = sgd, set_to_none: bool = True, before_step=lambda model: None, **options):
    def main(rank: int):
        model = Net()
        optimizer = wrap(model, make, **options)
        passes = options.get("backward_passes_per_step", 1)
        for step in range(STEPS):
            for batch in range(step * passes, (step + 1) * passes):
                loss_of(model, rank, batch).backward()
            optimizer.synchronize()
            before_step(model)
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return state_of(model)

    return main


OPTIMIZERS = [
    sgd,
    lambda params: torch.optim.Adam(params, lr=0.01),
    lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    lambda params: torch.optim.RMSprop(params, lr=0.01),
    lambda params: torch.optim.Adagrad(params, lr=0.05),
]


@pytest.mark.parametrize("make", OPTIMIZERS, ids=["sgd", "adam", "adamw", "rmsprop", "adagrad"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_is_exact(make, set_to_none) -> None:
    states = ThreadedCluster(MACHINES, fusion_bytes=SMALL_BUCKETS).run(train(make, set_to_none))
    assert_same(states, reference(make, STEPS, MACHINES))


@pytest.mark.parametrize("fusion_bytes", [0, 100, 1 << 20])
@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_fusion_and_memory_change_nothing(fusion_bytes, shared_memory, set_to_none) -> None:
    cluster = ThreadedCluster((3, 1), shared_memory, fusion_bytes=fusion_bytes)
    assert_same(cluster.run(train(set_to_none=set_to_none)), reference(sgd, STEPS, (3, 1)))


@pytest.mark.parametrize(
    ("compression", "wire"), [(bps.Compression.fp16, torch.float16), (bps.Compression.bf16, torch.bfloat16)]
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_compression_rounds_on_the_wire_only(compression, wire, set_to_none) -> None:
    cluster = ThreadedCluster(MACHINES, fusion_bytes=SMALL_BUCKETS)
    states = cluster.run(train(set_to_none=set_to_none, compression=compression))
    assert_same(states, reference(sgd, STEPS, MACHINES, wire=wire))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_passes_are_summed_before_ranks_are_averaged(set_to_none) -> None:
    cluster = ThreadedCluster(MACHINES)
    states = cluster.run(train(set_to_none=set_to_none, backward_passes_per_step=3))
    assert_same(states, reference(sgd, STEPS, MACHINES, passes=3))


def test_clipping_between_synchronize_and_step() -> None:
    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    assert_same(
        ThreadedCluster(MACHINES).run(train(before_step=clip)), reference(sgd, STEPS, MACHINES, before_step=clip)
    )


@pytest.mark.filterwarnings("ignore:optimizer.step.. called without")
def test_step_synchronizes_and_closures_too() -> None:
    def plain(rank: int):
        model = Net()
        optimizer = wrap(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if step % 2:
                optimizer.synchronize()  # step() then does not reduce a second time
            optimizer.step()
        return state_of(model)

    def closures(rank: int):
        model = Net()
        optimizer = wrap(model)
        for step in range(STEPS):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, rank, step)
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0
        return state_of(model)

    expected = reference(sgd, STEPS, MACHINES)
    assert_same(ThreadedCluster(MACHINES).run(plain), expected)
    assert_same(ThreadedCluster(MACHINES).run(closures), expected)


def test_lbfgs_with_an_averaged_loss_keeps_ranks_equal() -> None:
    def main(rank: int):
        model = Net()
        optimizer = wrap(model, lambda params: torch.optim.LBFGS(params, max_iter=4, line_search_fn="strong_wolfe"))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rank, 0)
            loss.backward()
            return bps.push_pull(loss.detach())

        before = closure()
        optimizer.synchronize()
        optimizer.step(closure)
        assert bps.push_pull(loss_of(model, rank, 0).detach()) < before
        return state_of(model)

    first, *others = ThreadedCluster(MACHINES).run(main)
    assert_same(others, first)


def test_gradients_leave_during_backward() -> None:
    cluster = ThreadedCluster((1, 1), fusion_bytes=0)

    def main(rank: int) -> None:
        model = Net()
        optimizer = wrap(model)
        loss_of(model, 1, 0).backward()
        current().session.barrier()
        if rank == 0:  # before any synchronize: all that the backward pass reached is through
            assert {name for name, _ in cluster.rounds} == {
                f"Gradient.{name}" for name, _ in model.named_parameters() if "never" not in name
            }
        optimizer.step()

    cluster.run(main)
    names = [f"Gradient.{name}" for name, _ in Net().named_parameters()]
    assert sorted(cluster.rounds) == sorted((name, PRIORITY_READY_ORDER) for name in names)


def test_all_gradients_are_declared_in_one_call() -> None:
    """And the comparison of plans in another one."""

    def main(rank: int) -> int:
        model = Net()
        optimizer = wrap(model)
        for step in range(2):
            loss_of(model, 1, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return current().session.declarations

    assert ThreadedCluster((1, 1), fusion_bytes=200).run(main) == [2, 2]


def test_gradient_is_a_view_of_the_result_until_the_next_round() -> None:
    def main(rank: int) -> None:
        model = nn.Linear(3, 2)
        optimizer = wrap(model)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.synchronize()
        first = model.weight.grad
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.synchronize()
        assert model.weight.grad is first
        bps.shutdown()
        assert torch.equal(model.weight.grad, torch.ones(2, 3))

    ThreadedCluster((1, 1)).run(main)


def test_channels_last_and_mixed_dtypes() -> None:
    conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    template = nn.ModuleList([conv, nn.Linear(6, 2).double(), nn.Linear(2, 2).bfloat16()])

    def loss(model: nn.ModuleList, rank: int) -> torch.Tensor:
        x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(rank))
        y = model[0](x.to(memory_format=torch.channels_last)).mean((2, 3)).double()
        return model[2](model[1](y).bfloat16()).float().square().sum()

    def main(rank: int):
        model = copy.deepcopy(template)
        optimizer = wrap(model)
        loss(model, rank).backward()
        optimizer.synchronize()
        return [p.grad.clone() for p in model.parameters()]

    def alone(rank: int):
        model = copy.deepcopy(template)
        loss(model, rank).backward()
        return [p.grad for p in model.parameters()]

    parts = [alone(rank) for rank in range(3)]
    expected = [contract(p, (2, 1), average=True) for p in zip(*parts, strict=True)]
    for found in ThreadedCluster((2, 1)).run(main):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
