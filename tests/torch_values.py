"""Tensors that differ by rank, and bitwise comparison."""

from __future__ import annotations

import torch


def values(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (5, 7)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).mul(3).to(dtype)
    low = 0 if dtype is torch.uint8 else -100
    return torch.randint(low, 100, shape, generator=generator).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit: -0.0 is not 0.0, and a NaN is itself."""
    if a.dtype is b.dtype is torch.bfloat16:  # numpy has none
        a, b = a.view(torch.int16), b.view(torch.int16)
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
