"""Steps that outlast the loss of ranks, services and machines: the launcher starts these again, and a rank that is left
waits for them in its call, with what it has computed.

    call ─► sums, step, held by other machines ─► returns
     ▲        │ a rank or a machine is lost
     │        ▼
     └── join the next group ─► the states of the step that other machines hold, its own gradients once more

A rank goes on only once other machines hold its step, so it is never ahead of what they hold: it makes the step under
way again, or finds it made. ``step()`` waits for that, or, in the loop of a RunState, which completes the record of a
step at the end of the loop's body, the call for the next batch: the gradients of the step are kept until then.
A rank that was started again has nothing but what they hold (``restore``).
The training thread calls.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from byteps_py.errors import CommunicationError, PeerLostError
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.group_history import GroupHistory
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.hosted.agreement import largest
from byteps_py.torch.gradients.hosted.held_step import (
    agree_on_calls,
    held_step,
    none_held,
    raise_together,
    take_states,
)
from byteps_py.torch.gradients.hosted.replication import ShadowedSteps
from byteps_py.torch.gradients.hosted.rules import GroupNumbers
from byteps_py.torch.gradients.hosted.stepper import HostedStepper, NextStepFacts, StepTiming
from byteps_py.torch.gradients.stepper import StepCall

_log = logging.getLogger("byteps_py")
T = TypeVar("T")


class InPlaceTiming(StepTiming):
    """Steps at the time of another timing, and again after a loss. See BYTEPS_MAX_RESTARTS. ``history``: of the groups
    of torch.distributed, if there are any: in a step, the script does nothing by them."""

    def __init__(
        self, timing: StepTiming, reducer: GradientReducer, shadow: ShadowedSteps, history: GroupHistory | None
    ) -> None:
        self.timing, self._shadow, self.history = timing, shadow, history
        self._calls_before = 0  # of operations of groups, before the body of the loop that is under way
        self.under_way = timing.under_way
        reducer.leaves_losses = True
        #: What ranks have exchanged for the next step since its sums are there. A rank that was started again does so.
        self._exchanges: list[Callable[[], object]] = []
        #: The step that other machines may not hold yet; None: they hold all.
        self._kept: _KeptStep | None = None
        me = weakref.ref(self)

        def send_with(send: Callable[[], None]) -> None:
            if (timing := me()) is not None:
                timing._hold(send)

        shadow.send_with = send_with

    def refusal(self, stepper: HostedStepper, call: str) -> Exception | None:
        return self.timing.refusal(stepper, call)

    def step(self, stepper: HostedStepper, call: StepCall) -> None:
        shadow = self._shadow
        if self.history is not None:
            self.history.over()
        calls, steps = shadow.calls + 1, shadow.step
        before = stepper.next.facts(), stepper.steps.are_due

        def make() -> None:
            if shadow.skips:
                shadow.skips -= 1
                shadow.calls += 1
            if shadow.calls < calls:
                self.timing.step(stepper, call)
                if shadow.loop is None or shadow.step == steps:
                    wait_until_held(shadow, has_stepped=shadow.step > steps)
            else:  # it was made, or skipped, before the loss
                stepper.end()

        self._repeat(stepper, make)
        if shadow.loop is None or shadow.step == steps:
            self._forget()
            if shadow.loop is None:
                self._begin_body()
        else:
            self._kept = _KeptStep(stepper, call, calls - 1, *before)
        stepper.reducer.is_skipped = shadow.skips > 0

    def sum(self, stepper: HostedStepper) -> None:
        def find() -> None:
            if not self._shadow.skips:
                self.timing.sum(stepper)

        self._repeat(stepper, find)

    def clip(self, stepper: HostedStepper, max_norm: float) -> torch.Tensor:
        def clip() -> torch.Tensor:
            if self._shadow.skips:
                return torch.full((), torch.nan, dtype=torch.float64, device="cpu")
            return self.timing.clip(stepper, max_norm)

        norm = self._repeat(stepper, clip)
        self._exchanges.append(lambda: stepper.find_clip(max_norm))
        return norm

    def find_overflow(self, stepper: HostedStepper) -> bool:
        found = self._repeat(stepper, lambda: self._shadow.skips > 0 or self.timing.find_overflow(stepper))
        self._exchanges.append(stepper.find_overflow)
        return found

    def zero(self, stepper: HostedStepper) -> None:
        self.timing.zero(stepper)
        if self._kept is None:
            self._exchanges.clear()

    def drop(self, stepper: HostedStepper) -> None:
        self.timing.drop(stepper)
        self._forget()

    def _forget(self) -> None:
        self._kept = None
        self._exchanges.clear()

    def _repeat(self, stepper: HostedStepper, make: Callable[[], T]) -> T:
        """``make``, a part of a call before the step is made. After a loss, sums that were there are made again."""
        shadow = self._shadow
        facts, are_due, calls = stepper.next.facts(), stepper.steps.are_due, shadow.calls

        def again() -> None:
            if are_due and shadow.calls == calls and not shadow.skips:
                self._exchange_again(stepper)
                stepper.next.set_facts(facts)

        return self._outlast(stepper, calls, make, again)

    def _hold(self, send: Callable[[], None]) -> None:
        """Return once other machines hold the step of the loop's body, whose record ``send`` sends. After a loss, the
        step is made again, unless they hold it."""
        kept, shadow = self._kept, self._shadow
        if kept is None:
            send()
            return

        def make() -> None:
            if shadow.owes_record:
                send()
                wait_until_held(shadow, has_stepped=True)

        def again() -> None:
            if shadow.calls == kept.calls:
                with kept.gradients_back():
                    self._exchange_again(kept.stepper)
                    kept.make()

        self._outlast(kept.stepper, kept.calls, make, again)
        self._forget()
        self._begin_body()

    def _exchange_again(self, stepper: HostedStepper) -> None:
        stepper.sum()
        for exchange in self._exchanges:
            exchange()

    def _outlast(self, stepper: HostedStepper, calls: int, make: Callable[[], T], again: Callable[[], None]) -> T:
        """``make``; and after each loss ``again`` and ``make``, from the state that other machines hold. ``calls``: the
        number of calls of step() before this one. Raises the loss if this rank had no state yet, or if groups of
        torch.distributed can't go on in place; and CommunicationError if there is no state to go on from."""

        def go_back(context: Context, lost: PeerLostError, reached: tuple[int, int]) -> None:
            self._go_back(context, stepper, lost, reached, calls)

        return outlast(self._shadow, self._refusal, go_back, make, again)

    def _refusal(self) -> str:
        """Why all ranks are to be started again; "": they need not."""
        why = why_not_in_place(self.history)
        if why or self.history is None or self.history.calls == self._calls_before:
            return why
        return (
            "the script has called operations of torch.distributed since the step before, outside of a function with "
            "RunState.retry"
        )

    def _begin_body(self) -> None:
        """Other machines hold the step before, and a rank that is started again begins here."""
        if self.history is not None:
            self._calls_before = self.history.calls

    def _go_back(
        self, context: Context, stepper: HostedStepper, lost: PeerLostError, reached: tuple[int, int], calls: int
    ) -> None:
        """``reached``: the step, and the number of calls, that this rank had come to when it heard of the loss."""
        shadow, (step, calls_now) = self._shadow, reached
        join_next(context, lost)
        if self.history is not None:
            self.history.begin_anew()
        stepper.drop_sums()
        with held_states(stepper, shadow):
            if shadow.step < step - (calls_now > calls):
                raise too_far(shadow, step)
            if step >= shadow.step:  # calls after it made no step, but for the one that is not held
                shadow.calls = calls_now if step == shadow.step else calls
            agree_on_calls(shadow)
        context.session.note_synced()
        if self.history is not None:
            self.history.go_on()


def why_not_in_place(history: GroupHistory | None) -> str:
    """Why all ranks are to be started again, whatever they do in a step; "": they need not."""
    if history is None:
        return "groups were made after the optimizer" if dist.is_initialized() else ""
    return history.refusal


def outlast(
    shadow: ShadowedSteps,
    refusal: Callable[[], str],
    go_back: Callable[[Context, PeerLostError, tuple[int, int]], None],
    make: Callable[[], T],
    again: Callable[[], None],
) -> T:
    """``make``; and after each loss ``go_back``, ``again`` and ``make``. ``go_back`` gets the loss, and the numbers of
    steps and of calls of step() that this rank had come to. ``refusal``: why the loss is raised instead; "": it is not.
    """
    context = contexts.current()
    if not (context.is_open and context.session.has_synced):
        return make()
    lost: PeerLostError | None = None
    reached = shadow.step, shadow.calls
    while True:
        try:
            if lost is not None:
                go_back(context, lost, reached)
                lost = None
                again()
            return make()
        except PeerLostError as error:
            if why := refusal():
                _log.warning("all ranks are started again, as a step can't be made again in place: %s", why)
                raise
            if lost is None:  # otherwise ``go_back`` has changed them, perhaps in part
                reached = shadow.step, shadow.calls
            lost = error


def join_next(context: Context, lost: PeerLostError) -> None:
    """Leave the group that has lost a rank, and be part of the next one. Raises CommunicationError if something that
    this rank keeps for compression would end with the group."""
    if kept := context.kept_by_codecs():  # of another optimizer, or of a script's own sums
        raise CommunicationError(
            f"{lost}. The ranks of this job can't go on in place, because {kept} has no copy on other machines: "
            "all are started again. Use compression without error feedback and momentum beside shadow=True"
        )
    _log.warning("a step waits for the ranks and services that are started again: %s", lost)
    context.rejoin(lost)


def wait_until_held(shadow: ShadowedSteps, has_stepped: bool) -> None:
    """After a step: return once other machines hold it for all ranks. After one that was skipped: once all ranks
    know. All ranks call it."""
    context = contexts.current()
    if not shadow.run:
        return  # there are no other machines for now
    if has_stepped:
        context.session.state_host.wait_until_held(shadow.step)
    shadow.agree(largest(context, f"{shadow.name}.held", shadow.own_record))
    if has_stepped:
        context.session.note_synced()


@contextlib.contextmanager
def held_states(stepper: HostedStepper, shadow: ShadowedSteps) -> Iterator[None]:
    """Take over the step that other machines hold, in a group that a rank was started again for. All ranks call it, or
    restore(), and what ranks do together in it. Raises CommunicationError."""
    with held_step(shadow) as held:
        if held is None:
            raise none_held()
        raise_together(None, f"{shadow.name}.attached")  # see restore()
        take_states(stepper, shadow, held, with_numbers=False)
        yield


def too_far(shadow: ShadowedSteps, made: int) -> CommunicationError:
    """The error of a rank that has ``made`` a step which is later than the one that other machines hold, and that it
    has not kept."""
    return CommunicationError(
        f"other machines hold step {shadow.step}, and this rank has made {made}: it can't go on from there"
    )


class _KeptStep:
    """A step that was made in the body of a RunState's loop, to make it again. ``calls``: the number of calls of step()
    before it; ``facts``, ``are_due``: of the stepper, before it."""

    def __init__(self, stepper: HostedStepper, call: StepCall, calls: int, facts: NextStepFacts, are_due: bool) -> None:
        self.stepper, self.calls = stepper, calls
        self._params = stepper.wrapped.params
        self._gradients = [(param.grad, 0 if param.grad is None else param.grad._version) for param in self._params]
        self._numbers: GroupNumbers = stepper.groups.numbers()
        self._facts, self._are_due = facts, are_due
        self._call = replace(call, grad_scale=None if call.grad_scale is None else call.grad_scale.clone())

    def make(self) -> None:
        """Make it, from sums that are there again."""
        upcoming = self.stepper.next
        upcoming.set_facts(self._facts)
        if self._are_due:
            upcoming.take_scaler_factor()
        self.stepper.note_scaler(self._call)
        upcoming.agree(self._numbers)
        self.stepper.make(self._numbers.numbers)

    @contextlib.contextmanager
    def gradients_back(self) -> Iterator[None]:
        """Parameters have the gradients of the step meanwhile. Raises CommunicationError if these have changed."""
        for param, (grad, version) in zip(self._params, self._gradients, strict=True):
            if grad is not None and grad._version != version:
                raise CommunicationError(
                    f"the step before can't be made again: a gradient of shape {list(param.shape)} was changed after "
                    "it. Use zero_grad() as it is, without set_to_none=False"
                )
        present = [param.grad for param in self._params]
        for param, (grad, _) in zip(self._params, self._gradients, strict=True):
            param.grad = grad
        try:
            yield
        finally:
            for param, grad in zip(self._params, present, strict=True):
                param.grad = grad
