"""PowerSGD for one matrix, in its alternating form: one factor is summed in each round, and so one sum is enough.

    round 0:  Q drawn ─► orthonormal ─► P = (G + E) Q ─► sum of P over ranks ─► gradient = P Qᵀ,  E = G + E - P Qᵀ
    round 1:  P ─► orthonormal ─► Q = (G + E)ᵀ P ─► sum of Q over ranks ─► gradient = P Qᵀ,  E likewise
    round 2:  as round 0, from the Q of round 1: that is the warm start

(Vogels et al., 2019; alternating: Zhang et al., ACP-SGD, 2023. PowerSGD itself sums P and then Q in each
step.) E is what this rank's own product lacks of its gradient.

All ranks compute with the same sums, and must get the same bits, whatever their processors: so whatever all compute is
made of single operations on elements, in an order that is written down here, and not of BLAS or LAPACK, whose orders
depend on the processor. A rank's own factor and error may be any BLAS's. Knows no buckets, names or sessions. The
caller holds the lock of the GradientReducer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from byteps_py.torch.compression import LowRank

_Numbers = npt.NDArray[np.float64]
#: What remains of a column, without its share in the others, is noise if it is so much shorter.
_LEAST_SHARE = 1e-6
#: Elements of a product that are computed at a time, so that they stay in the cache.
_CHUNK = 1 << 17


@dataclass(frozen=True, slots=True)
class _FactorRound:
    """A round under way. given: gradient and error; None: this rank takes no part. own: this rank's factor. basis: the
    orthonormal factor that all ranks have, on the matrix's device."""

    given: torch.Tensor | None
    own: torch.Tensor | None
    basis: torch.Tensor


class LowRankMatrix:
    """What one matrix of ``shape`` needs from round to round. ``identity``: a number for its name, from which draws
    follow. Its dtype is that in which ranks compute."""

    def __init__(
        self, low_rank: LowRank, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, identity: int
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self._low_rank, self._device, self._identity = low_rank, device, identity
        self._rank = low_rank.rank_of(shape)
        self._error: torch.Tensor | None = None
        self._spare: torch.Tensor | None = None
        self.restart()

    def restart(self) -> None:
        """Begin as at the first round, with an error of zeros."""
        #: Whether the right factor, Q, is summed next.
        self.sums_right = False
        self._draws = 0
        drawn = np.stack([self._drawn(self.shape[1]) for _ in range(self._rank)], 1)
        self._factor = torch.from_numpy(drawn).to(self.dtype)
        self._round: _FactorRound | None = None
        if self._error is not None:
            self._error.zero_()

    def state(self) -> dict[str, Any]:
        """Copies of what the next round goes on from, for ``load``."""
        return {
            "shape": list(self.shape),
            "rank": self._rank,
            "sums_right": self.sums_right,
            "draws": self._draws,
            "factor": self._factor.clone(),
            "error": None if self._error is None else self._error.to("cpu", copy=True),
        }

    def fits(self, state: Mapping[str, Any]) -> bool:
        """True if ``state`` is of such a matrix."""
        error, factor = state["error"], state["factor"]
        is_error = error is None or (tuple(error.shape) == self.shape and self._low_rank.error_feedback)
        is_factor = tuple(factor.shape) == self.factor_shape(not state["sums_right"]) and factor.dtype is self.dtype
        return is_error and is_factor and state["rank"] == self._rank and tuple(state["shape"]) == self.shape

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state`` that fits."""
        self.restart()
        self.sums_right, self._draws = bool(state["sums_right"]), int(state["draws"])
        self._factor = state["factor"].clone()
        if state["error"] is not None:
            self._error = state["error"].to(self._device, self.dtype, copy=True)

    def factor_shape(self, is_right: bool) -> tuple[int, int]:
        """That of the factor which is summed."""
        return self.shape[is_right], self._rank

    def begin(self, gradient: torch.Tensor | None, takes_part: bool = True) -> torch.Tensor | None:
        """This rank's factor for the sum; None, which counts as zeros, if it takes no part. A missing gradient counts
        as zeros."""
        basis = self._orthonormal(self._factor.double().numpy()).to(self._device)
        if not takes_part:
            self._round = _FactorRound(None, None, basis)
            return None
        given = self._with_error(gradient)
        own = (given.t() if self.sums_right else given) @ basis
        self._round = _FactorRound(given, own, basis)
        return own

    def _with_error(self, gradient: torch.Tensor | None) -> torch.Tensor:
        if not self._low_rank.error_feedback:
            if gradient is None:
                return torch.zeros(self.shape, dtype=self.dtype, device=self._device)
            return gradient.detach().reshape(self.shape).to(self.dtype)
        if self._error is None:
            self._error = torch.zeros(self.shape, dtype=self.dtype, device=self._device)
        if self._spare is None:
            self._spare = torch.empty_like(self._error)
        if gradient is None:
            return self._spare.copy_(self._error)
        return torch.add(self._error, gradient.detach().reshape(self.shape).to(self.dtype), out=self._spare)

    def product(self, total: torch.Tensor) -> torch.Tensor:
        """The gradient that the ``total`` of all ranks' factors stands for, a new tensor."""
        if self._round is None:
            raise RuntimeError("a product without a round")
        total = total.to(self._device)
        left, right = (self._round.basis, total) if self.sums_right else (total, self._round.basis)
        return product(left, right)

    def commit(self, total: torch.Tensor) -> None:
        """The round is over, and its result is used: go on from it. ``total``: on the host, not changed later."""
        done, self._round = self._round, None
        if done is None:
            raise RuntimeError("a round ends that has not begun")
        if self._low_rank.error_feedback and done.given is not None and done.own is not None:
            left, right = (done.basis, done.own) if self.sums_right else (done.own, done.basis)
            self._error, self._spare = done.given.addmm_(left, right.t(), alpha=-1.0), self._error
        self._factor = total
        self.sums_right = not self.sums_right

    def discard(self) -> None:
        """The round is over, and its result is not used: all is as before it."""
        self._round = None

    def _drawn(self, length: int) -> _Numbers:
        """The next numbers between -0.5 and 0.5, the same on all ranks."""
        self._draws += 1
        return np.random.default_rng([self._low_rank.seed, self._identity, self._draws]).random(length) - 0.5

    def _orthonormal(self, columns: _Numbers) -> torch.Tensor:
        """Gram-Schmidt, twice for each column. A column that the others span is drawn anew: it would stay zero."""
        length, count = columns.shape
        found = np.empty((count, length))
        for number in range(count):
            column = columns[:, number]
            while not _is_new(column, rest := _without(column, found[:number])):
                column = self._drawn(length)
            found[number] = rest / math.sqrt(_dot(rest, rest))
        return torch.from_numpy(np.ascontiguousarray(found.T)).to(self.dtype)


def _without(column: _Numbers, others: _Numbers) -> _Numbers:
    """``column`` without its share in ``others``, [number, element], which are orthonormal."""
    for _ in range(2 if len(others) else 0):
        shares = _sums(others * column)
        column = column - _sums((others * shares[:, np.newaxis]).T)
    return column


def _is_new(column: _Numbers, rest: _Numbers) -> bool:
    """True if ``rest`` is a direction, and not what rounding left of ``column``."""
    whole, part = _dot(column, column), _dot(rest, rest)
    return part > _LEAST_SHARE**2 * whole > 0.0


def _dot(left: _Numbers, right: _Numbers) -> float:
    return float(_sums(left * right))


def _sums(numbers: _Numbers) -> _Numbers:
    """Sums along the last dimension: halves are added until one number is left. numpy's own order depends on the
    processor."""
    while (count := numbers.shape[-1]) > 1:
        half = count // 2
        added = numbers[..., :half] + numbers[..., half : 2 * half]
        if count % 2:
            added[..., 0] += numbers[..., -1]
        numbers = added
    return numbers[..., 0]


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left · rightᵀ. An element is the sum of its products in the order of columns, each rounded.

    >>> product(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[3.0, 4.0]])).tolist()
    [[11.0], [4.0]]
    """
    rows, count = left.shape
    columns = right.t().contiguous()
    result = left.new_empty((rows, len(right)))
    step = max(1, _CHUNK // max(1, len(right)))
    each = left.new_empty((min(step, rows), len(right)))
    for first in range(0, rows, step):
        part = result[first : first + step]
        torch.mul(left[first : first + step, :1], columns[0], out=part)
        for number in range(1, count):
            other = each[: len(part)]
            torch.mul(left[first : first + step, number : number + 1], columns[number], out=other)
            part.add_(other)
    return result
