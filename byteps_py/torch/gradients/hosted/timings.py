"""The times of a hosted optimizer's steps, if not in step(): the other StepTimings.

DelayedTiming: under the next forward and backward passes.

    step k:  finish step k-1 ─► new parameters      hand over the gradients of k ─► thread: sums, steps ─┐
    step k+1:  finish step k ◄──────────────────────────────────────────────────────────────────────────┘

InBackwardTiming: under the backward pass, each partition once its sum is there.

    backward, a bucket's last gradient:  hand it over ─► the round's thread: compare numbers, once ─► begin its step
    step():  hand over the rest ─► wait for the thread ─► wait for the services ─► write the parameters

There a step begins only after all ranks have found their numbers equal. From then on it is made on all ranks, for all
buckets, whatever one of them finds out later: it is whole, or nobody has it. Parameters are written in step() alone,
because the backward pass reads them until its end.

Owns the thread of a step or a round, which ends with it, and which calls come too late. The training thread calls, and
Autograd's threads call ``sent``, with the reducer's lock held. A round's thread takes no lock of the reducer.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from byteps_py.errors import BytePSError, GradientOrderError, UsageError
from byteps_py.torch.collectives import context as contexts, nonfinite
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.slot_view import PieceView
from byteps_py.torch.gradients.bucket import Bucket
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.hosted.agreement import Factors
from byteps_py.torch.gradients.hosted.delivery import ToOwner
from byteps_py.torch.gradients.hosted.rules import GroupNumbers, check_numbers
from byteps_py.torch.gradients.hosted.states import BucketStates
from byteps_py.torch.gradients.hosted.stepper import HostedStepper, NextStep, StepTiming
from byteps_py.torch.gradients.hosted.steps import BucketStep
from byteps_py.torch.gradients.sparse_bucket import SparseBucket
from byteps_py.torch.gradients.stepper import StepCall

# ---- under the next passes -------------------------------------------------------------------------------------------

#: Returns what was begun; None if the step is skipped.
Work = Callable[[], list[BucketStep] | None]


class DelayedStep:
    """The step under way, if there is one."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._begun: list[BucketStep] | None = None
        self._error: BaseException | None = None
        self._take: Callable[[list[BucketStep]], None]

    def start(self, work: Work, take: Callable[[list[BucketStep]], None]) -> None:
        """Do ``work`` on a thread of its own, until ``finish``, which comes before the next ``start``. ``take``: takes
        the parameters of what was begun."""

        def run() -> None:
            try:
                self._begun = work()
            except BaseException as error:  # raised by ``finish``
                self._error = error

        self._take = take
        context = contextvars.copy_context()  # this rank's, of several in one process
        self._thread = threading.Thread(target=context.run, args=(run,), name="byteps-delayed-step", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the step under way, if there is one, and take its parameters. Raises its error."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join()  # its waits have limits of their own
        (begun, self._begun), (error, self._error) = (self._begun, None), (self._error, None)
        if error is not None:
            raise error
        self._take(begun or [])


class DelayedTiming(StepTiming):
    """Under the next passes, after ``after`` steps that are made at once."""

    def __init__(self, context: Context, reducer: GradientReducer, delivery: ToOwner, after: int) -> None:
        self._reducer, self._delivery, self._after, self._made = reducer, delivery, after, 0
        self._delayed = self.under_way = DelayedStep()
        self._limit: float | None = None  # of the norm, for the next step
        self._norm = torch.tensor(float("nan"), dtype=torch.float64, device="cpu")  # the latest known one
        context.unfinished.add(self._delayed)
        self._begin_when_due()

    @property
    def _is_due(self) -> bool:
        """True if the next step is delayed."""
        return self._made >= self._after

    def _begin_when_due(self) -> None:
        self._reducer.is_early, self._delivery.is_copied = not self._is_due, self._is_due

    def refusal(self, stepper: HostedStepper, call: str) -> Exception | None:
        if call == "unscale_":
            return UsageError(
                "delayed_update_after does not go together with a GradScaler, which has to know in each step whether "
                "gradients have overflowed: train in bfloat16, or leave delayed_update_after out"
            )
        return None

    def step(self, stepper: HostedStepper, call: StepCall) -> None:
        """Finish the step before this one, and begin this one, which the next one finishes."""
        if not self._is_due:
            super().step(stepper, call)
            self._made += 1
            self._begin_when_due()
            return
        self._delayed.finish()
        stepper.wrapped.add_groups()
        step = stepper.groups.numbers()
        limit, self._limit = self._limit, None
        bad = self._hand_over(stepper)

        def make() -> list[BucketStep] | None:  # on a thread of its own
            stepper.next.forget()
            stepper.finish_sums(bad)
            if limit is not None:
                self._norm = stepper.find_clip(limit)
            stepper.next.agree(step)
            begun = stepper.begin(step.numbers)
            if begun is not None:
                stepper.states.note_step()
            return begun

        self._delayed.start(_on_this_stream(make, stepper.wrapped.params), stepper.steps.take)
        stepper.wrapped.mark_stepped()

    def _hand_over(self, stepper: HostedStepper) -> list[bool]:
        """Copy all gradients. Returns which are not finite, if BYTEPS_NONFINITE wants to know. Raises as ``finish`` of
        the reducer does, and UsageError for a sparse gradient."""
        sparse = next((bucket for bucket in self._reducer.buckets if isinstance(bucket, SparseBucket)), None)
        if sparse is not None:
            raise UsageError(
                f"delayed_update_after: the gradient of {sparse.names[0]!r} is sparse, and a delayed step "
                "needs dense ones: pass sparse_as_dense=True"
            )
        self._reducer.accepts_sparse = False
        for bucket in self._reducer.hand_over_rest():
            if bucket.slot_view is not None:
                bucket.slot_view.wait_for_departure()
        return stepper.steps.bad_gradients() if nonfinite.mode_of(contexts.current()) else []

    def clip(self, stepper: HostedStepper, max_norm: float) -> torch.Tensor:
        if not self._is_due:
            return super().clip(stepper, max_norm)
        self._limit = max_norm
        return self._norm

    def zero(self, stepper: HostedStepper) -> None:
        if not self._is_due:  # otherwise the step under way has its sums
            super().zero(stepper)

    def drop(self, stepper: HostedStepper) -> None:
        with contextlib.suppress(BytePSError):  # what it has made is about to be replaced
            self._delayed.finish()
        super().drop(stepper)


def _on_this_stream(work: Work, params: Sequence[torch.nn.Parameter]) -> Work:
    """``work``, which reads ``params``, as a function for a thread that sees them as this one does."""
    device = next((param.device for param in params), None)
    if device is None or device.type != "cuda":
        return work
    here = contexts.current().mover(device).here()

    def run() -> list[BucketStep] | None:
        with here:
            return work()

    return run


# ---- under the backward pass ----------------------------------------------------------------------------------------

_REMEDY = "Leave step_in_backward out to have it"
_REFUSED = {
    "clip_grad_norm_": (
        "step_in_backward does not go together with clip_grad_norm_(), which needs all sums before the first step: "
        f"the services step under the backward pass. {_REMEDY}"
    ),
    "unscale_": (
        "step_in_backward does not go together with a GradScaler, which has to know before the first step whether "
        f"gradients have overflowed: the services step under the backward pass. {_REMEDY}, or train in bfloat16"
    ),
}
_BETWEEN_STEPS = ("zero_grad", "state_dict", "add_param_group")


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A bucket whose gradients are on their way. ``taking_part``: which of its parameters take part in the step."""

    bucket: Bucket
    slot_view: PieceView
    taking_part: tuple[bool, ...]


class BackwardRound:
    """Begins the steps of one round, on a thread of its own, as buckets are handed over.

    numbers: what they step with. versions: of ``params``, when the round began. is_agreed: all ranks have these
    numbers, so that all of them make the step. begun: the buckets whose steps were begun. error: of the thread.
    is_abandoned: nobody waits for the step.
    """

    def __init__(self, numbers: GroupNumbers, params: Sequence[torch.nn.Parameter]) -> None:
        self.numbers, self.params = numbers, params
        self.versions = [param._version for param in params]
        self.is_agreed = self.is_abandoned = False
        self.begun: list[BucketStep] = []
        self.error: BaseException | None = None
        self._handed: queue.SimpleQueue[HandedOver | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, agree: Callable[[], bool], begin: Callable[[HandedOver], None]) -> None:
        """Call ``agree``, and if it is true, ``begin`` for each bucket of ``put``, until ``end``."""

        def run() -> None:
            try:
                if agree():
                    self.is_agreed = True
                    while (handed := self._handed.get()) is not None:
                        begin(handed)
            except BaseException as error:  # raised by step()
                self.error = error

        self._thread = threading.Thread(target=run, name="byteps-step-in-backward", daemon=True)
        self._thread.start()

    def put(self, handed: HandedOver) -> None:
        """Begin the step of this bucket, too."""
        self._handed.put(handed)

    def end(self) -> None:
        """No more buckets follow."""
        self._handed.put(None)

    def join(self) -> None:
        """Wait until the steps of all buckets are begun, after ``end``."""
        if self._thread is not None:
            self._thread.join()  # its waits have limits of their own


class BackwardSteps:
    """Begins steps while gradients are still computed. It must not hold the reducer or the stepper, which hold it, so
    that an optimizer that nobody holds is gone at once, and its round with it."""

    def __init__(self, context: Context, delivery: ToOwner, states: BucketStates, upcoming: NextStep) -> None:
        self._context, self._delivery, self._states, self._next = context, delivery, states, upcoming
        self._aside: dict[torch.device, Callable[[], AbstractContextManager[object]]] = {}
        #: From its first hand-over to the end of its step; None as long as there are no states, in the first step.
        self.round: BackwardRound | None = None

    def sent(self, reducer: GradientReducer, bucket: Bucket) -> None:
        """``bucket`` was handed over."""
        if bucket.slot_view is not None and reducer.is_agreed and self._states.are_made:
            if self.round is None:
                self.round = self._begin_round(list(self._states.buckets))
            if self.round is not None:
                self.round.put(HandedOver(bucket, bucket.slot_view, self._delivery.taking_part(bucket)))

    def _begin_round(self, buckets: Sequence[Bucket]) -> BackwardRound | None:
        try:
            numbers = self._states.groups.numbers()
        except (TypeError, ValueError, LookupError):
            return None  # step() reads them again, and says what is wrong
        params = [param for bucket in buckets for param in bucket.params]
        from_now = self.from_now({param.device for param in params})
        new = BackwardRound(numbers, params)

        def agree() -> bool:
            if new.is_abandoned or not self._may_begin(numbers, buckets):
                return False
            with contexts.use(self._context):
                self._next.agree(numbers)
            check_numbers(numbers.numbers)
            return True

        def begin(handed: HandedOver) -> None:
            with contextlib.ExitStack() as stack:
                for aside in from_now:
                    stack.enter_context(aside())
                self._begin(new, handed)

        new.start(agree, begin)
        return new

    def from_now(self, devices: set[torch.device]) -> list[Callable[[], AbstractContextManager[object]]]:
        """Contexts in which the round's thread reads parameters on CUDA as they are when the round begins, without
        waiting for the rest of the backward pass. Parameters on the CPU need none."""
        found = []
        for device in devices:
            if device.type == "cuda":
                mover = self._context.mover(device)
                if device not in self._aside:
                    self._aside[device] = mover.aside()
                aside, queued = self._aside[device], mover.queued()
                if queued is not None:
                    with aside():
                        queued.order()
                found.append(aside)
        return found

    def _may_begin(self, numbers: GroupNumbers, buckets: Sequence[Bucket]) -> bool:
        """False if something has to be made, or is wrong, that step() finds before any step is begun."""
        for bucket in buckets:
            if bucket.is_active:
                states = self._states.in_services(bucket)
                if (
                    states is None
                    or states.session is not self._context.session
                    or bucket.slot_view is None
                    or not states.follows(bucket.slot_view.slot)
                    or states.kind.rule != numbers.rules[self._states.groups.group_of[bucket.params[0]]]
                    or any(tuple(p.shape) != s for p, s in zip(bucket.params, bucket.request.shapes, strict=True))
                ):
                    return False
        return True

    def _begin(self, round_: BackwardRound, handed: HandedOver) -> None:
        handed.slot_view.wait_for_departure()  # the service hears of the gradients before it hears of the step
        states = self._states.in_services(handed.bucket)
        if states is not None and states.follows(handed.slot_view.slot):  # otherwise step() begins it
            numbers = round_.numbers.numbers[self._states.groups.group_of[handed.bucket.params[0]]]
            step = BucketStep(handed.bucket, states, numbers, handed.taking_part)
            step.begin(Factors(), self._states.shadow)
            round_.begun.append(step)

    def end_round(self) -> BackwardRound | None:
        """After ``finish`` of the reducer: wait until the steps of what was handed over are begun. Raises nothing."""
        round_ = self.round
        if round_ is not None:
            round_.end()
            round_.join()
            for step in round_.begun:
                step.bucket.due = None
        return round_

    def finish(self) -> None:
        """Forget the round, and let its thread end: the step is made, the session is about to be closed, or the
        optimizer is gone."""
        if self.round is not None:
            self.round.is_abandoned = True
            self.round.end()
            self.round = None


class InBackwardTiming(StepTiming):
    """Under the backward pass, from the next one on that finds states. The others in step()."""

    def __init__(self, context: Context, reducer: GradientReducer, backward: BackwardSteps) -> None:
        self.backward = backward
        reducer.accepts_sparse = False  # ranks step sparse rows themselves, after all gradients are there
        reducer.on_sent = self.backward.sent
        context.unfinished.add(self.backward)
        weakref.finalize(self, self.backward.finish).atexit = False

    def refusal(self, stepper: HostedStepper, call: str) -> Exception | None:
        if call in _REFUSED:
            return UsageError(_REFUSED[call])
        if call in _BETWEEN_STEPS and stepper.wrapped.passes.has_begun:
            return GradientOrderError(
                f"optimizer.{call}() was called after loss.backward() and before optimizer.step(): with "
                "step_in_backward, the services step under the backward pass and may have done so already. Call "
                "optimizer.step() first"
            )
        return None

    def step(self, stepper: HostedStepper, call: StepCall) -> None:
        """Take the parameters that the services have stepped, once all are there."""
        try:
            late = self._make(stepper, call)
        finally:
            self.backward.finish()
        if late is not None:
            if isinstance(late, GradientOrderError):
                late.add_note("The step has been made, on all ranks, with what backward() has found.")
            raise late

    def _make(self, stepper: HostedStepper, call: StepCall) -> Exception | None:
        """Make the step. Returns an error that was found out when the step could not be stopped any more."""
        late: Exception | None = None
        try:
            stepper.sum()
        except Exception as error:
            late = error
        round_ = self.backward.end_round()
        if late is not None and not (round_ is not None and round_.is_agreed):
            raise late
        now = stepper.groups.numbers()
        known = round_.numbers.numbers if round_ is not None and round_.is_agreed else []
        numbers = [*known, *now.numbers[len(known) :]]
        stepper.prepare(call)
        if round_ is not None:
            if round_.is_agreed:
                late = late or _changed(stepper, round_, now)
            if round_.error is not None:
                raise round_.error
        if not known or len(numbers) > len(known):
            stepper.next.agree(GroupNumbers(numbers, now.rules))
        stepper.make(numbers, round_.begun if round_ is not None else [])
        return late

    def drop(self, stepper: HostedStepper) -> None:
        """Steps that were begun are made, as on all ranks, and their parameters are not taken."""
        super().drop(stepper)
        round_ = self.backward.end_round()
        if round_ is not None and round_.is_agreed:
            with contextlib.suppress(BytePSError):  # discarded anyway
                rest = stepper.steps.begin(round_.numbers.numbers, Factors())
                if stepper.shadow is not None:
                    stepper.shadow.step += 1  # copies have made it, though it is of no use without a record
                untaken = [replace(each, taking_part=(False,) * len(each.taking_part)) for each in round_.begun + rest]
                stepper.steps.take(untaken)
        self.backward.finish()


def _changed(stepper: HostedStepper, round_: BackwardRound, now: GroupNumbers) -> GradientOrderError | None:
    """The error if something was changed since the round has begun, which its step has not seen."""
    known = round_.numbers
    for number, (numbers, before) in enumerate(zip(now.numbers, known.numbers, strict=False)):
        for name in before.__dataclass_fields__:
            if getattr(numbers, name) != getattr(before, name):
                return GradientOrderError(
                    f"{name} of param_groups[{number}] has changed from {getattr(before, name):g} to "
                    f"{getattr(numbers, name):g} after backward() and before step(): with step_in_backward, a step "
                    "has the numbers that backward() has found. Step a learning-rate scheduler after "
                    "optimizer.step()"
                )
        if now.rules[number] != known.rules[number]:
            return GradientOrderError(f"param_groups[{number}] has changed after backward() and before step()")
    for param, version in zip(round_.params, round_.versions, strict=True):
        if param._version != version:
            return GradientOrderError(
                f"parameter {stepper.wrapped.names[param]!r} was changed after backward() and before step(): with "
                "step_in_backward, the change may be lost. Change parameters after optimizer.step()"
            )
    return None
