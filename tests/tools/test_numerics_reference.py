"""One process in the order of several: linear layers, gradients of ranks and micro-batches, sums."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from byteps_py.errors import UsageError
from byteps_py.tools.numerics import (
    Float32Gradients,
    ReferenceOrder,
    apply_reference_order,
    ordered_sum,
    reference_gradients,
)

PLAN = {"0": "column", "2": "row"}


def perceptron(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32, bias), nn.ReLU(), nn.Linear(32, 16, bias)).to(dtype)


def inputs(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp", [2, 4])
def test_layers_have_the_bits_of_ranks(dtype: torch.dtype, tp: int, bias: bool) -> None:
    """Beside the ranks' work by hand, one after another."""
    plain = perceptron(dtype, bias)
    up, down = plain[0], plain[2]
    reference = apply_reference_order(perceptron(dtype, bias), PLAN, ReferenceOrder(tp=tp))
    x = inputs(dtype).requires_grad_()
    output = reference(x)
    seed = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    output.backward(seed)

    hidden, parts = [], []
    own = [x.detach().clone().requires_grad_() for _ in range(tp)]
    rows = [chunk.clone().requires_grad_() for chunk in up.weight.detach().chunk(tp, 0)]
    columns = [chunk.contiguous().clone().requires_grad_() for chunk in down.weight.detach().chunk(tp, 1)]
    for rank in range(tp):
        shift = up.bias.detach().chunk(tp)[rank] if bias else None
        hidden.append(nn.functional.linear(own[rank], rows[rank], shift).relu())
        parts.append(nn.functional.linear(hidden[rank], columns[rank]))
    expected = ordered_sum([part.detach() for part in parts])
    for part in parts:
        part.backward(seed)
    assert torch.equal(output, expected + down.bias if bias else expected)
    assert x.grad is not None
    assert torch.equal(x.grad, ordered_sum([each.grad for each in own if each.grad is not None]))
    assert torch.equal(reference[0].weight.grad, torch.cat([each.grad for each in rows if each.grad is not None]))
    assert torch.equal(reference[2].weight.grad, torch.cat([each.grad for each in columns if each.grad is not None], 1))


def test_layers_compute_what_they_computed() -> None:
    plain, reference = perceptron(torch.float64), perceptron(torch.float64)
    names = [name for name, _ in reference.named_parameters()]
    assert apply_reference_order(reference, PLAN, ReferenceOrder(tp=4)) is reference
    assert [name for name, _ in reference.named_parameters()] == names
    x = inputs(torch.float64)
    for model in (plain, reference):
        model(x).square().sum().backward()
    torch.testing.assert_close(reference(x), plain(x), rtol=1e-12, atol=1e-12)
    for one, other in zip(reference.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_the_order_of_a_row_parallel_sum_matters() -> None:
    """If it did not, the tests of bits would prove nothing."""
    plain, reference = perceptron(), apply_reference_order(perceptron(), PLAN, ReferenceOrder(tp=4))
    assert not torch.equal(plain(inputs()), reference(inputs()))


def test_sums_round_once_on_each_machine() -> None:
    numbers = [torch.tensor([value]).bfloat16() for value in (256.0, 1.0, 1.0, 1.0)]
    assert ordered_sum(numbers).item() == 260.0  # 259 is between 258 and 260
    assert ordered_sum(numbers, (2, 2)).item() == 258.0  # 257 rounds to 256, and 256 + 2
    assert ordered_sum([torch.tensor([1, 2])] * 3).tolist() == [3, 6]
    kept = torch.ones(2)
    ordered_sum([kept, kept])
    assert kept.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("float32", [True, False])
def test_gradients_are_added_in_order(dtype: torch.dtype, float32: bool) -> None:
    order = ReferenceOrder(dp=3, micro_batches=4, dp_machines=(2, 1), float32=float32)
    rng = torch.Generator().manual_seed(3)
    batches = [[torch.randn(2, 16, generator=rng).to(dtype) for _ in range(4)] for _ in range(3)]

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).float().square().sum()  # type: ignore[no-any-return]

    model = perceptron(dtype)
    found = reference_gradients(model, loss_of, batches, order)
    kind = torch.float32 if float32 else dtype
    ranks = []
    for own in batches:
        total: list[torch.Tensor] = []
        for batch in own:
            gradients = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
            total = (
                [g.to(kind) for g in gradients]
                if not total
                else [one + other.to(kind) for one, other in zip(total, gradients, strict=True)]
            )
        ranks.append(total)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        first, second, third = (total[number] for total in ranks)
        machine = (first.float() + second.float()).to(kind)
        expected = (machine.float() + third.float()).to(kind) / 3
        assert torch.equal(found[name], expected), name
        assert parameter.grad is None
        assert getattr(parameter, "main_grad", None) is None


def test_impossible_orders_are_refused() -> None:
    linear = nn.Sequential(nn.Linear(6, 6))
    cases = [
        (lambda: ReferenceOrder(tp=0), "tp=0: it must be at least 1"),
        (lambda: ReferenceOrder(dp=4, dp_machines=(2, 1)), "dp_machines=(2, 1) have 3 ranks together, but dp=4"),
        (lambda: apply_reference_order(linear, {"0": "row"}, ReferenceOrder(tp=4)), "'0' has 6 inputs, which tp=4"),
        (lambda: apply_reference_order(linear, {"0": "rows"}, ReferenceOrder(tp=2)), "style 'rows' of '0'"),
        (lambda: apply_reference_order(linear, {"wo": "row"}, ReferenceOrder(tp=2)), "'wo' match no nn.Linear"),
        (lambda: ordered_sum([torch.ones(2), torch.ones(3)]), "give equal shapes and dtypes"),
        (lambda: ordered_sum([]), "give equal shapes and dtypes"),
        (lambda: ordered_sum([torch.ones(2)] * 3, (2, 2)), "machines [2, 2] have 4 ranks, but 3 tensors"),
        (
            lambda: reference_gradients(linear, lambda model, x: x, [[1], [2, 3]], ReferenceOrder(dp=2)),
            "batches of [1, 2] micro-batches, but dp=2 and micro_batches=1",
        ),
    ]
    for call, message in cases:
        with pytest.raises(UsageError) as raised:
            call()
        assert message in str(raised.value)


def test_a_step_in_reference_order_is_a_step(tmp_path: object) -> None:
    """The mean over two ranks is the gradient of the whole batch."""
    model = perceptron(torch.float64)
    batch = inputs(torch.float64)[:4]

    def loss_of(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return network(x).square().mean() / 2  # type: ignore[no-any-return]

    pieces = batch.chunk(4)
    order = ReferenceOrder(dp=2, micro_batches=2)
    found = reference_gradients(model, loss_of, [pieces[:2], pieces[2:]], order)
    (2 * loss_of(model, batch)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-12)
    assert isinstance(Float32Gradients(model).gradients(), dict)
