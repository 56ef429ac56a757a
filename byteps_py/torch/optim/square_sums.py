"""Square sums that have the same bits however a tensor is split among ranks. Pure; any thread.

Squares are added in float64 as a binary tree over the tensor's elements: a node of level n is the sum of the 2^n
elements from index·2^n on, and of its two halves. A range of elements is made of few nodes, so ranks that have ranges
exchange these, and combine them as one rank would.

    level 2      ( 0 … 3 )          ranges [0, 3) and [3, 4): nodes (1, 0), (0, 2) and (0, 3)
    level 1   (0 1)    (2 3)
    level 0   0   1    2   3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

#: (level, index)
Node = tuple[int, int]
_BLOCK_LEVEL = 16  # blocks of so many elements are added one after the other, so that they stay in a cache
_BLOCK = 1 << _BLOCK_LEVEL


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
