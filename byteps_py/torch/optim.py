"""Optimizers that torch does not have: LAMB. They work alone, and with DistributedOptimizer, also hosted.

LAMB is Adam's update, scaled for each parameter by the ratio of its norm to the update's. A service makes the same step
with the same bits (kernels/update_rules.py), so the square sums of a norm have the same bits however a tensor is split
among ranks. Squares are added in float64 as a binary tree over the tensor's elements: a node of level n is the sum of
the 2^n elements from index·2^n on, and of its two halves. A range of elements is made of few nodes, so ranks that have
ranges exchange these, and combine them as one rank would.

    level 2      ( 0 … 3 )          ranges [0, 3) and [3, 4): nodes (1, 0), (0, 2) and (0, 3)
    level 1   (0 1)    (2 3)
    level 0   0   1    2   3

The training thread calls ``step``; any thread the functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from byteps_py.errors import UsageError

__all__ = ["LAMB"]

#: (level, index)
Node = tuple[int, int]
_BLOCK_LEVEL = 16  # blocks of so many elements are added one after the other, so that they stay in a cache
_BLOCK = 1 << _BLOCK_LEVEL


class LAMB(torch.optim.Optimizer):
    r"""LAMB, Algorithm 2 of You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes".

    For each parameter w with gradient g, in step t:

        m = beta1·m + (1 − beta1)·g            v = beta2·v + (1 − beta2)·g²
        u = (m / (1 − beta1^t)) / (√(v / (1 − beta2^t)) + eps) + weight_decay·w
        w = w − lr · r · u                     r = ‖w‖ / ‖u‖, or 1 if either norm is 0

    Moments are corrected for their bias, the weight decay is a part of the update, and the norms are not limited (the
    paper's φ is the identity). As in NVIDIA's apex, parameters without weight decay, such as biases, have r = 1;
    always_adapt=True gives them a ratio, too. Gradients are not clipped (apex clips to a norm of 1): call
    ``clip_grad_norm_`` before.

    params: parameters or param_groups, dense, of any floating dtype. lr: the learning rate; a schedule may change it.
    Norms are of float64, and have the same bits however a parameter is split among ranks.

    Raises UsageError for numbers out of their ranges, and in ``step`` for a sparse gradient. One thread.

    >>> param = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = LAMB([param], lr=0.1, weight_decay=0.0, always_adapt=True)
    >>> param.sum().backward()
    >>> optimizer.step()
    >>> [round(value, 4) for value in param.tolist()]
    [2.6464, 3.6464]
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        always_adapt: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise UsageError(f"LAMB: {name} is {value}: give a number from 0 up")
        if not all(0 <= beta < 1 for beta in betas):
            raise UsageError(f"LAMB: betas are {betas}: give numbers from 0 up and below 1")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "always_adapt": always_adapt,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step. closure: evaluates the loss again, and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        if grad.layout is not torch.strided:
            raise UsageError("LAMB takes no sparse gradients: its norms are of whole parameters")
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["step"] += 1
        steps, (beta1, beta2) = int(state["step"]), group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        # Operation by operation what the service's kernel does.
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        scale = (square.sqrt() / math.sqrt(1 - beta2**steps)).add_(group["eps"])
        update = mean.div(1 - beta1**steps).div_(scale).add_(param, alpha=group["weight_decay"])
        ratio = 1.0
        if adapts(group["weight_decay"], group["always_adapt"]):
            ratio = trust_ratio(square_sum(param), square_sum(update))
        param.add_(update, alpha=-(group["lr"] * ratio))


def adapts(weight_decay: float, always_adapt: float) -> bool:
    """True if parameters of a group with these numbers have a trust ratio other than 1."""
    return bool(weight_decay or always_adapt)


def trust_ratio(param_squares: float, update_squares: float) -> float:
    """‖w‖ / ‖u‖ from square sums; 1 if either is 0."""
    if not (param_squares and update_squares):
        return 1.0
    return math.sqrt(param_squares) / math.sqrt(update_squares)


# ---- square sums ---------------------------------------------------------------------------------------------


def nodes(start: int, stop: int, level: int = 0) -> Iterator[Node]:
    """The nodes that make up the range of nodes from ``start`` to ``stop`` of ``level``.

    >>> list(nodes(0, 3)), list(nodes(3, 4))
    ([(0, 2), (1, 0)], [(0, 3)])
    """
    while start < stop:
        if start % 2:
            yield level, start
            start += 1
        if stop % 2 and start < stop:
            stop -= 1
            yield level, stop
        start, stop, level = start // 2, stop // 2, level + 1


def node_sums(values: torch.Tensor, start: int = 0) -> dict[Node, float]:
    """The sums of squares of the nodes that make up ``values``, which are elements of a tensor from ``start`` on.

    values: of any floating dtype and one dimension, on the CPU.
    """
    stop = start + len(values)
    low, high = -(-start // _BLOCK), stop // _BLOCK
    if low >= high:
        found: dict[Node, float] = {}
        middle = min(low * _BLOCK, stop)
        for first, last in ((start, middle), (middle, stop)):
            if first < last:
                found |= _folded(_squares(values[first - start : last - start]), first, 0)
        return found
    sums = torch.empty(high - low, dtype=torch.float64, device="cpu")
    for block in range(low, high):
        first = block * _BLOCK - start
        sums[block - low] = _folded(_squares(values[first : first + _BLOCK]), block * _BLOCK, 0)[_BLOCK_LEVEL, block]
    found = _folded(sums, low, _BLOCK_LEVEL)
    for first, last in ((start, low * _BLOCK), (high * _BLOCK, stop)):
        if first < last:
            found |= _folded(_squares(values[first - start : last - start]), first, 0)
    return found


def total(sums: Mapping[Node, float], count: int) -> float:
    """The sum of all ``count`` elements of a tensor, of which ``sums`` has the nodes of ranges that make it up."""

    def value(level: int, index: int) -> float:
        if (level, index) in sums:
            return sums[level, index]
        if index << level >= count:
            return 0.0
        return value(level - 1, 2 * index) + value(level - 1, 2 * index + 1)

    return value(max(0, count - 1).bit_length(), 0)


def square_sum(tensor: torch.Tensor) -> float:
    """Of all elements.

    >>> square_sum(torch.tensor([[3.0, 4.0]]))
    25.0
    """
    return total(node_sums(tensor.detach().reshape(-1).cpu()), tensor.numel())


def _squares(values: torch.Tensor) -> torch.Tensor:
    wide = values.to(torch.float64)
    return wide * wide


def _folded(sums: torch.Tensor, start: int, level: int) -> dict[Node, float]:
    """The nodes that make up consecutive nodes of one level, of which the first has index ``start``."""
    found: dict[Node, float] = {}
    stop = start + len(sums)
    while start < stop:
        if start % 2:
            found[level, start] = float(sums[0])
            sums, start = sums[1:], start + 1
        if stop % 2 and start < stop:
            stop -= 1
            found[level, stop] = float(sums[-1])
            sums = sums[:-1]
        sums = sums[0::2] + sums[1::2]
        start, stop, level = start // 2, stop // 2, level + 1
    return found
