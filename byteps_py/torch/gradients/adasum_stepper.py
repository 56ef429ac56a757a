"""DistributedOptimizer(op=Adasum): each rank steps on its own gradients, then ranks combine the changes of weights.

    start = weights;  the wrapped optimizer steps;  delta = weights - start;  weights = start + adasum(deltas)

So momentum and the like are applied before ranks are combined, as in Horovod. Owns the deltas; operations/adasum.py
explains Adasum. The training thread calls; hooks (backward_passes.py) only count passes.

With BYTEPS_NONFINITE=raise or skip, ranks first exchange whether their gradients are finite, because a step with NaN
leaves NaN in the optimizer's state. The exchange is a guarded sum of one number for each parameter, NaN where its
gradient is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from byteps_py import rank_bits
from byteps_py.errors import GradientOrderError, NonFiniteError
from byteps_py.session import Slot
from byteps_py.tensors import DType, NonFinite, Op, TensorSpec
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives import nonfinite
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.compression import Compressor
from byteps_py.torch.gradients.stepper import StepCall, Stepper, WrappedOptimizer
from byteps_py.torch.operations.adasum import start


class DeltaExchange:
    """Combines changes of parameters over the ranks of ``group`` (empty: all). The training thread calls."""

    def __init__(self, context: Context, name: str, group: tuple[int, ...], compression: type[Compressor]) -> None:
        self._context = context
        self._name = name
        self._group = group
        self._compression = compression

    @property
    def alone(self) -> bool:
        """True if no other rank takes part. Raises NotInitializedError after a shutdown."""
        session = self._context.session
        session.check_open()
        return (len(self._group) or session.size) == 1 or session.rank not in (self._group or (session.rank,))

    @property
    def nonfinite(self) -> NonFinite:
        """The value of BYTEPS_NONFINITE."""
        return nonfinite.mode_of(self._context)

    def find_nonfinite(
        self, names: Mapping[torch.nn.Parameter, str], params: Sequence[torch.nn.Parameter]
    ) -> NonFiniteError | None:
        """A NonFiniteError if gradients of ``params`` are not finite on any rank, else None; the same on all ranks.

        Always None if BYTEPS_NONFINITE is allow.
        """
        mode, session = self.nonfinite, self._context.session
        if not mode or not params:
            return None
        found = np.array([0.0 if p.grad is None or nonfinite.is_finite(p.grad) else math.nan for p in params], "f4")
        blame, step = 0, 0
        if self.alone:
            blame = rank_bits.of_rank(session.rank, session.size) if np.isnan(found).any() else 0
        else:
            spec = TensorSpec(f"{self._name}.nonfinite", DType.FLOAT32, found.shape, nonfinite=mode, group=self._group)
            slot = self._exchanged(spec, found)
            found, blame, step = np.frombuffer(slot.result, np.float32), slot.nonfinite_ranks, slot.round
        bad = [repr(names[param]) for param, value in zip(params, found, strict=True) if math.isnan(value)]
        return nonfinite.explain(blame, session.size, step, bad) if bad else None

    def any_rank(self, flag: bool) -> bool:
        """True if ``flag`` is true on any rank; the same on all ranks."""
        if self.alone:
            return flag
        spec = TensorSpec(f"{self._name}.anyone", DType.UINT8, (1,), Op.MAX, group=self._group)
        return bool(self._exchanged(spec, np.array([flag], np.uint8)).result[0])

    def _exchanged(self, spec: TensorSpec, own: np.ndarray) -> Slot:
        session = self._context.session
        (slot,) = session.declare([spec])
        np.frombuffer(slot.input, own.dtype)[:] = own
        session.hand_over(slot)
        session.wait(slot)
        return slot

    def combine(self, deltas: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The Adasum of each of ``deltas``, in its own dtype. Those with one dtype on the wire travel together."""
        kinds: dict[torch.dtype, list[int]] = {}
        for index, delta in enumerate(deltas):
            kinds.setdefault(self._compression.wire_dtype(delta.dtype), []).append(index)
        running = [
            (
                indices,
                start(
                    self._context,
                    [deltas[index].to(dtype) for index in indices],
                    f"{self._name}.{str(dtype).removeprefix('torch.')}",
                    self._group,
                ),
            )
            for dtype, indices in kinds.items()
        ]
        combined = list(deltas)
        for indices, operation in running:
            for index, result in zip(indices, operation.wait(), strict=True):
                combined[index] = result.to(deltas[index].dtype)
        return combined


class AdasumStepper(Stepper):
    """Each rank steps on its own gradients, which may be clipped before step(). A missing gradient counts as zeros."""

    def __init__(self, wrapped: WrappedOptimizer, deltas: DeltaExchange) -> None:
        super().__init__(wrapped)
        self._deltas = deltas

    def refusal(self, call: str) -> Exception | None:
        if call == "skip_synchronize" and not self._deltas.alone:
            return GradientOrderError(
                "Skipping synchronization is not supported when using Adasum optimizer: it combines what step() changes"
            )
        return super().refusal(call)

    def groups_to_unscale(self) -> list[dict[str, Any]]:
        """The scaler skips the step if this rank's gradients are not finite. Then all ranks must skip it, so each rank
        that has finite gradients gets a NaN."""
        wrapped = self.wrapped
        params = [p for p in wrapped.params if p.requires_grad]
        given = [param for param in params if param.grad is not None]
        gradients = [param.grad for param in given if param.grad is not None]
        if not params or not self._deltas.any_rank(not all(map(nonfinite.is_finite, gradients))):
            return wrapped.groups
        param = (given or params)[0]
        param.grad = torch.full_like(param, math.nan)
        wrapped.passes.drop()  # zero_grad() comes next
        return wrapped.groups

    def step(self, call: StepCall) -> Any:
        """Let the wrapped optimizer step, and combine the changes over ranks. If combining fails, the weights stay as
        before the step. Raises NonFiniteError, and what allreduce raises."""
        wrapped = self.wrapped
        loss = None if call.closure is None else call.closure()
        wrapped.mark_stepped()
        wrapped.add_groups()
        params = [p for p in wrapped.params if p.requires_grad]
        wrapped.hook()
        wrapped.passes.drop()
        nonfinite_error = self._deltas.find_nonfinite(wrapped.names, params)
        if nonfinite_error is not None and self._deltas.nonfinite is NonFinite.RAISE:
            raise nonfinite_error
        if nonfinite_error is not None:
            nonfinite.report(nonfinite_error, contexts.current().session)
            return loss
        if self._deltas.alone:
            call.on_rank()
            return loss
        for param in params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        before = [param.detach().clone() for param in params]
        try:
            call.on_rank()
            changes = [param.detach() - old for param, old in zip(params, before, strict=True)]
            changes = self._deltas.combine(changes)
        except BaseException:
            _assign(params, before)
            raise
        _assign(params, [old + change for old, change in zip(before, changes, strict=True)])
        return loss


def _assign(params: Sequence[torch.nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)
