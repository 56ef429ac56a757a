"""The base class of distributed optimizers: step() uses the gradients of all ranks.

Owns the order of calls (backward, synchronize, step, zero_grad). backward_passes.py knows which gradients were
computed, gradient_reducer.py combines them. The training thread calls.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from byteps_py.errors import GradientOrderError, NonFiniteError, UsageError
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives import nonfinite
from byteps_py.torch.collectives.parameter_owners import check_unowned
from byteps_py.torch.gradients.backward_passes import BackwardPasses
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.optimizer_arguments import check_passes
from byteps_py.torch.operations.state_broadcast import StateListener

Names = dict[torch.nn.Parameter, str]


class _SkipStepError(Exception):
    """Ends the wrapped optimizer's step before it uses gradients that are not finite."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class DistributedOptimizerMixin(StateListener):
    """The base class that DistributedOptimizer puts before the wrapped optimizer's class."""

    _wrapped: torch.optim.Optimizer  # the optimizer passed to DistributedOptimizer; owns groups and state
    _passes: BackwardPasses
    _reducer: GradientReducer
    _groups_added: int  # parameter groups whose gradients are combined
    _parameter_names: Names  # Horovod's name for it, which scripts read
    _synchronized: bool
    _should_synchronize: bool
    _synchronized_for_scaler: bool = False  # synchronized for a GradScaler, not by the script
    _nonfinite_error: NonFiniteError | None = None  # set if the next step must be skipped

    # Properties, because holders of the wrapped optimizer (such as a scheduler made before) and holders of this one
    # must see the same objects, also after one of the two has loaded a state, which replaces the objects.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups."""
        if _is_scaler(sys._getframe(1)):
            return self._groups_to_unscale()
        return self._wrapped.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._wrapped.param_groups = groups

    def _set_state(self, state: Any) -> None:
        self._wrapped.state = state

    # Optimizers read it for each parameter, so the getter is written in C.
    state = property(operator.attrgetter("_wrapped.state"), _set_state, doc="The wrapped optimizer's state.")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by torch's load_state_dict."""
        for name in _SHARED:
            if name in state:
                setattr(self, name, state[name])
        super().__setstate__(state)  # type: ignore[misc]
        for name in _SHARED:
            self.__dict__.pop(name, None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises UsageError: the object belongs to this process and its job."""
        raise UsageError(
            "a DistributedOptimizer can't be copied or pickled: it is a part of this process and its job. Save, copy "
            "or send optimizer.state_dict() and load it into an optimizer that is wrapped there; or make ranks equal "
            "by broadcast_optimizer_state(optimizer, root_rank=0)"
        )

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes whose gradients a step sums."""
        return self._passes.per_step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum gradients over ``passes`` backward passes from the next step on.

        Raises GradientOrderError between backward() and step().
        """
        check_passes(passes)
        if self._passes.has_begun:
            raise GradientOrderError("set_backward_passes_per_step() was called between backward() and step()")
        self._passes.per_step = passes

    def synchronize(self) -> None:
        """Wait until every ``p.grad`` is the average over all ranks. A missing gradient counts as zeros.

        step() synchronizes by itself. Call this to clip or unscale gradients, then call step() inside
        skip_synchronize(). Raises GradientOrderError, MismatchError, StallError, PeerLostError or NonFiniteError.
        """
        self._nonfinite_error = None
        self._synchronized_for_scaler = False
        self._add_new_groups()
        self._reducer.finish()
        self._nonfinite_error = self._reducer.nonfinite_error
        self._synchronized = True
        self._passes.hook(p for group in self.param_groups for p in group["params"])  # some may have been unfrozen

    def _groups_to_unscale(self) -> list[dict[str, Any]]:
        """A GradScaler is about to unscale gradients in place and check them for NaN and infinity. They must be the
        averages by then, so that all ranks find the same."""
        if self._should_synchronize and (not self._synchronized or self._passes.has_begun):
            self.synchronize()
            self._synchronized_for_scaler = True
        return self._wrapped.param_groups

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, step() uses the gradients as they are."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, unless the script has done so, then let the wrapped optimizer step.

        With a closure, the gradients of each evaluation are averaged. The loss that it returns is this rank's: for an
        optimizer that branches on it (LBFGS), return push_pull(loss.detach()). Raises as synchronize() does.
        """
        is_followed = False
        if self._should_synchronize:
            if closure is not None:
                closure = self._synchronizing(closure)
                is_followed = True
            elif not self._synchronized or self._passes.has_begun:
                self.synchronize()
            elif not self._synchronized_for_scaler:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): the "
                    "gradients are taken as they are, as inside it. Write `with optimizer.skip_synchronize():` around "
                    "the step to say so",
                    stacklevel=2,
                )
        self._synchronized = False
        self._mark_stepped()
        nonfinite_error, self._nonfinite_error = self._nonfinite_error, None
        if nonfinite_error is not None and closure is None:
            nonfinite.tell(nonfinite_error, contexts.current().session)
            return None
        try:
            loss = super().step(closure)  # type: ignore[misc]
        except _SkipStepError as skipped:
            return skipped.loss
        if is_followed:
            self._reducer.check_closure_calls(None)
        return loss

    # torch wraps a class's step() for its profiler and hooks. It has wrapped that of the original class already.
    step.hooked = True  # type: ignore[attr-defined]

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        evaluations = itertools.count(1)

        def evaluate() -> Any:
            loss = closure()
            self._reducer.check_closure_calls(next(evaluations))
            self.synchronize()
            self._synchronized = False  # the optimizer uses them at once
            nonfinite_error, self._nonfinite_error = self._nonfinite_error, None
            if nonfinite_error is not None:
                nonfinite.tell(nonfinite_error, contexts.current().session)
                raise _SkipStepError(loss)
            return loss

        return evaluate

    def _mark_stepped(self) -> None:
        """Mark the wrapped optimizer as stepped: schedulers made with it warn if they are stepped before it."""
        self._wrapped._opt_called = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See torch.optim.Optimizer. Raises GradientOrderError between backward() and step() or synchronize()."""
        if self._passes.has_begun:
            raise GradientOrderError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition. To drop the "
                "gradients, call optimizer.synchronize() first."
            )
        if self._synchronized and self._nonfinite_error is None:
            self._reducer.note_unused_averages()
        self._nonfinite_error = None
        self._synchronized = False
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See torch.optim.Optimizer. Discards gradients that were computed since the last step."""
        self._passes.drop()
        self._state_replaced()
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def _state_replaced(self) -> None:
        """All ranks are about to have equal state. Also called on the rank that sends its state."""
        self._synchronized = False
        self._reducer.forget_unused_averages()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch.optim.Optimizer. New parameters keep the names from ``named_parameters``, or get numbers."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._add_new_groups()

    def _add_new_groups(self) -> bool:
        """Combine also the gradients of groups that were added to this optimizer or to the wrapped one. True if there
        are new parameters."""
        new = []
        for number, group in enumerate(self._wrapped.param_groups[self._groups_added :], self._groups_added):
            for i, param in enumerate(group["params"]):
                new.append((self._parameter_names.setdefault(param, f"push_pull.parameter.{number}.{i}"), param))
        if new:
            check_unowned(new, "DistributedOptimizer")
            self._groups_added = len(self._wrapped.param_groups)
            self._passes.add(new)
            self._passes.hook(param for _, param in new)
        return bool(new)


#: Attributes that an optimizer shares with the one that it wraps.
_SHARED = ("param_groups", "state")


def _is_scaler(frame: FrameType) -> bool:
    """True if a GradScaler is the caller. It has no other way to announce that it is about to change gradients."""
    return frame.f_code.co_name == "_unscale_grads_" and isinstance(frame.f_locals.get("self"), torch.amp.GradScaler)
