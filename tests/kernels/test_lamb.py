"""bps.optim.LAMB beside its formula, and the square sums on which its bits do not depend."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

import byteps_py as bps
from byteps_py.kernels.optimizer_steps import StepSegment, run_segments
from byteps_py.kernels.update_rules import (
    Decay,
    Hyperparameters,
    Method,
    StepKind,
    UpdateRule,
    apply_scalars,
    step_scalars,
)
from byteps_py.tensors import DType
from byteps_py.torch.optim import node_sums, nodes, square_sum, total


def reference(param: torch.Tensor, grads: list[torch.Tensor], lr: float, decay: float, adapts: bool) -> torch.Tensor:
    """The formula, in float64."""
    mean = square = torch.zeros_like(param)
    for step, grad in enumerate(grads, 1):
        mean = 0.9 * mean + 0.1 * grad
        square = 0.999 * square + 0.001 * grad**2
        update = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-6) + decay * param
        param = param - lr * (param.norm() / update.norm() if adapts else 1.0) * update
    return param


@pytest.mark.parametrize(("decay", "always"), [(0.1, False), (0.0, False), (0.0, True)])
def test_the_formula(decay: float, always: bool) -> None:
    torch.manual_seed(0)
    start, grads = torch.randn(37, 5, dtype=torch.float64), [torch.randn(37, 5, dtype=torch.float64) for _ in range(6)]
    param = torch.nn.Parameter(start.clone())
    optimizer = bps.optim.LAMB([param], lr=0.02, weight_decay=decay, always_adapt=always)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    expected = reference(start, grads, 0.02, decay, bool(decay or always))
    torch.testing.assert_close(param.detach(), expected, rtol=1e-12, atol=1e-12)


def test_zeros_have_no_ratio() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = bps.optim.LAMB([param], lr=0.5)
    param.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((3,), -0.5), rtol=1e-5, atol=0)


def test_schedules_and_states() -> None:
    torch.manual_seed(0)
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    first = bps.optim.LAMB(models[0].parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(first, 1, 0.5)
    for turn in range(4):
        models[0](torch.ones(1, 3)).sum().backward()
        first.step()
        schedule.step()
        if turn == 1:
            models[1].load_state_dict(models[0].state_dict())
            second = bps.optim.LAMB(models[1].parameters(), lr=1.0)
            second.load_state_dict(first.state_dict())
        first.zero_grad()
    assert first.param_groups[0]["lr"] == 0.1 / 16
    for lr in (0.025, 0.0125):
        assert second.param_groups[0]["lr"] in (0.025, 0.0125)
        second.param_groups[0]["lr"] = lr
        models[1](torch.ones(1, 3)).sum().backward()
        loss: Any = second.step(lambda: 5.0)
        assert loss == 5.0
        second.zero_grad()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize(
    "numbers", [{"lr": -1.0}, {"eps": math.nan}, {"weight_decay": -0.1}, {"betas": (0.9, 1.0)}], ids=str
)
def test_wrong_numbers(numbers: dict[str, Any]) -> None:
    with pytest.raises(bps.UsageError, match="LAMB"):
        bps.optim.LAMB([torch.nn.Parameter(torch.ones(1))], **numbers)


def test_sparse_gradients_are_refused() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = bps.optim.LAMB(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(bps.UsageError, match="sparse"):
        optimizer.step()


@pytest.mark.parametrize("count", [1, 2, 3, 1000, 65536, 65537, 200_001])
def test_square_sums_do_not_depend_on_the_partition(count: int) -> None:
    torch.manual_seed(count)
    values = torch.randn(count) * 10.0 ** torch.randint(-4, 4, (count,))
    expected = square_sum(values)
    assert math.isclose(expected, math.fsum((values.double() ** 2).tolist()), rel_tol=1e-14)
    chance = random.Random(count)
    for parts in (1, 2, 3, 7):
        cuts = sorted(chance.randint(0, count) for _ in range(parts - 1))
        found = {}
        for start, stop in zip([0, *cuts], [*cuts, count], strict=True):
            sums = node_sums(values[start:stop], start)
            assert sums.keys() == set(nodes(start, stop))
            found |= sums
        assert total(found, count) == expected


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT64])
@pytest.mark.parametrize("beta1", [0.9, 0.3])
def test_the_kernel_has_the_same_bits(dtype: DType, beta1: float, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    monkeypatch.setattr(torch.Tensor, "sqrt", lambda self: torch.from_numpy(np.sqrt(self.numpy())))
    torch.manual_seed(0)
    given = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT64: torch.float64}[dtype]
    wide = torch.float64 if dtype is DType.FLOAT64 else torch.float32
    start = torch.randn(1003, dtype=wide)
    param = torch.nn.Parameter(start.clone())
    optimizer = bps.optim.LAMB([param], lr=0.01, betas=(beta1, 0.99), weight_decay=0.1)
    numbers = Hyperparameters(lr=0.01, beta1=beta1, beta2=0.99, eps=1e-6, weight_decay=0.1)
    rule = UpdateRule(Method.LAMB, Decay.COUPLED, is_mostly_new=beta1 <= 0.5)
    kind = StepKind(rule, dtype, dtype)
    states = [start.clone(), *(torch.zeros(1003, dtype=wide) for _ in range(3))]
    source, target = torch.empty(1003, dtype=given), torch.empty(1003, dtype=given)

    def run(scalars: tuple[float, ...]) -> None:
        segments = [StepSegment(range(400), scalars), StepSegment(range(400, 1003), scalars)]
        run_segments(kind, [state.data_ptr() for state in states], source.data_ptr(), target.data_ptr(), segments)

    for step in range(1, 21):
        source.copy_(torch.randn(1003))
        param.grad = source.to(wide)
        optimizer.step()
        run(step_scalars(rule, numbers, step))
        ratio = math.sqrt(square_sum(states[0])) / math.sqrt(square_sum(states[3]))
        run(apply_scalars(0.01 * ratio))
        assert torch.equal(states[0], param.detach()), step
        assert torch.equal(target, param.detach().to(given))
    for state, name in zip(states[1:3], ("exp_avg", "exp_avg_sq"), strict=True):
        assert torch.equal(state, optimizer.state[param][name])
