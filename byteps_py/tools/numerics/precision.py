"""Measures how much the sums of gradients lose in bfloat16, and how much float32 accumulation gains.

The terms are real gradients: of a small seeded model in bfloat16, from autograd. The exact sum of the same terms is
taken in float64. So an error here comes from the accumulation alone, not from the passes. CPU, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from byteps_py.errors import UsageError
from byteps_py.parallel.float32_gradients import Float32Gradients
from byteps_py.tools.numerics.reference_order import ordered_sum

_SAMPLES = 8  # of a micro-batch


@dataclass(frozen=True, slots=True)
class AccumulationError:
    """Relative errors (2-norm, against float64) of one buffer.

    ``bfloat16``: every addition rounds to bfloat16. ``rounded``: added in float32, the result rounded to bfloat16 once.
    ``float32``: added and kept in float32.
    """

    buffer: str
    terms: int
    bfloat16: float
    rounded: float
    float32: float

    @property
    def gain(self) -> float:
        """How many times smaller the error is with the result in float32."""
        return self.bfloat16 / self.float32 if self.float32 else float("inf")


#: The buffers, as they are named in a table.
MICRO_BATCHES, REDUCE_SCATTER, IMAGE_GRADIENTS = BUFFERS = (
    "micro-batch accumulation",
    "DP reduce-scatter",
    "cross-attention image gradients",
)


def accumulation_errors(
    counts: Sequence[int] = (2, 8, 32), hidden: int = 64, seed: int = 0
) -> Iterator[AccumulationError]:
    """Measure the three buffers that Llama 3 (section 6.2) accumulates in float32.

    Args:
        counts: numbers of terms: micro-batches, data-parallel ranks, cross-attention layers.
        hidden: the model's width.
        seed: of weights and samples.

    - Micro-batch accumulation: ``parameter.grad`` over the backward passes of a step, beside ``Float32Gradients``.
    - DP reduce-scatter: each rank's gradient is a term; a ring adds in rank order, from another rank for each chunk.
    - Cross-attention's image gradients: several layers attend to the same image tokens, and autograd adds their
      gradients; in float32 if the tokens are cast to float32 and each layer casts them back.

    Returns an iterator: for each buffer one error for each count, each measured when it is asked for. Raises UsageError
    for counts below 2.

    >>> [error.terms for error in accumulation_errors([4], hidden=8)]
    [4, 4, 4]
    """
    if not counts or min(counts) < 2 or hidden < 8 or hidden % 8:
        raise UsageError(
            f"counts {list(counts)}, hidden {hidden}: sums have at least 2 terms, and the width is a multiple of 8"
        )
    measure: tuple[Callable[[int, int, int], AccumulationError], ...] = (_micro_batches, _ranks, _image_gradients)
    return (_undisturbed(one, count, hidden, seed) for one in measure for count in counts)


def _undisturbed(
    measure: Callable[[int, int, int], AccumulationError], count: int, hidden: int, seed: int
) -> AccumulationError:
    """The program's random numbers, and whether it computes gradients, stay as they are."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        return measure(count, hidden, seed)


class _Perceptron(nn.Module):
    """A residual block of a transformer without attention."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class _CrossAttention(nn.Module):
    """Text attends to image tokens: [samples, image tokens, hidden], of any float dtype."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, text: torch.Tensor, image: torch.Tensor) -> Any:
        image = image.to(text.dtype)
        attended = nn.functional.scaled_dot_product_attention(
            self.query(self.norm(text)), self.key(image), self.value(image)
        )
        return text + self.out(attended)


def _batches(count: int, hidden: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Samples of one distribution, as those of a step: the gradients have a common mean, and noise."""
    teacher = torch.randn(hidden, hidden) / hidden**0.5
    inputs = [torch.randn(_SAMPLES, hidden) for _ in range(count)]
    return [(x.bfloat16(), (x @ teacher).bfloat16()) for x in inputs]


def _backward(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = batch
    nn.functional.mse_loss(model(x).float(), y.float()).backward()


def _perceptrons(hidden: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(_Perceptron(hidden), _Perceptron(hidden)).bfloat16()


def _terms(model: nn.Module, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """The gradient of each batch, alone, flat, bfloat16."""
    found = []
    for batch in batches:
        model.zero_grad()
        _backward(model, batch)
        found.append(_flat(model))
    model.zero_grad()
    return found


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.grad.reshape(-1) for each in model.parameters() if each.grad is not None])


def _micro_batches(count: int, hidden: int, seed: int) -> AccumulationError:
    model = _perceptrons(hidden, seed)
    batches = _batches(count, hidden)
    exact = _exact(_terms(model, batches))
    for batch in batches:
        _backward(model, batch)
    in_bfloat16 = _flat(model)
    model.zero_grad()
    with Float32Gradients(model) as gradients:
        for batch in batches:
            _backward(model, batch)
        in_float32 = torch.cat([each.reshape(-1) for each in gradients.gradients().values()])
    return _errors(MICRO_BATCHES, count, exact, (in_bfloat16, in_float32))


def _ranks(count: int, hidden: int, seed: int) -> AccumulationError:
    model = _perceptrons(hidden, seed)
    terms = _terms(model, _batches(count, hidden))
    sums = [_ring_reduce_scatter(terms), _ring_reduce_scatter([term.float() for term in terms])]
    return _errors(REDUCE_SCATTER, count, _exact(terms), (sums[0], sums[1]))


def _ring_reduce_scatter(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """All chunks of the sum, as a ring computes them: chunk c begins at rank c + 1 and ends at rank c, and each rank
    adds its own part to what the last one sent, in the terms' dtype."""
    ranks = len(terms)
    chunks = [term.tensor_split(ranks) for term in terms]
    sums = []
    for number in range(ranks):
        total = chunks[(number + 1) % ranks][number].clone()
        for hop in range(2, ranks + 1):
            total += chunks[(number + hop) % ranks][number]
        sums.append(total)
    return torch.cat(sums)


def _image_gradients(count: int, hidden: int, seed: int) -> AccumulationError:
    torch.manual_seed(seed)
    layers = nn.ModuleList([_CrossAttention(hidden) for _ in range(count)]).bfloat16()
    text, image, wanted = (torch.randn(_SAMPLES, 4, hidden).bfloat16() for _ in range(3))
    terms: list[torch.Tensor] = []

    def backward(tokens: torch.Tensor, of_layer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = text
        for layer in layers:
            x = layer(x, of_layer(tokens))
        nn.functional.mse_loss(x.float(), wanted.float()).backward()
        if tokens.grad is None:
            raise RuntimeError("the image tokens got no gradient")
        return tokens.grad.reshape(-1)

    def alone(tokens: torch.Tensor) -> torch.Tensor:
        """A view for one layer, whose gradient is noted."""
        own = tokens.to(torch.bfloat16).view_as(tokens)
        own.register_hook(lambda gradient: terms.append(gradient.reshape(-1).clone()))
        return own

    in_bfloat16 = backward(image.clone().requires_grad_(), alone)
    exact = _exact(terms)
    in_float32 = backward(image.float().requires_grad_(), lambda tokens: tokens)
    return _errors(IMAGE_GRADIENTS, count, exact, (in_bfloat16, in_float32))


def _exact(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return ordered_sum([term.double() for term in terms])


def _errors(buffer: str, terms: int, exact: torch.Tensor, sums: tuple[torch.Tensor, torch.Tensor]) -> AccumulationError:
    in_bfloat16, in_float32 = sums

    def error(found: torch.Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    return AccumulationError(buffer, terms, error(in_bfloat16), error(in_float32.bfloat16()), error(in_float32))
