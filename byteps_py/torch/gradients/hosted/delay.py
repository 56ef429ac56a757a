"""Delayed updates of a hosted optimizer: a step that is made while the next forward and backward passes run.

    step k:  finish step k-1 ─► new parameters      hand over the gradients of k ─► thread: sums, steps ─┐
    step k+1:  finish step k ◄──────────────────────────────────────────────────────────────────────────┘

Owns the thread, which ends with its step. The training thread calls.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any

import torch

from byteps_py.errors import BytePSError, UsageError
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives import nonfinite
from byteps_py.torch.gradients.hosted.delivery import ToOwner
from byteps_py.torch.gradients.hosted.stepper import HostedStepper, check_max_norm, check_no_closure, explains_join
from byteps_py.torch.gradients.hosted.steps import BegunStep
from byteps_py.torch.gradients.sparse_bucket import SparseBucket
from byteps_py.torch.gradients.stepper import StepCall, Stepper

#: Returns what was begun; None if the step is skipped.
Work = Callable[[], list[BegunStep] | None]


class DelayedStep:
    """The step under way, if there is one. ``take``: takes the parameters of what was begun."""

    def __init__(self, take: Callable[[list[BegunStep]], None]) -> None:
        self._take = take
        self._thread: threading.Thread | None = None
        self._begun: list[BegunStep] | None = None
        self._error: BaseException | None = None

    def start(self, work: Work) -> None:
        """Do ``work`` on a thread of its own, until ``finish``, which comes before the next ``start``."""

        def run() -> None:
            try:
                self._begun = work()
            except BaseException as error:  # raised by ``finish``
                self._error = error

        context = contextvars.copy_context()  # this rank's, of several in one process
        self._thread = threading.Thread(target=context.run, args=(run,), name="byteps-delayed-step", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the step under way, if there is one, and take its parameters. Raises its error."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join()  # its waits have limits of their own
        error, self._error = self._error, None
        begun, self._begun = self._begun, None
        if error is not None:
            raise error
        self._take(begun or [])


class DelayedStepper(Stepper):
    """Steps are made under the next passes, once ``at_once`` has made ``after`` of them at once."""

    def __init__(self, at_once: HostedStepper, delivery: ToOwner, after: int) -> None:
        super().__init__(at_once.wrapped)
        self.at_once = at_once
        self._delivery, self._after, self._made = delivery, after, 0
        self.delayed = self.under_way = DelayedStep(at_once.steps.take)
        self._limit: float | None = None  # of the norm, for the next step
        self._norm = torch.tensor(float("nan"), dtype=torch.float64, device="cpu")  # the latest known one
        self._begin_when_due()

    @property
    def _is_due(self) -> bool:
        """True if the next step is delayed."""
        return self._made >= self._after

    def _begin_when_due(self) -> None:
        self.at_once.reducer.is_early, self._delivery.is_copied = not self._is_due, self._is_due

    def refusal(self, call: str) -> Exception | None:
        if call == "unscale_":
            return UsageError(
                "delayed_update_after does not go together with a GradScaler, which has to know in each step whether "
                "gradients have overflowed: train in bfloat16, or leave delayed_update_after out"
            )
        return self.at_once.refusal(call)

    def step(self, call: StepCall) -> Any:
        """Finish the step before this one, and begin this one, which the next one finishes."""
        if not self._is_due:
            self.at_once.step(call)
            self._made += 1
            self._begin_when_due()
            return
        with explains_join():
            check_no_closure(call)
            self.finish()
            self.wrapped.add_groups()
            step = self.at_once.numbers()
            limit, self._limit = self._limit, None
            bad = self._hand_over()

        def make() -> list[BegunStep] | None:  # on a thread of its own
            at_once = self.at_once
            at_once.factors.forget()
            at_once.finish_sums(bad)
            if limit is not None:
                self._norm = at_once.find_clip(limit)
            at_once.agreement.reach(step)
            begun = at_once.begin(step.numbers)
            if begun is not None:
                at_once.states.note_step()
            return begun

        self.delayed.start(self._on_this_stream(make))
        self.wrapped.mark_stepped()

    def _hand_over(self) -> list[bool]:
        """Copy all gradients. Returns which are not finite, if BYTEPS_NONFINITE wants to know. Raises as ``finish`` of
        the reducer does, and UsageError for a sparse gradient."""
        reducer = self.at_once.reducer
        sparse = next((bucket for bucket in reducer.buckets if isinstance(bucket, SparseBucket)), None)
        if sparse is not None:
            raise UsageError(
                f"delayed_update_after: the gradient of {sparse.names[0]!r} is sparse, and a delayed step "
                "needs dense ones: pass sparse_as_dense=True"
            )
        reducer.accepts_sparse = False
        for bucket in reducer.hand_over_rest():
            if bucket.slot_view is not None:
                bucket.slot_view.wait_for_departure()
        return self.at_once.steps.bad_gradients() if nonfinite.wanted(contexts.current()) else []

    def _on_this_stream(self, work: Work) -> Work:
        """``work``, which reads parameters, as a function for a thread that sees them as this one does."""
        device = next((param.device for param in self.wrapped.params), None)
        if device is None or device.type != "cuda":
            return work
        stream = torch.cuda.current_stream(device)

        def run() -> list[BegunStep] | None:
            with torch.cuda.stream(stream):
                return work()

        return run

    def groups_to_unscale(self) -> list[dict[str, Any]]:
        return self.at_once.groups_to_unscale()

    def clip(self, max_norm: float) -> torch.Tensor:
        """See HostedOptimizerMixin."""
        if not self._is_due:
            return self.at_once.clip(max_norm)
        check_max_norm(max_norm)
        self._limit, norm = max_norm, self._norm
        return norm

    def zero(self) -> None:
        if not self._is_due:  # otherwise the step under way has its sums
            self.at_once.zero()

    def state_replaced(self) -> None:
        self.at_once.state_replaced()

    def drop(self) -> None:
        with contextlib.suppress(BytePSError):  # what it has made is about to be replaced
            self.finish()
        super().drop()
