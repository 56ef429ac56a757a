"""How a DistributedOptimizer makes its steps. Each optimizer has one Stepper, of one of these kinds:

    LocalStepper            averages of all ranks' gradients, then the wrapped optimizer's step, on each rank
    AdasumStepper           the wrapped optimizer's step, then the changes of weights are combined
    BarrierStepper          CrossBarrier: the wrapped optimizer's step, layer by layer, under the next forward pass
    HostedStepper           the services step with the sums; its StepTiming says when

Owns the order of calls (backward, synchronize, step, zero_grad). backward_passes.py knows which gradients were
computed, gradient_reducer.py combines them. The training thread calls.

With Adasum each rank steps on its own gradients, then ranks combine the changes of weights:

    start = weights;  the wrapped optimizer steps;  delta = weights - start;  weights = start + adasum(deltas)

So momentum and the like are applied before ranks are combined, as in Horovod. operations/adasum.py explains Adasum.
With BYTEPS_NONFINITE=raise or skip, ranks first exchange whether their gradients are finite, because a step with NaN
leaves NaN in the optimizer's state. The exchange is a guarded sum of one number for each parameter, NaN where its
gradient is not finite.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from byteps_py import rank_bits
from byteps_py.errors import GradientOrderError, NonFiniteError
from byteps_py.session import Slot
from byteps_py.tensors import DType, NonFinite, Op, TensorSpec
from byteps_py.torch.collectives import context as contexts, nonfinite
from byteps_py.torch.collectives.context import Context, Unfinished
from byteps_py.torch.collectives.parameter_owners import check_unowned
from byteps_py.torch.compression import Compressor
from byteps_py.torch.gradients.backward_passes import BackwardPasses
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.operations.adasum import start

Names = dict[torch.nn.Parameter, str]


@dataclass(frozen=True, slots=True)
class StepCall:
    """A call of ``optimizer.step()``.

    closure: its argument. on_rank: step() of the wrapped optimizer's class. grad_scale: a GradScaler's, which has not
    unscaled gradients; None if it has, or if there is none. overflows: it has found an infinity, on some rank.
    """

    closure: Callable[[], Any] | None
    on_rank: Callable[..., Any]
    grad_scale: torch.Tensor | None = None
    overflows: bool = False


class WrappedOptimizer:
    """The optimizer that a script has passed to DistributedOptimizer, and the gradients of its parameters.

    optimizer: owns groups and state. names: of the parameters. passes: over them. on_new: called with the names and
    parameters of new groups, before their gradients are combined.
    """

    on_new: Callable[[Sequence[tuple[str, torch.nn.Parameter]]], None] | None = None

    def __init__(self, optimizer: torch.optim.Optimizer, names: Names, passes: BackwardPasses) -> None:
        self.optimizer, self.names, self.passes = optimizer, names, passes
        self.groups_added = len(optimizer.param_groups)  # whose gradients are combined

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Its param_groups."""
        return self.optimizer.param_groups

    @property
    def params(self) -> list[torch.nn.Parameter]:
        """All of its parameters."""
        return [param for group in self.groups for param in group["params"]]

    def hook(self) -> None:
        """Have hooks on parameters that were unfrozen, too."""
        self.passes.hook(self.params)

    def mark_stepped(self) -> None:
        """Mark it as stepped: schedulers made with it warn if they are stepped before it."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def add_groups(self) -> None:
        """Combine also the gradients of groups that were added to the optimizer or to the one that wraps it."""
        new = []
        for number, group in enumerate(self.groups[self.groups_added :], self.groups_added):
            for i, param in enumerate(group["params"]):
                new.append((self.names.setdefault(param, f"push_pull.parameter.{number}.{i}"), param))
        if new:
            check_unowned(new, "DistributedOptimizer")
            if self.on_new is not None:
                self.on_new(new)
            self.passes.add(new)
            self.groups_added = len(self.groups)


class Averages:
    """Averages of gradients, which replace them on the ranks: by synchronize(), or by the step itself."""

    def __init__(self, wrapped: WrappedOptimizer, reducer: GradientReducer) -> None:
        self._wrapped, self._reducer = wrapped, reducer
        self._are_there = False
        #: Set by synchronize() if the next step must be skipped.
        self.nonfinite_error: NonFiniteError | None = None
        #: False inside skip_synchronize().
        self.are_wanted = True
        #: They are there for a GradScaler, not because the script has called synchronize().
        self.are_for_scaler = False

    @property
    def are_current(self) -> bool:
        """True from synchronize() until a step uses them, or the next backward pass."""
        return self._are_there and not self._wrapped.passes.has_begun

    def synchronize(self) -> None:
        """See DistributedOptimizer."""
        self.nonfinite_error = None
        self.are_for_scaler = False
        self._wrapped.add_groups()
        self._reducer.finish()
        self.nonfinite_error = self._reducer.nonfinite_error
        self._are_there = True
        self._wrapped.hook()

    def unscale(self) -> None:
        """A GradScaler is about to unscale gradients in place and check them for NaN and infinity. They must be the
        averages by then, so that all ranks find the same."""
        if self.are_wanted and not self.are_current:
            self.synchronize()
            self.are_for_scaler = True

    @contextlib.contextmanager
    def skipped(self) -> Iterator[None]:
        """Inside, a step uses the gradients as they are."""
        self.are_wanted = False
        try:
            yield
        finally:
            self.are_wanted = True

    def use(self) -> NonFiniteError | None:
        """A step uses them. Returns the error if it must be skipped."""
        self._are_there = False
        error, self.nonfinite_error = self.nonfinite_error, None
        return error

    def zero(self) -> None:
        """Gradients are about to be zeroed. If no step has used the averages, all ranks must do so."""
        if self._are_there and self.nonfinite_error is None:
            self._reducer.note_unused_averages()
        self.use()

    def forget(self) -> None:
        """All ranks are about to have equal state."""
        self._are_there = False
        self._reducer.forget_unused_averages()


class Stepper(abc.ABC):
    """Makes the steps of one optimizer. ``refusal`` says what its kind does not do."""

    #: What synchronize() computes; None: gradients stay this rank's own.
    averages: Averages | None = None
    #: The ranks that combine gradients; (): all.
    group: tuple[int, ...] = ()
    #: Where steps may be under way when step() has returned: these.
    under_way: Unfinished | None = None

    def __init__(self, wrapped: WrappedOptimizer) -> None:
        self.wrapped = wrapped

    def refusal(self, call: str) -> Exception | None:
        """Why the optimizer can't carry out the method ``call`` now ("unscale_": that of a GradScaler); None if it
        can."""
        if not self.wrapped.passes.has_begun:
            return None
        if call == "zero_grad":
            return GradientOrderError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition. To drop the "
                "gradients, call optimizer.synchronize() first."
            )
        if call == "set_backward_passes_per_step":
            return GradientOrderError("set_backward_passes_per_step() was called between backward() and step()")
        return None

    @abc.abstractmethod
    def step(self, call: StepCall) -> Any:
        """Make a step. Returns the closure's loss."""

    @abc.abstractmethod
    def groups_to_unscale(self) -> list[dict[str, Any]]:
        """The param_groups that a GradScaler unscales and checks, which it is about to do."""

    def zero(self) -> None:
        """Gradients are about to be zeroed."""
        if self.averages is not None:
            self.averages.zero()

    def state_replaced(self) -> None:
        """All ranks are about to have equal state. Also called on the rank that sends its state."""
        if self.averages is not None:
            self.averages.forget()

    def finish(self) -> None:
        """Complete the steps that are under way. Raises their errors."""
        if self.under_way is not None:
            self.under_way.finish()

    def drop(self) -> None:
        """Discard gradients that were computed since the last step."""
        self.wrapped.passes.drop()


class _SkipStepError(Exception):
    """Ends the wrapped optimizer's step before it uses gradients that are not finite."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class LocalStepper(Stepper):
    """Each rank steps with the averages of all ranks."""

    averages: Averages

    def __init__(self, wrapped: WrappedOptimizer, reducer: GradientReducer) -> None:
        super().__init__(wrapped)
        self.reducer = reducer
        self.averages = Averages(wrapped, reducer)
        self.group = reducer.group

    def step(self, call: StepCall) -> Any:
        """Synchronize, unless the script has done so, then let the wrapped optimizer step."""
        averages, closure, is_followed = self.averages, call.closure, False
        if averages.are_wanted:
            if closure is not None:
                closure = self._synchronizing(closure)
                is_followed = True
            elif not averages.are_current:
                averages.synchronize()
            elif not averages.are_for_scaler:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): the "
                    "gradients are taken as they are, as inside it. Write `with optimizer.skip_synchronize():` around "
                    "the step to say so",
                    stacklevel=3,
                )
        nonfinite_error = averages.use()
        self.wrapped.mark_stepped()
        if nonfinite_error is not None and closure is None:
            nonfinite.report(nonfinite_error, contexts.current().session)
            return None
        try:
            loss = call.on_rank(closure)
        except _SkipStepError as skipped:
            return skipped.loss
        if is_followed:
            self.reducer.check_closure_calls(None)
        return loss

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        evaluations = itertools.count(1)

        def evaluate() -> Any:
            loss = closure()
            self.reducer.check_closure_calls(next(evaluations))
            self.averages.synchronize()
            nonfinite_error = self.averages.use()  # the optimizer uses them at once
            if nonfinite_error is not None:
                nonfinite.report(nonfinite_error, contexts.current().session)
                raise _SkipStepError(loss)
            return loss

        return evaluate

    def groups_to_unscale(self) -> list[dict[str, Any]]:
        self.averages.unscale()
        return self.wrapped.groups


class DeltaExchange:
    """Combines changes of parameters over the ranks of ``group`` (empty: all). The training thread calls."""

    def __init__(self, context: Context, name: str, group: tuple[int, ...], compression: type[Compressor]) -> None:
        self._context = context
        self._name = name
        self.group = group
        self._compression = compression

    @property
    def alone(self) -> bool:
        """True if no other rank takes part. Raises NotInitializedError after a shutdown."""
        session = self._context.session
        session.check_open()
        return (len(self.group) or session.size) == 1 or session.rank not in (self.group or (session.rank,))

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
            spec = TensorSpec(f"{self._name}.nonfinite", DType.FLOAT32, found.shape, nonfinite=mode, group=self.group)
            slot = self._exchanged(spec, found)
            found, blame, step = np.frombuffer(slot.result, np.float32), slot.nonfinite_ranks, slot.round
        bad = [repr(names[param]) for param, value in zip(params, found, strict=True) if math.isnan(value)]
        return nonfinite.explain(blame, session.size, step, bad) if bad else None

    def any_rank(self, flag: bool) -> bool:
        """True if ``flag`` is true on any rank; the same on all ranks."""
        if self.alone:
            return flag
        spec = TensorSpec(f"{self._name}.anyone", DType.UINT8, (1,), Op.MAX, group=self.group)
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
                    self.group,
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
        self.group = deltas.group

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
