"""The conjugate operations at the borders of tensor-parallel regions: f and g of Megatron-LM (section 3), and the forms
for sequence parallelism (Korthikanti et al., section 4.2.2).

| function | forward | backward |
|---|---|---|
| copy_to_ranks (f) | identity | all-reduce |
| copy_among | identity | sum over the ranks that have the same part |
| reduce_from_ranks (g) | all-reduce | identity |
| gather_along (f with sequence parallelism) | all-gather | reduce-scatter |
| reduce_scatter_along (g with sequence parallelism) | reduce-scatter | all-gather |
| split_along | the own part | all-gather |
| collect_along | all-gather | the own part |

All ranks of ``group`` call them in the same order. With ``group`` None or of one rank they return their argument. Sums
are in the order of the ranks, the same bits on all. One thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from byteps_py.parallel.collectives import (
    Group,
    all_gathered,
    all_reduced,
    own_part,
    reduce_scattered,
    size_of,
    summed_among,
)

#: A change of place: (tensor, group) -> tensor, some with ``dim``.
_Move = Callable[..., torch.Tensor]


def copy_to_ranks(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """f: each rank uses ``tensor``, which is the same on all, in a computation of its own; gradients are summed."""
    return _conjugate(tensor, group, _same, all_reduced)


_Optional = TypeVar("_Optional", torch.Tensor, torch.Tensor | None)


def copy_among(tensor: _Optional, group: Group, copied: tuple[tuple[int, int, int], ...]) -> _Optional:
    """``tensor``, of which each rank has some ranges (start, stop, number) of dimension 0 in common with as many ranks,
    those that follow one another; each uses them in a computation of its own; gradients are summed among those."""
    if tensor is None or not copied:
        return tensor
    return _conjugate(tensor, group, _same, summed_among, copied=copied)


def reduce_from_ranks(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """g: the sum of the ranks' ``tensor``, on all; the gradient of the sum is that of each of them."""
    return _conjugate(tensor, group, all_reduced, _same)


def gather_along(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """The ranks' parts, joined along ``dim``, for computations that differ among ranks; gradients are summed."""
    return _conjugate(tensor, group, all_gathered, reduce_scattered, dim=dim)


def reduce_scatter_along(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's part, along ``dim``, of the sum of the ranks' ``tensor``. Raises UsageError if the number of ranks
    does not divide it."""
    return _conjugate(tensor, group, reduce_scattered, all_gathered, dim=dim)


def split_along(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's part, along ``dim``, of a ``tensor`` that all ranks have. Raises UsageError if the number of ranks
    does not divide it."""
    return _conjugate(tensor, group, own_part, all_gathered, dim=dim)


def collect_along(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """The ranks' parts, joined along ``dim``, for computations that are the same on all ranks."""
    return _conjugate(tensor, group, all_gathered, own_part, dim=dim)


def _same(tensor: torch.Tensor, group: Group, **_: Any) -> torch.Tensor:
    return tensor.view_as(tensor)


def _conjugate(tensor: torch.Tensor, group: Group, there: _Move, back: _Move, **where: Any) -> torch.Tensor:
    if size_of(group) == 1:
        return tensor
    moves = partial(there, group=group, **where), partial(back, group=group, **where)
    result: torch.Tensor = _Conjugate.apply(tensor, *moves)  # type: ignore[no-untyped-call]
    return result


class _Conjugate(torch.autograd.Function):
    """``there`` in the forward pass, ``back`` in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, there: _Move, back: _Move) -> torch.Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.back(gradient), None, None
