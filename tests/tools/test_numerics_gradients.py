"""Float32Gradients in one process, and measured errors of accumulation. Ranks: programs/numerics.py."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest
import torch
from torch import nn

from byteps_py.cli.__main__ import main
from byteps_py.errors import UsageError
from byteps_py.tools.numerics import Float32Gradients, accumulation_errors

MICRO_BATCHES = 24


def perceptron(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(dtype)


def backward(model: nn.Module, number: int) -> None:
    rng = torch.Generator().manual_seed(number)
    dtype = next(model.parameters()).dtype
    model(torch.randn(4, 16, generator=rng).to(dtype)).float().square().mean().backward()


def terms(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """The gradient of each micro-batch alone."""
    found = []
    for number in range(MICRO_BATCHES):
        model.zero_grad()
        backward(model, number)
        found.append({name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None})
    model.zero_grad()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_buffers_are_the_float32_sum_bit_for_bit(dtype: torch.dtype) -> None:
    model = perceptron(dtype)
    alone = terms(model)
    with Float32Gradients(model) as gradients:
        for number in range(MICRO_BATCHES):
            backward(model, number)
            assert all(parameter.grad is None for parameter in model.parameters())
        found = gradients.gradients()
    plain = perceptron(dtype)
    for number in range(MICRO_BATCHES):
        backward(plain, number)
    for name, parameter in plain.named_parameters():
        expected = alone[0][name].float()
        for term in alone[1:]:
            expected += term[name].float()
        assert torch.equal(found[name], expected), name
        exact = sum(term[name].double() for term in alone)
        errors = [(each.double() - exact).norm() for each in (found[name], parameter.grad)]
        assert errors[0] * 100 < errors[1], (name, errors)


def test_float32_models_and_the_switch_change_nothing() -> None:
    for dtype, enabled in ((torch.float32, True), (torch.bfloat16, False)):
        model, plain = perceptron(dtype), perceptron(dtype)
        gradients = Float32Gradients(model, enabled=enabled)
        for number in range(3):
            backward(model, number)
            backward(plain, number)
        gradients.write_back()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)
        gradients.close()


def test_the_optimizer_gets_the_sum_rounded_once() -> None:
    model, plain = perceptron(), perceptron()
    alone = terms(plain)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain)]
    with Float32Gradients(model) as gradients:
        for number in range(MICRO_BATCHES):
            backward(model, number)
        with gradients.for_step():
            optimizers[0].step()
        assert gradients.gradients() == {}
        for name, parameter in plain.named_parameters():
            total = alone[0][name].float()
            for term in alone[1:]:
                total += term[name].float()
            parameter.grad = total.bfloat16()
        optimizers[1].step()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other)
            assert one.grad is None
        backward(model, 0)  # the next step begins from nothing
        backward(plain, 0)
        assert len(gradients.gradients()) == 4


def test_masters_keep_what_the_model_cannot() -> None:
    """256 and 100 updates of -1/256: bfloat16 parameters would not move."""
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.fill_(256.0)
    with Float32Gradients(layer, masters=True) as gradients:
        (master,) = gradients.master_parameters()
        optimizer = torch.optim.SGD([master], lr=1 / 256)
        for _ in range(1024):
            layer(torch.ones(1, 1, dtype=torch.bfloat16)).backward()
            with gradients.for_step():
                optimizer.step()
    assert master.dtype == torch.float32
    assert master.item() == 252.0
    assert layer.weight.item() == 252.0


def test_parameters_of_all_kinds() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = (nn.Parameter(torch.ones(2).bfloat16()) for _ in range(3))
            self.wide = nn.Parameter(torch.ones(2))
            self.tied = self.used
            self.frozen.requires_grad_(False)
            self.table = nn.Embedding(4, 2, sparse=True, dtype=torch.bfloat16)

    model = Mixed()
    with Float32Gradients(model) as gradients:
        for _ in range(2):
            loss = (model.used * model.tied * model.frozen).sum() + model.wide.sum()
            (loss + model.table(torch.tensor([1, 1])).sum()).backward()
        found = gradients.gradients()
        assert {name: (each.tolist(), each.dtype) for name, each in found.items()} == {
            "used": ([4.0, 4.0], torch.float32),
            "wide": ([2.0, 2.0], torch.float32),
            "table.weight": ([[0.0, 0.0], [4.0, 4.0], [0.0, 0.0], [0.0, 0.0]], torch.float32),
        }
        model.frozen.requires_grad_(True)  # no hook knows it
        for _ in range(2):
            (model.frozen * 3).sum().backward()
        assert gradients.gradients()["frozen"].tolist() == [6.0, 6.0]
        gradients.write_back()
        assert model.unused.grad is None
        gradients.zero()
        assert gradients.gradients() == {}
    (model.used * 2).sum().backward()
    assert model.used.grad is not None  # as in plain PyTorch again


def test_a_step_that_fails_keeps_the_gradients() -> None:
    model = perceptron()
    gradients = Float32Gradients(model)
    backward(model, 0)
    with pytest.raises(ZeroDivisionError), gradients.for_step():
        raise ZeroDivisionError
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_wrong_uses_are_refused() -> None:
    model = perceptron()
    with pytest.raises(UsageError, match="masters=True with enabled=False"):
        Float32Gradients(model, enabled=False, masters=True)
    with pytest.raises(UsageError, match="masters=True"):
        Float32Gradients(model).master_parameters()


# ---- bps numerics precision ------------------------------------------------------------------------------------


def test_float32_gains_and_more_terms_lose_more() -> None:
    errors = {(each.buffer, each.terms): each for each in accumulation_errors([4, 32], hidden=16, seed=1)}
    assert len(errors) == 6
    for (buffer, terms), error in errors.items():
        assert error.float32 < 1e-6 < 1e-4 < error.rounded < 4e-3, error
        assert error.bfloat16 > error.rounded, error
        if terms == 32:
            assert error.bfloat16 > 1.3 * errors[buffer, 4].bfloat16
            assert error.bfloat16 > 2 * error.rounded


def test_measurements_depend_on_the_seed_and_nothing_else() -> None:
    state = torch.random.get_rng_state()
    first = list(accumulation_errors([3], hidden=8, seed=5))
    torch.randn(3)
    assert list(accumulation_errors([3], hidden=8, seed=5)) == first
    assert list(accumulation_errors([3], hidden=8, seed=6)) != first
    torch.random.set_rng_state(state)
    with torch.no_grad():
        for _ in accumulation_errors([3], hidden=8):
            assert torch.equal(torch.random.get_rng_state(), state)
            assert not torch.is_grad_enabled()


def test_errors_come_as_they_are_measured() -> None:
    counts: Any = [2, 2.5]  # half a term can't be measured
    errors = accumulation_errors(counts, hidden=8)
    assert next(errors).terms == 2
    with pytest.raises(TypeError):
        next(errors)


class Screen(io.StringIO):
    """What can be seen after each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def flush(self) -> None:
        self.seen.append(self.getvalue())


def test_a_line_is_shown_as_soon_as_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    assert main(["numerics", "precision", "--counts", "2,3", "--hidden", "8"]) == 0
    lines = screen.getvalue().splitlines(keepends=True)
    assert len(lines) == 9
    assert set(screen.seen) >= {"".join(lines[:count]) for count in range(1, 10)}


def test_two_terms_round_once() -> None:
    for error in accumulation_errors([2], hidden=16):
        assert error.bfloat16 == error.rounded


def test_precision_as_a_user_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["numerics", "precision", "--counts", "2,8", "--hidden", "8"]
    assert main(options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["buffer", "terms", "bfloat16", "rounded", "once", "float32", "gain"]
    assert len(lines) == 3 + 6
    assert main([*options, "--json"]) == 0
    answer: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [(row["buffer"], row["terms"]) for row in answer[:3]] == [
        ("micro-batch accumulation", 2),
        ("micro-batch accumulation", 8),
        ("DP reduce-scatter", 2),
    ]
    assert all(row["float32"] < row["bfloat16"] for row in answer)


@pytest.mark.parametrize("options", ["--counts 1", "--counts 2,0", "--hidden 12", "--hidden 0"])
def test_measurements_that_make_no_sense_are_refused(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["numerics", "precision", *options.split()]) == 2
    assert "sums have at least 2 terms, and the width is a multiple of 8" in capsys.readouterr().err


def test_counts_are_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["numerics", "precision", "--counts", "2;4"])
    assert raised.value.code == 2
    assert "takes integers with commas between them" in capsys.readouterr().err
