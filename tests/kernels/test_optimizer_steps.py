"""Steps of optimizers in one pass beside torch's optimizers: the same bits, step after step.

torch's own square root rounds as the library does that it is built with, so the reference takes the correctly rounded
one.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from byteps_py.errors import UsageError
from byteps_py.kernels.optimizer_steps import bind_step, prepare_step
from byteps_py.kernels.reduction import reduce
from byteps_py.kernels.update_rules import Decay, Hyperparameters, Method, Scalar, StepKind, UpdateRule, step_scalars
from byteps_py.tensors import DType, Op

TORCH = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT64: torch.float64,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
}
COUNT = 1003  # whole chunks, and single elements
ADAM = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-6}
CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], UpdateRule]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}, UpdateRule(Method.SGD)),
    "sgd with decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.02}, UpdateRule(Method.SGD, Decay.COUPLED)),
    "momentum": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True},
        UpdateRule(Method.SGD, momentum=True, maximize=True),
    ),
    "nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        UpdateRule(Method.SGD, Decay.COUPLED, momentum=True, nesterov=True),
    ),
    "adam": (torch.optim.Adam, ADAM, UpdateRule(Method.ADAM)),
    "adam with decay": (torch.optim.Adam, {**ADAM, "weight_decay": 0.01}, UpdateRule(Method.ADAM, Decay.COUPLED)),
    "adamw": (torch.optim.AdamW, {**ADAM, "weight_decay": 0.1}, UpdateRule(Method.ADAM, Decay.DECOUPLED)),
    "amsgrad": (
        torch.optim.AdamW,
        {**ADAM, "amsgrad": True, "maximize": True, "weight_decay": 0.1},
        UpdateRule(Method.ADAM, Decay.DECOUPLED, amsgrad=True, maximize=True),
    ),
    "mostly new": (
        torch.optim.AdamW,
        {"lr": 1e-3, "betas": (0.3, 0.5), "weight_decay": 0.1},
        UpdateRule(Method.ADAM, Decay.DECOUPLED, is_mostly_new=True),
    ),
    "adagrad": (
        torch.optim.Adagrad,
        {"lr": 0.01, "lr_decay": 1e-3, "weight_decay": 0.01},
        UpdateRule(Method.ADAGRAD, Decay.COUPLED),
    ),
}


def make_step(
    kind: StepKind,
    scalars: Sequence[float],
    states: Sequence[int],
    inputs: Sequence[int],
    outputs: Sequence[int],
    elements: range,
    divisor: int = 1,
) -> None:
    """One step."""
    bind_step(kind, states, inputs, outputs, divisor)(scalars, elements)


@pytest.fixture(autouse=True)
def correct_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.sqrt(tensor.numpy()))

    monkeypatch.setattr(torch.Tensor, "sqrt", rounded)


def numbers_of(options: dict[str, Any]) -> Hyperparameters:
    names = ("lr", "weight_decay", "momentum", "dampening", "eps", "lr_decay")
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    given = {name: options[name] for name in names if name in options}
    if "lr_decay" in options:
        given["eps"] = 1e-10  # torch's default for Adagrad
    return Hyperparameters(beta1=beta1, beta2=beta2, **given)


def gradients(seed: int, dtype: torch.dtype, count: int = COUNT) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-6, 2, (count,), generator=rng)
    return (torch.randn(count, generator=rng) * scale).to(dtype)


def beside_torch(
    name: str, gradient: DType, parameter: DType, steps: int, check: Callable[[int], bool] = lambda step: True
) -> None:
    kind, options, rule = CASES[name]
    wide = torch.float64 if gradient is DType.FLOAT64 else torch.float32
    start = gradients(0, wide)
    reference = torch.nn.Parameter(start.clone())
    optimizer = kind([reference], foreach=False, **options)
    states = [start.clone(), *(torch.zeros(COUNT, dtype=wide) for _ in range(rule.moments))]
    given, output = torch.empty(COUNT, dtype=TORCH[gradient]), torch.empty(COUNT, dtype=TORCH[parameter])
    step_of = bind_step(
        StepKind(rule, gradient, parameter),
        [state.data_ptr() for state in states],
        [given.data_ptr()],
        [output.data_ptr()],
    )
    for step in range(1, steps + 1):
        given.copy_(gradients(step, TORCH[gradient]))
        reference.grad = given.to(wide)
        optimizer.step()
        scalars = step_scalars(rule, numbers_of(options), step)
        for elements in (range(100), range(100, COUNT)):  # as partitions do
            step_of(scalars, elements)
        if check(step):
            assert torch.equal(states[0], reference.detach()), f"step {step}"
            assert torch.equal(output, reference.detach().to(output.dtype)), f"step {step}"
    kept = [
        value for key, value in optimizer.state[reference].items() if key != "step" and isinstance(value, torch.Tensor)
    ]
    for state, expected in zip(states[1:], kept, strict=True):
        assert torch.equal(state, expected)


@pytest.mark.parametrize("name", CASES)
def test_a_thousand_steps_in_float32(name: str) -> None:
    beside_torch(name, DType.FLOAT32, DType.FLOAT32, 1000, lambda step: step < 4 or step % 100 == 0)


@pytest.mark.parametrize("name", ["nesterov", "adamw"])
@pytest.mark.parametrize(
    ("gradient", "parameter"),
    [
        (DType.BFLOAT16, DType.BFLOAT16),
        (DType.FLOAT16, DType.FLOAT16),
        (DType.BFLOAT16, DType.FLOAT32),
        (DType.FLOAT32, DType.BFLOAT16),
        (DType.FLOAT64, DType.FLOAT64),
        (DType.FLOAT64, DType.FLOAT32),
    ],
)
def test_other_dtypes(name: str, gradient: DType, parameter: DType) -> None:
    beside_torch(name, gradient, parameter, 20)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT64])
def test_contributions_are_added_as_in_a_reduction(dtype: DType) -> None:
    rule = UpdateRule(Method.ADAM, Decay.DECOUPLED)
    wide = torch.float64 if dtype is DType.FLOAT64 else torch.float32
    scalars = step_scalars(rule, Hyperparameters(lr=0.01, weight_decay=0.1), 3, unscale=1 / 3, clip=0.7)
    for inputs, divisor in itertools.product((1, 2, 3, 5), (1, 3)):
        given = [gradients(number, TORCH[dtype]) for number in range(inputs)]
        total = torch.empty_like(given[0])
        reduce(Op.SUM, dtype, [one.data_ptr() for one in given], [total.data_ptr()], COUNT, divisor)
        found = []
        for sources, by in ((given, divisor), ([total], 1)):
            states = [gradients(9, wide), gradients(8, wide), gradients(7, wide).abs()]
            outputs = [torch.empty_like(total) for _ in range(2)]
            make_step(
                StepKind(rule, dtype, dtype),
                scalars,
                [state.data_ptr() for state in states],
                [source.data_ptr() for source in sources],
                [output.data_ptr() for output in outputs],
                range(COUNT),
                by,
            )
            found.append([*states, *outputs])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
        assert torch.equal(found[0][3], found[0][4])


def test_scaled_and_clipped_gradients() -> None:
    rule = UpdateRule(Method.SGD)
    gradient, master = gradients(1, torch.float32), gradients(2, torch.float32)
    expected = master - gradient * (1 / 1024) * 0.25
    scalars = step_scalars(rule, Hyperparameters(lr=1.0), 1, unscale=1 / 1024, clip=0.25)
    make_step(
        StepKind(rule, DType.FLOAT32, DType.FLOAT32),
        scalars,
        [master.data_ptr()],
        [gradient.data_ptr()],
        [],
        range(COUNT),
    )
    assert torch.equal(master, expected)


def test_numbers_that_are_none_stay_so() -> None:
    rule = UpdateRule(Method.SGD)
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, -0.0])
    noisy = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)  # NaN by their last bits alone
    master = torch.cat([values, noisy])
    gradient, output = torch.zeros(7, dtype=torch.float32), torch.empty(7, dtype=torch.bfloat16)
    scalars = step_scalars(rule, Hyperparameters(lr=0.0), 1)
    make_step(
        StepKind(rule, DType.FLOAT32, DType.BFLOAT16),
        scalars,
        [master.data_ptr()],
        [gradient.data_ptr()],
        [output.data_ptr()],
        range(7),
    )
    assert output.isnan().tolist() == [True, False, False, False, False, True, True]
    assert torch.equal(output[1:5], values[1:].bfloat16())


def test_an_output_may_be_an_input() -> None:
    rule, memory = UpdateRule(Method.SGD), array("f", [1.0] * 40)
    master = array("f", [2.0] * 40)
    address = memory.buffer_info()[0]
    scalars = step_scalars(rule, Hyperparameters(lr=0.5), 1)
    make_step(
        StepKind(rule, DType.FLOAT32, DType.FLOAT32),
        scalars,
        [master.buffer_info()[0]],
        [address, address],
        [address],
        range(3, 40),
        2,
    )
    assert memory.tolist() == [1.0] * 3 + [1.5] * 37
    assert master.tolist() == [2.0] * 3 + [1.5] * 37


@pytest.mark.parametrize(
    ("dtypes", "said"),
    [
        ((DType.INT32, DType.FLOAT32), "floating dtypes, not INT32"),
        ((DType.FLOAT32, DType.INT8), "and INT8"),
        ((DType.BFLOAT16, DType.FLOAT64), "need gradients of FLOAT64"),
        ((DType.FLOAT64, DType.FLOAT16), "not FLOAT16"),
    ],
)
def test_dtypes_without_a_kernel(dtypes: tuple[DType, DType], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        prepare_step(StepKind(UpdateRule(Method.SGD), *dtypes))


def test_bad_arguments() -> None:
    rule = UpdateRule(Method.ADAM)
    with pytest.raises(UsageError, match="ADAM has 3 states, not 2"):
        bind_step(StepKind(rule, DType.FLOAT32, DType.FLOAT32), [0, 0], [0], [])
    with pytest.raises(UsageError, match="steps count from 1"):
        step_scalars(rule, Hyperparameters(lr=1.0), 0)
    for code in (-1, 1 << 9, 3 << 2):
        with pytest.raises(UsageError, match="no rule"):
            UpdateRule.from_code(code)


def test_all_rules_have_a_code_of_their_own() -> None:
    flags = list(itertools.product((False, True), repeat=5))
    rules = [UpdateRule(method, decay, *some) for method in Method for decay in Decay for some in flags]
    assert len({rule.code for rule in rules}) == len(rules)
    assert all(UpdateRule.from_code(rule.code) == rule for rule in rules)


def test_the_first_moment_of_sgd_is_the_gradient() -> None:
    rule = UpdateRule(Method.SGD, momentum=True)
    numbers = Hyperparameters(lr=1.0, momentum=0.9, dampening=0.5)
    first, second = (step_scalars(rule, numbers, step) for step in (1, 2))
    assert (first[Scalar.MOMENTUM], first[Scalar.GAIN]) == (0.0, 1.0)
    assert (second[Scalar.MOMENTUM], second[Scalar.GAIN]) == (0.9, 0.5)
