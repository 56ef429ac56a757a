"""A bucket of matrices of which ranks sum factors of low rank: Compression.powersgd.

PowerSGD in its alternating form: one factor of a matrix is summed in each round, and so one sum is enough.

    round 0:  Q drawn ─► orthonormal ─► P = (G + E) Q ─► sum of P over ranks ─► gradient = P Qᵀ,  E = G + E - P Qᵀ
    round 1:  P ─► orthonormal ─► Q = (G + E)ᵀ P ─► sum of Q over ranks ─► gradient = P Qᵀ,  E likewise
    round 2:  as round 0, from the Q of round 1: that is the warm start

(Vogels et al., 2019; alternating: Zhang et al., ACP-SGD, 2023. PowerSGD itself sums P and then Q in each
step.) E is what this rank's own product lacks of its gradient.

All ranks compute with the same sums, and must get the same bits, whatever their processors: so whatever all compute is
made of single operations on elements, in an order that is written down here, and not of BLAS or LAPACK, whose orders
depend on the processor. A rank's own factor and error may be any BLAS's. A LowRankMatrix knows no buckets, names or
sessions.

A FactorBucket owns which form it travels in: during a warm-up as it is, then in turns the left and the right factors,
each a tensor of its own. The caller holds the lock of the GradientReducer.

    hand_over ─ begin each matrix ─► own factors ─► sum ─► write_results ─ products ─► p.grad
    end_round ─ used: factors and errors of this round │ not used: as before it
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from byteps_py.torch.collectives.dtypes import wire_dtype
from byteps_py.torch.collectives.nonfinite import is_finite
from byteps_py.torch.collectives.slot_view import PieceView, TensorRequest
from byteps_py.torch.compression import LowRank
from byteps_py.torch.gradients.bucket import Bucket, BucketParts
from byteps_py.torch.gradients.gradient_checksums import PieceChecksums, checksum_kernel

_Numbers = npt.NDArray[np.float64]
#: The rest of a column, without its share in the others, is noise if it is so much shorter.
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
    """The factors and error of one matrix of ``shape`` from round to round. ``identity``: a number for its name, from
    which draws follow. Its dtype is that in which ranks compute."""

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


#: The forms: as it is; left factors; right factors.
_PLAIN, _LEFT, _RIGHT = range(3)


class FactorBucket(Bucket):
    """See Bucket. All its parameters are matrices that Compression.powersgd compresses in the same way."""

    def __init__(self, parts: BucketParts) -> None:
        super().__init__(parts)
        request, names, params = parts.request, parts.names, parts.params
        low_rank = parts.options.compression.of(names[0], params[0]).low_rank
        if low_rank is None:
            raise RuntimeError(f"{names[0]!r} is not compressed by factors")
        dtype = request.dtype
        self._matrices = [
            LowRankMatrix(low_rank, LowRank.shape_of(param), dtype, param.device, zlib.crc32(name.encode()))
            for name, param in zip(names, params, strict=True)
        ]
        self._requests = [request, self._factor_request(request, False), self._factor_request(request, True)]
        self._views: list[PieceView | None] = [None, None, None]
        self._form = _PLAIN
        self._rounds = 0  # of this session
        self._loaded = 0  # the checksum of factors that were loaded

    def _factor_request(self, request: TensorRequest, is_right: bool) -> TensorRequest:
        shapes = tuple(matrix.factor_shape(is_right) for matrix in self._matrices)
        count = sum(rows * columns for rows, columns in shapes)
        spec = replace(
            request.spec,
            name=f"{request.spec.name} ({'right' if is_right else 'left'} factors)",
            dtype=wire_dtype(request.dtype, self.names[0]),
            shape=shapes[0] if len(shapes) == 1 else (count,),
        )
        return replace(request, spec=spec, shapes=shapes)

    def reset(self) -> None:
        """Begin a round."""
        super().reset()
        self._noted: list[tuple[torch.Tensor, PieceChecksums]] = []  # gradients that were handed over early
        self._totals: list[torch.Tensor] = []  # the sums of factors, once they are there

    # ---- from job to job --------------------------------------------------------------------------------

    def _key(self, position: int) -> str:
        return f"{self._requests[_PLAIN].spec.name}: {self.names[position]}"

    def factor_states(self) -> dict[str, Any]:
        """The state from which the next round goes on, by name, for ``load_factor_states``."""
        return {self._key(position): matrix.state() for position, matrix in enumerate(self._matrices)}

    def load_factor_states(self, states: Mapping[str, Any]) -> set[str]:
        """Go on from ``states`` if all matrices are there and fit. Returns the names of those that were taken."""
        mine = [states.get(self._key(position)) for position in range(len(self._matrices))]
        found = [state for state in mine if state is not None]
        fit = all(matrix.fits(state) for matrix, state in zip(self._matrices, found, strict=False))
        if len(found) < len(mine) or not fit or len({state["sums_right"] for state in found}) > 1:
            return set()
        for matrix, state in zip(self._matrices, found, strict=True):
            matrix.load(state)
        self._loaded = zlib.crc32(b"".join(state["factor"].numpy().tobytes() for state in found))
        return {self._key(position) for position in range(len(found))}

    # ---- the form --------------------------------------------------------------------------------------

    def begin_session(self, warmup_steps: int) -> None:
        """See Bucket.begin_session. Factors and errors begin anew."""
        self._views = [None, None, None]
        self._rounds = self._loaded = 0
        for matrix in self._matrices:
            matrix.restart()
        self._form, self.request, self.slot_view = _PLAIN, self._requests[_PLAIN], None
        self.choose_form(warmup_steps)

    def after_join(self) -> None:
        """See Bucket.after_join: a rank that had joined has other factors than those that went on."""
        for matrix in self._matrices:
            matrix.restart()

    def choose_form(self, warmup_steps: int) -> None:
        """See Bucket.choose_form."""
        form = _PLAIN if self._rounds < warmup_steps else _RIGHT if self._matrices[0].sums_right else _LEFT
        if form != self._form:
            self._views[self._form] = self.slot_view
            self._form = form
            self.request, self.slot_view = self._requests[form], self._views[form]

    def prioritize(self, priority: int) -> None:
        """See Bucket.prioritize."""
        self._requests = [replace(each, spec=replace(each.spec, priority=priority)) for each in self._requests]
        self.request = self._requests[self._form]

    def set_terms(self, terms: str) -> None:
        """See Bucket.set_terms."""
        self._requests = [replace(each, spec=replace(each.spec, terms=terms)) for each in self._requests]
        self.request, self.slot_view = self._requests[self._form], None
        self._views = [None, None, None]

    def take_over(self, other: Bucket, positions: Sequence[int]) -> None:
        """See Bucket.take_over. Factors and errors go on, too."""
        super().take_over(other, positions)
        if isinstance(other, FactorBucket):
            self._matrices = [other._matrices[i] for i in positions]
            self._rounds = other._rounds
            for matrix in self._matrices:
                matrix.discard()

    def describe(self, position: int) -> str:
        """See Bucket.describe: the service sees the shape of a factor only."""
        param = self.params[position]
        loaded = f", with loaded factors {self._loaded:08x}" if self._loaded else ""
        return f"{self.names[position]!r} {str(param.dtype).removeprefix('torch.')}{list(param.shape)}{loaded}"

    # ---- a round ---------------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        return self._rounds if self.slot_view is not None else 0

    def hand_over(self, gradients: Sequence[torch.Tensor | None], is_early: bool = False) -> None:
        """See Bucket.hand_over."""
        if self.slot_view is None:
            return
        self._rounds += 1
        if self._form == _PLAIN:
            super().hand_over(gradients, is_early)
            return
        self.gives = [grad is not None for grad in gradients]
        if is_early:
            self._note(gradients)
        with torch.no_grad(), torch.autocast(self.params[0].device.type, enabled=False):
            factors = [
                matrix.begin(grad, participates)
                for matrix, grad, participates in zip(self._matrices, gradients, self.participates, strict=True)
            ]
        self.slot_view.contribute(self._contribution(factors))

    def _note(self, gradients: Sequence[torch.Tensor | None]) -> None:
        checksum_kernel().prepare()
        for grad in gradients:
            if grad is not None and grad.is_cpu and grad.is_contiguous():
                checksums = PieceChecksums([grad.nbytes])
                checksums.note(grad.data_ptr())
                self._noted.append((grad, checksums))

    @property
    def changed(self) -> str | None:
        touched = super().changed
        if touched is None:
            changed = {id(grad) for grad, sums in self._noted if sums.changed(grad.data_ptr()) is not None}
            touched = next((n for n, p in zip(self.names, self.params, strict=True) if id(p.grad) in changed), None)
        return touched

    @property
    def results(self) -> list[torch.Tensor] | None:
        """See Bucket.results: those of factors say nothing about places in gradients."""
        return super().results if self._form == _PLAIN else None

    def write_results(self) -> None:
        """See Bucket.write_results."""
        if self._form == _PLAIN or self.slot_view is None:
            super().write_results()
            return
        after = self.options.after(self.slot_view.session.size)
        with torch.no_grad(), torch.autocast(self.params[0].device.type, enabled=False):
            # Copies: the memory is the service's, and the next round begins with them.
            self._totals = [each * after if after != 1.0 else each.clone() for each in self.slot_view.results]
            for param, matrix, total, participates in zip(
                self.params, self._matrices, self._totals, self.participates, strict=True
            ):
                if participates:
                    _assign(param, matrix.product(total))

    @property
    def is_usable(self) -> bool:
        """See Bucket.is_usable."""
        return all(map(is_finite, self._totals))

    def end_round(self, is_used: bool) -> None:
        """See Bucket.end_round."""
        totals, self._totals = self._totals, []
        for matrix, total in zip(self._matrices, totals, strict=False):
            if is_used:
                matrix.commit(total)
            else:
                matrix.discard()


def _assign(param: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    if param.dtype is gradient.dtype and param.is_contiguous():
        param.grad = gradient.view(param.shape)
    else:
        param.grad = torch.empty_like(param).copy_(gradient.view(param.shape))
