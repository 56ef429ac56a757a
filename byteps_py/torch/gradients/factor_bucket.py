"""A bucket of matrices of which ranks sum factors of low rank: Compression.powersgd.

Owns which form the bucket travels in: during a warm-up as it is, then in turns the left and the right factors
(low_rank.py), each a tensor of its own. The caller holds the lock of the GradientReducer.

    hand_over ─ begin each matrix ─► own factors ─► sum ─► write_results ─ products ─► p.grad
    end_round ─ used: factors and errors of this round │ not used: as before it
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from byteps_py.torch.collectives.dtypes import wire_dtype
from byteps_py.torch.collectives.nonfinite import is_finite
from byteps_py.torch.collectives.slot_view import PieceView, TensorRequest
from byteps_py.torch.compression import LowRank
from byteps_py.torch.gradients.bucket import Bucket, Delivery, GradientOptions
from byteps_py.torch.gradients.gradient_checksums import PieceChecksums, Scratch, checksum_kernel
from byteps_py.torch.gradients.low_rank import LowRankMatrix

#: The forms: as it is; left factors; right factors.
_PLAIN, _LEFT, _RIGHT = range(3)


class FactorBucket(Bucket):
    """See Bucket. All its parameters are matrices that Compression.powersgd compresses in the same way."""

    def __init__(
        self,
        request: TensorRequest,
        names: list[str],
        params: list[torch.nn.Parameter],
        options: GradientOptions,
        first: int,
        scratch: Scratch,
        delivery: Delivery,
    ) -> None:
        super().__init__(request, names, params, options, first, scratch, delivery)
        low_rank = options.compression.of(names[0], params[0]).low_rank
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
        """What the next round goes on from, by name, for ``load_factor_states``."""
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
