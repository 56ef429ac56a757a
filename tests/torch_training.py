"""Training the same way twice: on a cluster, and in one process by the contract's arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from support.threaded import contract
from torch import nn
from torch.nn import functional

import byteps_py.torch as bps

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class Net(nn.Module):
    """An MLP with a layer that only odd ranks use, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.first = nn.Linear(12, 40)
        self.odd = nn.Linear(40, 40, bias=False)
        self.never = nn.Linear(3, 3)
        self.last = nn.Linear(40, 5)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.3)

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        return self.last(hidden + self.odd(hidden) if odd else hidden)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The loss of this rank's batch of this step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(6, 12, generator=generator), torch.randint(0, 5, (6,), generator=generator)
    return functional.cross_entropy(model(x, rank % 2 == 1), y)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def wrap(model, make: MakeOptimizer = sgd, **options):
    return bps.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def gradients(model: nn.Module, rank: int, batches: Sequence[int]) -> list[torch.Tensor]:
    """One rank's gradients, summed over batches; zeros where there is none."""
    model.zero_grad()
    for batch in batches:
        loss_of(model, rank, batch).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def reference(
    make: MakeOptimizer,
    steps: int,
    machines: Sequence[int],
    *,
    wire: torch.dtype = torch.float32,
    passes: int = 1,
    before_step: Callable[[nn.Module], object] = lambda model: None,
) -> dict[str, torch.Tensor]:
    """The parameters after ``steps``: each gradient rounded to ``wire``, averaged as the contract says."""
    model = Net()
    optimizer = make(list(model.parameters()))
    for step in range(steps):
        batches = range(step * passes, (step + 1) * passes)
        by_rank = [gradients(model, rank, batches) for rank in range(sum(machines))]
        for param, parts in zip(model.parameters(), zip(*by_rank, strict=True), strict=True):
            mean = contract([part.to(wire) for part in parts], machines, average=True)
            param.grad = mean.to(param.dtype)
        before_step(model)
        optimizer.step()
    return state_of(model)


def assert_same(states: Sequence[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> None:
    for rank, state in enumerate(states):
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(state[name], value), f"rank {rank}: {name} differs"


def wrap_and_cross(model: nn.Module, make=sgd, **options: Any) -> Any:
    return bps.CrossBarrier(model, wrap(model, make, **options))


def assert_equal(a: Any, b: Any) -> None:
    """Nested structures, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


def run_steps(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
