"""Checks of what other ranks send about sparse tensors (COO), before it is used. Any thread.

torch does not check indices: with one outside of the shape it would write outside of its memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from byteps_py.errors import MismatchError

_REMEDY = "give the same shape on every rank"


def check_dimensions(what: str, rank: int, dimensions: int, shape: Sequence[int]) -> None:
    """Raises MismatchError if a tensor of ``shape`` can't have this many sparse dimensions."""
    if not 0 <= dimensions <= len(shape):
        raise MismatchError(
            f"{what}: rank {rank} has {dimensions} sparse dimensions, of a shape {list(shape)}; {_REMEDY}"
        )


def check_count(what: str, rank: int, count: int, dimensions: int, shape: Sequence[int]) -> None:
    """Raises MismatchError if a tensor of ``shape`` can't have this many elements. Call it before memory is
    allocated."""
    most = math.prod(shape[:dimensions])
    if not 0 <= count <= most:
        raise MismatchError(
            f"{what}: rank {rank} has {count} elements in {dimensions} sparse dimensions, where a shape {list(shape)} "
            f"has at most {most}; {_REMEDY}"
        )


def check_indices(what: str, rank: int, indices: torch.Tensor, shape: Sequence[int]) -> None:
    """``indices``: [dimension, element]. Raises MismatchError if one is outside of ``shape``."""
    if not indices.numel():
        return
    least, most = torch.aminmax(indices, dim=1)
    for dimension, (low, high) in enumerate(zip(least.tolist(), most.tolist(), strict=True)):
        if low < 0 or high >= shape[dimension]:
            raise MismatchError(
                f"{what}: rank {rank} has index {low if low < 0 else high} in dimension {dimension} of a shape "
                f"{list(shape)}; {_REMEDY}"
            )
