"""DistributedOptimizer(op=Adasum): steps of the ranks' own, whose changes are combined."""

from __future__ import annotations

import copy

import pytest
import torch
from support.threaded import ThreadedCluster
from test_adasum import definition
from torch import nn
from torch_training import Net, assert_same, loss_of, state_of, wrap

import byteps_py.torch as bps

MACHINES = (2, 1)
STEPS = 3


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


def expected(make, ranks: int = 3, passes: int = 1, clip: bool = False) -> dict[str, torch.Tensor]:
    """Every rank's optimizer by itself, on weights that are combined after each step."""
    models = [Net() for _ in range(ranks)]
    optimizers = [make(model.parameters()) for model in models]
    for step in range(STEPS):
        starts = [p.detach().clone() for p in models[0].parameters()]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.zero_grad()
            for batch in range(step * passes, (step + 1) * passes):
                loss_of(model, rank, batch).backward()
            for param in model.parameters():
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        with torch.no_grad():
            for params, start in zip(zip(*(m.parameters() for m in models), strict=True), starts, strict=True):
                delta = definition([param - start for param in params]).float()
                for param in params:
                    param.copy_(start + delta)
    return state_of(models[0])


def train(make, passes: int = 1, clip: bool = False, **options):
    def main(rank: int):
        model = Net()
        optimizer = wrap(model, make, op=bps.Adasum, backward_passes_per_step=passes, **options)
        assert isinstance(optimizer, type(make(model.parameters())))
        for step in range(STEPS):
            for batch in range(step * passes, (step + 1) * passes):
                loss_of(model, rank, batch).backward()
            if clip:
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    return main


def assert_close(states, reference, atol=1e-6) -> None:
    assert_same(states, states[0])
    for name, value in reference.items():
        torch.testing.assert_close(states[0][name], value, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("make", [momentum, adam])
@pytest.mark.parametrize("passes", [1, 2])
def test_training(make, passes) -> None:
    assert_close(ThreadedCluster(MACHINES).run(train(make, passes)), expected(make, passes=passes))


def test_gradients_may_be_clipped() -> None:
    assert_close(ThreadedCluster(MACHINES).run(train(momentum, clip=True)), expected(momentum, clip=True))


def test_compression() -> None:
    states = ThreadedCluster(MACHINES).run(train(momentum, compression=bps.Compression.fp16))
    assert_close(states, expected(momentum), atol=2e-3)


def test_a_job_of_one_steps_as_ever() -> None:
    (state,) = ThreadedCluster((1,)).run(train(momentum))
    model = Net()
    optimizer = momentum(model.parameters())
    for step in range(STEPS):
        loss_of(model, 0, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same([state], state_of(model))


def test_a_process_set() -> None:
    def main(rank: int):
        pair = bps.add_process_set([0, 1])
        return train(momentum, process_set=pair)(rank)

    *pair, outside = ThreadedCluster(MACHINES).run(main)
    assert_close(pair, expected(momentum, ranks=2))
    assert not torch.equal(outside["first.weight"], pair[0]["first.weight"])


def test_order_of_calls() -> None:
    def main(rank: int) -> None:
        model = nn.Linear(1, 1)
        bps.broadcast_parameters(model.state_dict(), 0)
        optimizer = wrap(model, op=bps.Adasum)
        with pytest.raises(bps.UsageError, match="CrossBarrier can't overlap Adasum"):
            bps.CrossBarrier(model, optimizer)
        with pytest.raises(ValueError, match="gradient_predivide_factor not supported with op != Average"):
            wrap(model, op=bps.Adasum, gradient_predivide_factor=2.0)
        with pytest.raises(AssertionError, match="Skipping synchronization is not supported"):
            optimizer.skip_synchronize().__enter__()
        model(torch.ones(1, 1)).sum().backward()
        with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after loss.backward\(\)"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
            model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(1, 1)).sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).requires_grad
        optimizer.zero_grad()

        # Only some parameters, and those of a group that comes later.
        model.bias.requires_grad_(False)
        late = nn.Linear(1, 1)
        nn.init.ones_(late.weight)
        optimizer.add_param_group({"params": [late.weight]})
        bias = model.bias.clone()
        late(model(torch.ones(1, 1))).sum().backward()
        optimizer.step()
        assert torch.equal(model.bias, bias)
        assert not torch.equal(late.weight, torch.ones(1, 1))

    ThreadedCluster((1, 1)).run(main)


def test_a_failure_leaves_the_weights_as_they_were() -> None:
    cluster = ThreadedCluster((1, 1))

    def main(rank: int) -> None:
        model = Net()
        before = state_of(model)
        optimizer = wrap(model, op=bps.Adasum)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        copy.deepcopy(optimizer.state_dict())
        loss_of(model, rank, 0).backward()
        if rank == 0:
            cluster.fail(bps.PeerLostError("rank 1 is gone"))
        with pytest.raises(bps.PeerLostError, match="rank 1 is gone"):
            optimizer.step()
        assert_same([state_of(model)], before)
        scheduler.optimizer.zero_grad()

    cluster.run(main)
