"""Averages of integers: summed in a wider type, so that no sum overflows, and divided at the end.

    8 and 16 bits ─► int32 ─► sum ─┐
    int32         ─► int64 ─► sum ─┼─► divided by the number of ranks ─► the original dtype
    int64 ─► two halves each ─► sum ┘

An int64 tensor travels with one more dimension, for its upper and lower 32 bits. Any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_SUMS = {
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
    torch.int16: torch.int32,
    torch.int32: torch.int64,
    torch.int64: torch.int64,
}
_HALF_BITS = 32
_LOWER = (1 << _HALF_BITS) - 1


def is_summed_wider(dtype: torch.dtype) -> bool:
    """True if averages of ``dtype`` are computed this way."""
    return dtype in _SUMS


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of ``dtype`` are summed."""
    return _SUMS[dtype]


def sum_shape(dtype: torch.dtype, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape that ``summands`` gives to a tensor of ``shape``."""
    return (*shape, 2) if dtype is torch.int64 else tuple(shape)


def summands(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that is summed in place of ``tensor``.

    >>> summands(torch.tensor([-1, 7])).tolist()
    [[-1, 4294967295], [0, 7]]
    """
    tensor = tensor.detach()
    if tensor.dtype is torch.int64:
        return torch.stack([tensor >> _HALF_BITS, tensor & _LOWER], -1)
    return tensor.to(_SUMS[tensor.dtype])


def mean(sums: torch.Tensor, count: int, dtype: torch.dtype, rounding: str) -> torch.Tensor:
    """The average, of ``dtype``, of ``count`` tensors whose ``summands`` add up to ``sums``. ``rounding``: "floor", or
    "trunc" (towards zero).

    >>> three = sum(summands(torch.tensor([2**63 - 1, -2])) for _ in range(3))
    >>> mean(three, 3, torch.int64, "floor").tolist()
    [9223372036854775807, -2]
    """
    if dtype is not torch.int64:
        return sums.div(count, rounding_mode=rounding).to(dtype)
    upper, lower = sums[..., 0] + (sums[..., 1] >> _HALF_BITS), sums[..., 1] & _LOWER
    quotient = upper.div(count, rounding_mode="floor")
    rest = ((upper - quotient * count) << _HALF_BITS) + lower  # below count · 2**32
    digits = rest.div(count, rounding_mode="floor")
    result = (quotient << _HALF_BITS) + digits
    if rounding == "trunc":
        result += (result < 0) & (digits * count != rest)
    return result
