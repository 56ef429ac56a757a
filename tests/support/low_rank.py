"""The sums of Compression.powersgd in one process that is all ranks, in plain torch: what a job's must be, bit for bit.
Written down a second time, on purpose."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from support.threaded import contract


def halves(x: torch.Tensor) -> torch.Tensor:
    """The sum of a vector: halves are added until one number is left."""
    while len(x) > 1:
        half = len(x) // 2
        y = x[:half] + x[half : 2 * half]
        if len(x) % 2:
            y[0] = y[0] + x[-1]
        x = y
    return x[0]


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Gram-Schmidt, twice."""
    columns: list[torch.Tensor] = []
    for column in matrix.double().unbind(1):
        for _ in range(2 if columns else 0):
            shares = [halves(other * column) for other in columns]
            rows = torch.stack([other * share for other, share in zip(columns, shares, strict=True)])
            column = column - torch.stack([halves(each) for each in rows.t()])
        columns.append(column / halves(column * column).sqrt())
    return torch.stack(columns, 1).to(matrix.dtype)


class Emulated:
    """One matrix of all ranks. ``machines``: ranks of each."""

    def __init__(self, name: str, shape: Sequence[int], machines: Sequence[int], rank: int = 4) -> None:
        self.rows, self.columns = shape[0], int(np.prod(shape[1:]))
        self.shape, self.machines = tuple(shape), machines
        drawn = [np.random.default_rng([0, zlib.crc32(name.encode()), i + 1]).random(self.columns) for i in range(rank)]
        self.factor = torch.from_numpy(np.stack(drawn, 1) - 0.5).float()
        self.errors = [torch.zeros(self.rows, self.columns) for _ in range(sum(machines))]
        self.step = 0

    def mean(self, given: Sequence[torch.Tensor], is_used: bool = True, average: bool = True) -> torch.Tensor:
        basis = orthonormal(self.factor)
        matrices = [e + g.reshape(self.rows, self.columns).float() for e, g in zip(self.errors, given, strict=True)]
        own = [(m if self.step % 2 == 0 else m.t()) @ basis for m in matrices]
        total = contract(own, self.machines, average=average)
        pairs = [(p, basis) if self.step % 2 == 0 else (basis, p) for p in own]
        left, right = (total, basis) if self.step % 2 == 0 else (basis, total)
        result = left[:, :1] * right[:, 0]
        for k in range(1, right.shape[1]):
            result = result + left[:, k : k + 1] * right[:, k]
        if is_used:
            self.errors = [m.addmm(p, q.t(), alpha=-1.0) for m, (p, q) in zip(matrices, pairs, strict=True)]
            self.factor = total
            self.step += 1
        return result.view(self.shape)
