"""Steps of a model in parts that outlast the loss of ranks: all that ranks do together in a step is done again.

Ranks of a pipeline, or with parts of layers, compute a step together: the gradients of one rank come from values of
others. So a rank that was started again needs the others for its own part of the step, from the first forward pass on.

    call ─► passes, sums, step ─► returns                    of a RunState: … the next batch ─► held by other machines
     ▲        │ a rank is lost                                                  │ a rank is lost
     │        ▼                                                                 ▼
     └── join the next group ─► groups begin anew ─► the states of the step that other machines hold ─► the step again

``RepeatableCall`` says what belongs to the step beside weights and states: it is as it was before, and after a step
that had been made already it is as it was afterwards. Made again with the step are calls that made none, as gradients
were not finite, and evaluations in the body of a RunState's loop. The training thread calls.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from byteps_py.errors import PeerLostError, UsageError
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.group_history import GroupHistory
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.hosted.held_step import agree_on_calls
from byteps_py.torch.gradients.hosted.in_place import (
    InPlaceTiming,
    held_states,
    join_next,
    outlast,
    too_far,
    wait_until_held,
    why_not_in_place,
)
from byteps_py.torch.gradients.hosted.replication import ShadowedSteps
from byteps_py.torch.gradients.hosted.stepper import HostedStepper, StepTiming
from byteps_py.torch.gradients.hosted.timings import InBackwardTiming
from byteps_py.torch.gradients.stepper import StepCall

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
#: Calls that are kept at most since the step that other machines hold. Each keeps its batch.
_MOST_CALLS = 100


class RepeatableCall(Protocol[T_co]):
    """All that ranks do together in a step: forward passes, backward passes, the optimizer's step; or in the evaluation
    of a batch."""

    def make(self) -> T_co:
        """All of it. All ranks call it."""

    def finish(self) -> T_co:
        """The rest, if the step of the optimizer was made. No rank waits for others in it."""

    def state(self) -> Any:
        """All that it reads and changes, beside weights, gradients and the optimizer's states."""

    def put_back(self, state: Any) -> None:
        """Be as of ``state``."""


class WholeStepTiming(StepTiming):
    """In step(), and with ``make_whole`` again after a loss. ``history``: of the groups by which ranks compute, if
    there are any. See BYTEPS_MAX_RESTARTS."""

    def __init__(self, reducer: GradientReducer, shadow: ShadowedSteps, history: GroupHistory | None) -> None:
        self._shadow, self._history = shadow, history
        reducer.leaves_losses = True
        self._is_whole = False  # make_whole() makes the step
        #: The calls since the step that other machines hold. A rank that was started again makes all of them.
        self._kept: list[_KeptCall] = []
        me = weakref.ref(self)

        def send_with(send: Callable[[], None]) -> None:
            if (timing := me()) is not None:
                timing._hold(send)

        shadow.send_with = send_with

    def step(self, stepper: HostedStepper, call: StepCall) -> None:
        self._note_first_step()
        shadow, steps = self._shadow, self._shadow.step
        super().step(stepper, call)
        if self._is_whole and (shadow.loop is None or shadow.step == steps):
            wait_until_held(shadow, has_stepped=shadow.step > steps)

    @property
    def has_loop(self) -> bool:
        """A RunState's loop says what belongs to a step: also what comes after it in a body."""
        return self._shadow.loop is not None

    def make_whole(self, stepper: HostedStepper, call: RepeatableCall[T]) -> T:
        """``call``, and again after a loss. All ranks call it alike. Raises the loss if there is no step to go on from
        yet, or if the groups can't begin anew; and CommunicationError if there is no state to go on from. Within
        another call, it is a part of that."""
        if self._is_whole:
            return call.make()
        contexts.current().check_caught_up()
        self._note_first_step()
        shadow, steps = self._shadow, self._shadow.step
        kept = _KeptCall(stepper, call, shadow.calls, call.state())

        def make() -> T:
            if shadow.calls > kept.calls:  # it was made before the loss, and all know
                stepper.end()
                return call.finish()
            with self._made_whole():
                return call.make()

        def again() -> None:
            if shadow.calls == (self._kept or [kept])[0].calls:
                for earlier in self._kept:
                    self._repeat(earlier)
                kept.go_back()

        found = self._outlast(kept, make, again)
        if not shadow.run or (shadow.loop is None and shadow.step > steps):  # other machines hold it, or there are none
            self._kept.clear()
        elif len(self._kept) <= _MOST_CALLS:
            self._kept.append(kept)
        return found

    def _note_first_step(self) -> None:
        if self._history is not None:
            self._history.over(counts=False)

    def _hold(self, send: Callable[[], None]) -> None:
        """Return once other machines hold the step of the loop's body, whose record ``send`` sends. After a loss, the
        step is made again, unless they hold it."""
        if not self._kept:  # the step was made in parts
            send()
            return
        shadow, first, latest = self._shadow, self._kept[0], self._kept[-1]

        def make() -> None:
            if shadow.owes_record:
                send()
                wait_until_held(shadow, has_stepped=True)

        def again() -> None:
            if shadow.calls == first.calls:
                present = latest.call.state()
                for each in self._kept:
                    self._repeat(each)
                latest.call.put_back(present)

        self._outlast(latest, make, again)
        self._kept.clear()

    @contextlib.contextmanager
    def _made_whole(self) -> Iterator[None]:
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False

    def _repeat(self, kept: _KeptCall) -> None:
        """Make a call again whose record, if it has one, is made already."""
        progress = contexts.current().progress
        steps, self._shadow.is_repeating = progress.steps, True
        try:
            kept.go_back()
            with self._made_whole():
                kept.call.make()
        finally:
            self._shadow.is_repeating = False
        progress.steps = steps

    def _outlast(self, kept: _KeptCall, make: Callable[[], T], again: Callable[[], None]) -> T:
        """``make``; and after each loss ``again`` and ``make``, from the state that other machines hold. ``kept``: the
        call that is made, or was made last."""

        def go_back(context: Context, lost: PeerLostError, reached: tuple[int, int]) -> None:
            self._go_back(context, kept, lost, made=reached[0])

        return outlast(self._shadow, self._refusal, go_back, make, again)

    def _refusal(self) -> str:
        if len(self._kept) > _MOST_CALLS:
            return (
                f"there were more than {_MOST_CALLS} calls of training.step(), evaluate() and functions with "
                "RunState.retry in a body of the loop"
            )
        return why_not_in_place(self._history)

    def _go_back(self, context: Context, kept: _KeptCall, lost: PeerLostError, made: int) -> None:
        """``made``: the step that this rank had come to when it heard of the loss."""
        shadow, stepper = self._shadow, kept.stepper
        join_next(context, lost)
        if self._history is not None:
            self._history.begin_anew()
        stepper.drop()
        stepper.drop_sums()
        with held_states(stepper, shadow):
            if shadow.step < made - 1:
                raise too_far(shadow, made)
            agree_on_calls(shadow)
        context.session.note_synced()
        if self._history is not None:
            self._history.go_on()


def make_steps_whole(stepper: HostedStepper) -> None:
    """From its first step on, steps of ``stepper`` are made with ``make_whole``, in a job whose ranks are started
    again. Raises UsageError if its steps begin in the backward pass."""
    timing = stepper.timing
    inner = timing.timing if isinstance(timing, InPlaceTiming) else timing
    if isinstance(inner, InBackwardTiming):
        raise UsageError(
            "RunState.retry does not go together with step_in_backward, whose steps begin before the function has "
            "computed all gradients: leave one of the two out"
        )
    if isinstance(timing, InPlaceTiming) and stepper.shadow is not None:
        stepper.timing = WholeStepTiming(stepper.reducer, stepper.shadow, timing.history)


class _KeptCall:
    """``calls``: the number of calls of the optimizer's step() before it; ``before``: its state then."""

    def __init__(self, stepper: HostedStepper, call: RepeatableCall[Any], calls: int, before: Any) -> None:
        self.stepper, self.call, self.calls, self._before = stepper, call, calls, before

    def go_back(self) -> None:
        """Be as before it."""
        self.call.put_back(self._before)
