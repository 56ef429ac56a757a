"""AsyncOptimizer on one rank, and what it refuses. tests/jobs/test_async_training.py has several machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import byteps_py.torch as bps
from byteps_py.errors import NonFiniteError, UsageError


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    bps.init()
    yield
    bps.shutdown()


def sgd(model: torch.nn.Module, **options: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def test_one_rank_steps_as_its_optimizer_does() -> None:
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain, wrapped = sgd(models[0], momentum=0.9), bps.AsyncOptimizer(sgd(models[1], momentum=0.9))
    schedule = torch.optim.lr_scheduler.StepLR(wrapped, 2)
    other = torch.optim.lr_scheduler.StepLR(plain, 2)
    for _ in range(4):
        for model, optimizer, scheduler in zip(models, (plain, wrapped), (other, schedule), strict=True):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            assert optimizer.step(None) is None
            scheduler.step()
    assert isinstance(wrapped, torch.optim.SGD)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"staleness": 0}, "staleness is a whole number of at least 1, not 0"),
        ({"every": 1.5}, "every is a whole number of at least 1, not 1.5"),
        ({"every": True}, "every is a whole number of at least 1, not True"),
        ({"compensation": -1.0}, "compensation is a number of at least 0, not -1.0"),
        ({"compensation": float("nan")}, "compensation is a number of at least 0, not nan"),
        ({"compensation": 0.1, "every": 2}, "there are every=2 from one exchange to the next"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        bps.AsyncOptimizer(sgd(torch.nn.Linear(2, 1)), **options)


def test_compensation_needs_learning_rates() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    del optimizer.param_groups[0]["lr"]
    with pytest.raises(UsageError, match="compensation needs an optimizer whose param_groups have lr"):
        bps.AsyncOptimizer(optimizer, compensation=0.1)


@pytest.mark.parametrize("hosted", [False, True])
def test_optimizers_that_average_already(hosted: bool) -> None:
    model = torch.nn.Linear(2, 1)
    averaging = bps.DistributedOptimizer(sgd(model), model.named_parameters(), hosted=hosted)
    with pytest.raises(UsageError, match="averages gradients, or is hosted, already"):
        bps.AsyncOptimizer(averaging)


def test_what_it_does_not_do() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = bps.AsyncOptimizer(sgd(model), model.named_parameters())
    with pytest.raises(UsageError, match="gradients stay the rank's own"), optimizer.skip_synchronize():
        pass
    optimizer.synchronize()  # no effect
    with pytest.raises(UsageError, match=r"an AsyncOptimizer .* has none"):
        bps.CrossBarrier(model, optimizer)
    with pytest.raises(UsageError, match="can't be copied or pickled"):
        optimizer.__reduce_ex__(4)
    with pytest.raises(UsageError, match="the inner optimizer is an AsyncOptimizer"):
        bps.local.DiLoCo(model, optimizer, every=2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compression": bps.Compression.fp16}, "compression="),
        ({"op": bps.Adasum}, "op=Adasum"),
        ({"hosted": True}, "hosted="),
        ({"shadow": True}, "shadow=True or BYTEPS_SHADOW=1"),
    ],
)
def test_what_does_not_go_with_the_variable(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], text: str
) -> None:
    bps.shutdown()
    monkeypatch.setenv("BYTEPS_ENABLE_ASYNC", "1")
    bps.init()
    model = torch.nn.Linear(2, 1)
    with pytest.raises(UsageError, match=f"does not go with {text}"):
        bps.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
    assert isinstance(bps.DistributedOptimizer(sgd(model), model.named_parameters()), torch.optim.SGD)


@pytest.mark.parametrize("mode", ["raise", "skip"])
def test_a_step_with_nan_is_not_made(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    bps.shutdown()
    monkeypatch.setenv("BYTEPS_NONFINITE", mode)
    bps.init()
    model = torch.nn.Linear(2, 1)
    optimizer = bps.AsyncOptimizer(sgd(model, momentum=0.9), model.named_parameters())
    before = [param.detach().clone() for param in model.parameters()]

    def closure() -> float:
        model.bias.grad, model.weight.grad = torch.full((1,), float("inf")), torch.ones(1, 2)
        return 3.0

    if mode == "raise":
        with pytest.raises(NonFiniteError, match="from rank 0, step 1: in the gradients of 'bias'"):
            optimizer.step(closure)
    else:
        assert optimizer.step(closure) == 3.0
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
