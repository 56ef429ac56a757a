"""Delayed updates of a hosted optimizer: a step that is made while the next forward and backward passes run.

    step k:  finish step k-1 ─► new parameters      hand over the gradients of k ─► thread: sums, steps ─┐
    step k+1:  finish step k ◄──────────────────────────────────────────────────────────────────────────┘

Owns the thread, which ends with its step. The training thread calls.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Sequence

import torch

from byteps_py.errors import BytePSError, UsageError
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives import nonfinite
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.hosted.delivery import ToOwner
from byteps_py.torch.gradients.hosted.stepper import HostedStepper, StepTiming
from byteps_py.torch.gradients.hosted.steps import BegunStep
from byteps_py.torch.gradients.sparse_bucket import SparseBucket
from byteps_py.torch.gradients.stepper import StepCall

#: Returns what was begun; None if the step is skipped.
Work = Callable[[], list[BegunStep] | None]


class DelayedStep:
    """The step under way, if there is one."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._begun: list[BegunStep] | None = None
        self._error: BaseException | None = None
        self._take: Callable[[list[BegunStep]], None]

    def start(self, work: Work, take: Callable[[list[BegunStep]], None]) -> None:
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
        step = stepper.numbers()
        limit, self._limit = self._limit, None
        bad = self._hand_over(stepper)

        def make() -> list[BegunStep] | None:  # on a thread of its own
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
        return stepper.steps.bad_gradients() if nonfinite.wanted(contexts.current()) else []

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
    stream = torch.cuda.current_stream(device)

    def run() -> list[BegunStep] | None:
        with torch.cuda.stream(stream):
            return work()

    return run
