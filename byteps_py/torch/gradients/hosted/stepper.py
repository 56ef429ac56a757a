"""How a hosted optimizer makes its steps: sums go to the services, which step, and parameters come back.

    sum() ─► numbers() ─► agree() ─► make(): begin, record, take

Owns the factors of the next step. The order is that of a StepTiming: this one, or that of delay.py or in_backward.py.
The training thread calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from byteps_py.errors import JoinedError, NonFiniteError, UsageError
from byteps_py.kernels.update_rules import Hyperparameters
from byteps_py.tensors import NonFinite
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives import nonfinite
from byteps_py.torch.collectives.context import Context, Unfinished
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.hosted.agreement import (
    GroupNumbers,
    compare_numbers,
    explain_overflow,
    overflows,
    total_norm,
)
from byteps_py.torch.gradients.hosted.bucket_states import BucketStates, Loaded
from byteps_py.torch.gradients.hosted.replication import ShadowedSteps
from byteps_py.torch.gradients.hosted.rules import check_numbers
from byteps_py.torch.gradients.hosted.states import Factors
from byteps_py.torch.gradients.hosted.steps import BegunStep, SumSteps
from byteps_py.torch.gradients.stepper import StepCall, Stepper, WrappedOptimizer

#: Begins the error of a step that needs a rank that has joined.
_NO_JOIN = (
    "a hosted optimizer does not go together with join(): a step needs the gradients of all ranks, each of which may "
    "own states. Give all ranks the same number of batches, or leave hosted, or shadow, out"
)
_NO_AVERAGES = (
    "a hosted optimizer does not bring averages back to the ranks: synchronize() has nothing to wait for. To "
    "clip, call optimizer.clip_grad_norm_(max_norm) before step()"
)
_REFUSED = {"synchronize": _NO_AVERAGES, "skip_synchronize": _NO_AVERAGES}


class GradientProbe:
    """A parameter of one element that a GradScaler unscales in place of those of a hosted optimizer, whose averages are
    not on the ranks. Its gradient is 1, so that the scaler leaves the factor there; or infinite, so that it skips."""

    def __init__(self) -> None:
        self._param = torch.zeros(1, dtype=torch.float32, device="cpu")
        self._param.grad = torch.ones(1, dtype=torch.float32, device="cpu")

    def groups(self, overflows: bool) -> list[dict[str, list[torch.Tensor]]]:
        """The param_groups for a scaler that is about to unscale them."""
        self._gradient.fill_(float("inf") if overflows else 1.0)
        return [{"params": [self._param]}]

    @property
    def factor(self) -> float:
        """What the scaler has multiplied gradients by."""
        return float(self._gradient)

    @property
    def _gradient(self) -> torch.Tensor:
        if self._param.grad is None:
            self._param.grad = torch.ones(1, dtype=torch.float32, device="cpu")
        return self._param.grad


class StepFactors:
    """What the averages of the next step are multiplied by. They belong to sums that no step has taken.

    overflows: the step must be skipped. nonfinite_error: why, if BYTEPS_NONFINITE wants to know.
    """

    def __init__(self) -> None:
        self.probe = GradientProbe()
        self.forget()

    def forget(self) -> None:
        """The sums are used, or dropped."""
        self.unscale = self.clip = 1.0
        self.overflows = False
        self.nonfinite_error: NonFiniteError | None = None
        self.probe.groups(overflows=False)

    @property
    def values(self) -> Factors:
        """For a step that is made now."""
        return Factors(self.unscale, self.clip)


class StepAgreement:
    """What all ranks must have alike in a step. ``name``: of what they exchange. ``shadow``: travels along."""

    def __init__(self, name: str, shadow: ShadowedSteps | None) -> None:
        self.name, self._shadow = name, shadow
        self.factors = StepFactors()

    def reach(self, step: GroupNumbers) -> None:
        """Raises MismatchError, on all ranks, if they differ. All ranks call it."""
        others = self._shadow.own_record if self._shadow is not None else ()
        found = compare_numbers(contexts.current(), self.name, step, self.factors.values, others)
        if self._shadow is not None:
            self._shadow.agree(found)


class StepTiming:
    """When a hosted optimizer makes its steps: in step(). The stepper, which holds it, calls it with itself."""

    #: Where steps may be under way when step() has returned: these.
    under_way: Unfinished | None = None

    def refusal(self, stepper: HostedStepper, call: str) -> Exception | None:
        """See Stepper: what this timing does not go together with."""
        return None

    def step(self, stepper: HostedStepper, call: StepCall) -> None:
        """Sum what backward() has computed, let the services step, and take the new parameters."""
        stepper.sum()  # first: a rank whose numbers are wrong must not leave the others waiting for its gradients
        step = stepper.numbers()
        stepper.prepare(call)
        stepper.agreement.reach(step)
        stepper.make(step.numbers)

    def clip(self, stepper: HostedStepper, max_norm: float) -> torch.Tensor:
        """Clip the gradients of the next step. Returns the norm that is known."""
        stepper.sum()
        return stepper.find_clip(max_norm)

    def zero(self, stepper: HostedStepper) -> None:
        """Gradients are about to be zeroed."""
        stepper.drop_sums()

    def drop(self, stepper: HostedStepper) -> None:
        """Discard gradients that were computed since the last step."""
        stepper.wrapped.passes.drop()


class HostedStepper(Stepper):
    """The services step. ``timing``: when."""

    def __init__(
        self,
        context: Context,
        wrapped: WrappedOptimizer,
        reducer: GradientReducer,
        states: BucketStates,
        agreement: StepAgreement,
        timing: StepTiming,
    ) -> None:
        super().__init__(wrapped)
        self.reducer, self.states, self.agreement, self.timing = reducer, states, agreement, timing
        self.groups, self.shadow = states.groups, states.shadow
        self.name, self.factors = agreement.name, agreement.factors
        self.steps = SumSteps(context, reducer, states)
        self.under_way = timing.under_way

    def refusal(self, call: str) -> Exception | None:
        if call in _REFUSED:
            return UsageError(_REFUSED[call])
        return self.timing.refusal(self, call) or super().refusal(call)

    def step(self, call: StepCall) -> Any:
        """See StepTiming. Raises UsageError for a closure; a JoinedError says that a hosted optimizer has raised it."""
        if call.closure is not None:
            raise UsageError(
                "a hosted optimizer takes no closure: a closure evaluates the loss for parameters that the service "
                "would have to send back each time. Call backward() before step()"
            )
        try:
            self.timing.step(self, call)
        except JoinedError as error:
            if str(error).startswith(_NO_JOIN):
                raise
            raise JoinedError(f"{_NO_JOIN} ({error})") from None

    def sum(self) -> None:
        """Have sums, unless they are there, and find out what is wrong with them."""
        if self.steps.are_due and not self.wrapped.passes.has_begun:
            if not self.factors.overflows:
                self.factors.unscale = self.factors.probe.factor
            return
        self.factors.forget()
        self.wrapped.add_groups()
        self.finish_sums()

    def finish_sums(self, bad: Sequence[bool] | None = None) -> None:
        """Hand over the rest of the gradients. ``bad``: which of them are not finite; None: to be found out."""
        self.reducer.finish()
        self.states.follow(self.reducer)
        if self.shadow is not None:
            self.shadow.start(contexts.current())
        if (wanted := nonfinite.wanted(contexts.current())) is not NonFinite.ALLOW and self._find_overflow():
            buckets = self.reducer.buckets
            names = [name for bucket in buckets for name in bucket.names]
            latest = max((bucket.round for bucket in buckets), default=0)
            bad = self.steps.bad_gradients() if bad is None else bad
            error = explain_overflow(contexts.current(), self.name, names, bad, latest)
            self.factors.nonfinite_error = error
            if wanted is NonFinite.RAISE:
                self.steps.skip()
                raise error

    def _find_overflow(self) -> bool:
        return overflows(contexts.current(), self.name, self.steps.square_sum())

    def numbers(self) -> GroupNumbers:
        """For a step that is made now."""
        return GroupNumbers(self.groups.numbers, self.groups.rules)

    def prepare(self, call: StepCall) -> None:
        """What belongs to the step beside numbers."""
        if call.grad_scale is not None:  # otherwise the scaler has unscaled already
            self.factors.unscale = float(call.grad_scale.double().reciprocal().float())
        if self.shadow is not None:
            self.shadow.pack_extra()

    def make(self, numbers: Sequence[Hyperparameters], begun: Sequence[BegunStep] = ()) -> None:
        """Make the step that ranks have agreed on. ``begun``: already."""
        new = self.begin(numbers)
        if new is not None:
            self.steps.record(self.wrapped.groups)
            self.steps.take([*begun, *new])
            self.states.note_step(takes_over=self.shadow is not None)
            if self.shadow is not None:
                self.shadow.taken_over()
        elif self.shadow is not None:
            self.shadow.calls += 1
        self.factors.forget()
        self.wrapped.mark_stepped()
        self.wrapped.hook()

    def begin(self, numbers: Sequence[Hyperparameters]) -> list[BegunStep] | None:
        """Begin the step; None if it is skipped."""
        check_numbers(numbers)
        if self.factors.nonfinite_error is not None:
            nonfinite.tell(self.factors.nonfinite_error, contexts.current().session)
            self.factors.overflows = True
        if self.factors.overflows:
            self.steps.skip()
            return None
        return self.steps.begin(numbers, self.factors.values)

    def clip(self, max_norm: float) -> torch.Tensor:
        """See HostedOptimizerMixin."""
        if math.isnan(max_norm) or max_norm < 0:
            raise UsageError(f"max_norm is {max_norm}: give a number from 0 up")
        return self.timing.clip(self, max_norm)

    def find_clip(self, max_norm: float) -> torch.Tensor:
        """Clip the sums that are there. Returns their norm."""
        norm = total_norm(self.name, self.steps.square_sum() * self.factors.unscale**2)
        factor = max_norm / (float(norm) + 1e-6)
        self.factors.clip = 1.0 if factor > 1.0 else factor  # NaN stays NaN, as in torch
        return norm

    def groups_to_unscale(self) -> list[dict[str, Any]]:
        """The step unscales instead. See GradientProbe."""
        self.sum()
        self.factors.overflows = self._find_overflow()
        return self.factors.probe.groups(self.factors.overflows)

    def drop_sums(self) -> None:
        """Make no step with the sums that are there."""
        self.steps.skip()
        self.factors.forget()

    def zero(self) -> None:
        self.timing.zero(self)

    def drop(self) -> None:
        self.timing.drop(self)

    def state_replaced(self) -> None:
        self.drop_sums()

    def load(self, given: Loaded) -> None:
        """Take over these states with the next step, in place of those that there are. Raises UsageError if they lack
        something. They must not change."""
        self.states.check(given, self.wrapped.names)
        self.states.forget()
        self.states.load(given)
