"""A hosted optimizer makes its steps: sums go to the services, which step, and parameters come back.

    sum() ─► numbers ─► agree() ─► make(): begin, record, take

Owns the factors of the next step. The order is that of a StepTiming: this one, or one of timings.py.
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
from byteps_py.torch.collectives import context as contexts, nonfinite
from byteps_py.torch.collectives.context import Unfinished
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.hosted.agreement import (
    AnnouncedStep,
    BadGradients,
    Factors,
    compare_numbers,
    explain_overflow,
    largest,
    members,
    overflows,
    total_square_sums,
)
from byteps_py.torch.gradients.hosted.replication import ShadowedSteps
from byteps_py.torch.gradients.hosted.rules import GroupNumbers, check_numbers
from byteps_py.torch.gradients.hosted.states import Loaded
from byteps_py.torch.gradients.hosted.steps import BucketStep, SumSteps
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


#: unscale, share, clip, overflows of a NextStep, and the gradient that a GradScaler has multiplied.
NextStepFacts = tuple[float, float, float, bool, float]


class NextStep:
    """The facts of the next step beside sums and numbers. ``name``: begins the names of the tensors that ranks
    exchange. ``group``: these ranks, () for all. ``shadow``: travels along.

    unscale, share, clip: factors of the averages, until a step has taken the sums that they belong to; share: of a loss
    whose number of terms is known after the backward pass only. overflows: the step must be skipped. nonfinite_error:
    why, if BYTEPS_NONFINITE wants to know.

    A GradScaler unscales a parameter of one element in place of those of the optimizer, whose averages are not on the
    ranks. Its gradient is 1, so that the scaler leaves the factor there; or infinite, so that it skips.
    """

    def __init__(self, name: str, group: tuple[int, ...], shadow: ShadowedSteps | None) -> None:
        self.name, self.group, self._shadow = name, group, shadow
        self._probe = torch.zeros(1, dtype=torch.float32, device="cpu")
        self.forget()

    def forget(self) -> None:
        """The sums are used, or dropped."""
        self.unscale = self.share = self.clip = 1.0
        self.overflows = False
        self.nonfinite_error: NonFiniteError | None = None
        self._gradient.fill_(1.0)

    def facts(self) -> NextStepFacts:
        """All of it, for ``set_facts``, with sums that are the same."""
        return self.unscale, self.share, self.clip, self.overflows, float(self._gradient)

    def set_facts(self, facts: NextStepFacts) -> None:
        """See ``facts``."""
        self.unscale, self.share, self.clip, self.overflows, gradient = facts
        self._gradient.fill_(gradient)

    @property
    def factors(self) -> Factors:
        """For a step that is made now."""
        return Factors(self.unscale * self.share, self.clip)

    @property
    def _gradient(self) -> torch.Tensor:
        if self._probe.grad is None:
            self._probe.grad = torch.ones(1, dtype=torch.float32, device="cpu")
        return self._probe.grad

    def groups_to_unscale(self, overflows: bool) -> list[dict[str, Any]]:
        """The param_groups for a scaler that is about to unscale them."""
        self.overflows = overflows
        self._gradient.fill_(float("inf") if overflows else 1.0)
        return [{"params": [self._probe]}]

    def take_scaler_factor(self) -> None:
        """A scaler may have unscaled: the step does so instead."""
        if not self.overflows:
            self.unscale = float(self._gradient)

    def agree(self, step: GroupNumbers) -> None:
        """Raises MismatchError, on all ranks, if they are about to make different steps. All ranks call it."""
        context = contexts.current()
        others = self._shadow.own_record if self._shadow is not None else ()
        is_apart = self._shadow is not None and bool(self.group)
        own = AnnouncedStep(step, self.factors, () if is_apart else others)
        found = compare_numbers(context, self.name, own, self.group)
        if self._shadow is not None:
            self._shadow.agree(largest(context, f"{self._shadow.name}.held", others) if is_apart else found)


class StepTiming:
    """The time of a hosted optimizer's steps: in step(). The stepper, which holds it, calls it with itself."""

    #: Where steps may be under way when step() has returned: these.
    under_way: Unfinished | None = None

    def refusal(self, stepper: HostedStepper, call: str) -> Exception | None:
        """See Stepper: what this timing does not go together with."""
        return None

    def step(self, stepper: HostedStepper, call: StepCall) -> None:
        """Sum what backward() has computed, let the services step, and take the new parameters."""
        stepper.sum()  # first: a rank whose numbers are wrong must not leave the others waiting for its gradients
        step = stepper.groups.numbers()
        stepper.prepare(call)
        stepper.next.agree(step)
        stepper.make(step.numbers)

    def sum(self, stepper: HostedStepper) -> None:
        """Have the sums for the next step."""
        stepper.sum()

    def clip(self, stepper: HostedStepper, max_norm: float) -> torch.Tensor:
        """Clip the gradients of the next step. Returns the norm that is known."""
        stepper.sum()
        return stepper.find_clip(max_norm)

    def find_overflow(self, stepper: HostedStepper) -> bool:
        """True, on all ranks, if a sum for the next step is NaN or infinite."""
        stepper.sum()
        return stepper.find_overflow()

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
        wrapped: WrappedOptimizer,
        reducer: GradientReducer,
        steps: SumSteps,
        upcoming: NextStep,
        timing: StepTiming,
    ) -> None:
        super().__init__(wrapped)
        self.reducer, self.steps, self.states, self.next, self.timing = reducer, steps, steps.states, upcoming, timing
        self.groups, self.shadow = self.states.groups, self.states.shadow
        self.name = upcoming.name
        self.under_way = timing.under_way

    @property
    def ranks(self) -> Sequence[int]:
        """The global ranks that share the states."""
        return members(contexts.current(), self.next.group)

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
            self.next.take_scaler_factor()
            return
        self.next.forget()
        self.wrapped.add_groups()
        self.finish_sums()

    def finish_sums(self, bad: Sequence[bool] | None = None) -> None:
        """Hand over the rest of the gradients. ``bad``: which of them are not finite; None: to be found out."""
        self.reducer.finish()
        self.states.follow()
        if self.shadow is not None:
            self.shadow.start(contexts.current())
        if (wanted := nonfinite.mode_of(contexts.current())) is not NonFinite.ALLOW and self.find_overflow():
            buckets = self.reducer.buckets
            names = [name for bucket in buckets for name in bucket.names]
            latest = max((bucket.round for bucket in buckets), default=0)
            found = BadGradients(names, self.steps.bad_gradients() if bad is None else bad, latest)
            error = explain_overflow(contexts.current(), self.name, found, self.next.group)
            self.next.nonfinite_error = error
            if wanted is NonFinite.RAISE:
                self.steps.skip()
                raise error

    def find_overflow(self) -> bool:
        """True, on all ranks, if a sum that is there is NaN or infinite."""
        is_here = overflows(contexts.current(), self.name, self.steps.square_sums(), self.next.group)
        return self.steps.whole.is_any(is_here)

    def prepare(self, call: StepCall) -> None:
        """Note what belongs to the step of ``call`` beside numbers."""
        self.note_scaler(call)
        if self.shadow is not None:
            self.shadow.prepare_record()

    def note_scaler(self, call: StepCall) -> None:
        """Note what a GradScaler says of the step of ``call``."""
        if call.grad_scale is not None:  # otherwise the scaler has unscaled already
            self.next.unscale = float(call.grad_scale.double().reciprocal().float())
        self.next.overflows = self.next.overflows or call.overflows  # perhaps of another part of the model

    def make(self, numbers: Sequence[Hyperparameters], begun: Sequence[BucketStep] = ()) -> None:
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
        self.end()

    def end(self) -> None:
        """The step is made."""
        self.next.forget()
        self.wrapped.mark_stepped()
        self.wrapped.hook()

    def begin(self, numbers: Sequence[Hyperparameters]) -> list[BucketStep] | None:
        """Begin the step; None if it is skipped."""
        check_numbers(numbers)
        if self.next.nonfinite_error is not None:
            nonfinite.report(self.next.nonfinite_error, contexts.current().session)
            self.next.overflows = True
        if self.next.overflows:
            self.steps.skip()
            return None
        return self.steps.begin(numbers, self.next.factors)

    def clip(self, max_norm: float) -> torch.Tensor:
        """See HostedOptimizerMixin."""
        if math.isnan(max_norm) or max_norm < 0:
            raise UsageError(f"max_norm is {max_norm}: give a number from 0 up")
        return self.timing.clip(self, max_norm)

    def find_clip(self, max_norm: float) -> torch.Tensor:
        """Clip the sums that are there. Returns their norm."""
        whole = total_square_sums(self.name, self.steps.square_sums(), self.next.group)
        square = self.steps.whole.square_sum(whole) * self.next.factors.unscale**2
        norm = torch.tensor(math.sqrt(square), dtype=torch.float64, device="cpu")
        factor = max_norm / (float(norm) + 1e-6)
        self.next.clip = 1.0 if factor > 1.0 else factor  # NaN stays NaN, as in torch
        return norm

    def multiply(self, factor: torch.Tensor) -> None:
        """The averages of what backward() has computed, in the next step, by a scalar. All ranks call it alike."""
        self.timing.sum(self)
        self.next.share = float(factor)

    def groups_to_unscale(self) -> list[dict[str, Any]]:
        """The step unscales instead. See NextStep."""
        return self.next.groups_to_unscale(self.timing.find_overflow(self))

    def drop_sums(self) -> None:
        """Make no step with the sums that are there."""
        self.steps.skip()
        self.next.forget()

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
