"""What DistributedOptimizer (optimizer.py) makes of an optimizer: step() works with the gradients of all ranks.

Owns the order of calls; which gradients there are is known to passes.py, and what happens to a final one is the
GradientReducer's. The training thread calls.
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
from byteps_py.torch.engine import context as contexts
from byteps_py.torch.engine import nonfinite
from byteps_py.torch.gradients.backward_passes import BackwardPasses
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.optimizer_arguments import check_passes
from byteps_py.torch.horovod.functions import StateListener

Names = dict[torch.nn.Parameter, str]


class _LeftOutError(Exception):
    """Ends the wrapped optimizer's step before it uses gradients that are not finite."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class DistributedOptimizerMixin(StateListener):
    """What DistributedOptimizer puts before the wrapped optimizer's class."""

    _wrapped: torch.optim.Optimizer  # the one given to DistributedOptimizer, whose groups and state these are
    _passes: BackwardPasses
    _reducer: GradientReducer
    _groups_taken_in: int  # whose gradients are combined
    _parameter_names: Names  # Horovod's name for it, which scripts read
    _synchronized: bool
    _should_synchronize: bool
    _synchronized_for_scaler: bool = False  # by itself, not by the script
    _poison: NonFiniteError | None = None  # the step with these gradients is to be left out

    # Asked for each time: what holds the wrapped optimizer (a scheduler made before) and what holds this one must see
    # the same, also after either of them has loaded a state, which puts new objects in their place.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's."""
        if _is_scaler(sys._getframe(1)):
            self._prepare_unscaling()
        return self._wrapped.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._wrapped.param_groups = groups

    def _set_state(self, state: Any) -> None:
        self._wrapped.state = state

    # Optimizers ask for each parameter: the getter is C's.
    state = property(operator.attrgetter("_wrapped.state"), _set_state, doc="The wrapped optimizer's.")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by torch's load_state_dict."""
        for name in _SHARED:
            if name in state:
                setattr(self, name, state[name])
        super().__setstate__(state)  # type: ignore[misc]
        for name in _SHARED:
            self.__dict__.pop(name, None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises UsageError: it belongs to this process and its job."""
        raise UsageError(
            "a DistributedOptimizer can't be copied or pickled: it is a part of this process and its job. Save, copy "
            "or send optimizer.state_dict() and load it into an optimizer that is wrapped there; or make ranks equal "
            "by broadcast_optimizer_state(optimizer, root_rank=0)"
        )

    @property
    def backward_passes_per_step(self) -> int:
        return self._passes.per_step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum gradients over so many backward passes from the next step on."""
        check_passes(passes)
        if self._passes.begun:
            raise GradientOrderError("set_backward_passes_per_step() was called between backward() and step()")
        self._passes.per_step = passes

    def synchronize(self) -> None:
        """Wait until every ``p.grad`` is the average over all ranks. Unused parameters count as zeros.

        step() does it by itself; call it to clip or unscale gradients, then step() in skip_synchronize().
        """
        self._poison = None
        self._synchronized_for_scaler = False
        self._take_in()
        self._reducer.finish()
        self._poison = self._reducer.poison
        self._synchronized = True
        self._passes.hook(p for group in self.param_groups for p in group["params"])  # unfrozen meanwhile

    def _prepare_unscaling(self) -> None:
        """A GradScaler is about to unscale gradients where they lie, and to look for NaN and infinity in them: they
        must be the averages, so that it finds the same on all ranks."""
        if self._should_synchronize and (not self._synchronized or self._passes.begun):
            self.synchronize()
            self._synchronized_for_scaler = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, step() takes the gradients as they are."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average what was not averaged yet, then let the wrapped optimizer step.

        With a closure, the gradients of each evaluation are averaged. A loss it returns stays this rank's:
        an optimizer that branches on it (LBFGS) needs the average, see push_pull.
        """
        is_followed = False
        if self._should_synchronize:
            if closure is not None:
                closure = self._synchronizing(closure)
                is_followed = True
            elif not self._synchronized or self._passes.begun:
                self.synchronize()
            elif not self._synchronized_for_scaler:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): the "
                    "gradients are taken as they are, as inside it. Write `with optimizer.skip_synchronize():` around "
                    "the step to say so",
                    stacklevel=2,
                )
        self._synchronized = False
        self._tell_schedulers()
        poison, self._poison = self._poison, None
        if poison is not None and closure is None:
            nonfinite.tell(poison, contexts.current().session)
            return None
        try:
            loss = super().step(closure)  # type: ignore[misc]
        except _LeftOutError as left_out:
            return left_out.loss
        if is_followed:
            self._reducer.meet(None)
        return loss

    # torch wraps a class's step() for its profiler and hooks; the wrapped optimizer's is wrapped already.
    step.hooked = True  # type: ignore[attr-defined]

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        evaluations = itertools.count(1)

        def evaluate() -> Any:
            loss = closure()
            self._reducer.meet(next(evaluations))
            self.synchronize()
            self._synchronized = False  # they are used at once
            poison, self._poison = self._poison, None
            if poison is not None:
                nonfinite.tell(poison, contexts.current().session)
                raise _LeftOutError(loss)
            return loss

        return evaluate

    def _tell_schedulers(self) -> None:
        """Those made with the wrapped optimizer warn where they are stepped before it."""
        self._wrapped._opt_called = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See torch.optim.Optimizer. Raises GradientOrderError while gradients are on their way."""
        if self._passes.begun:
            raise GradientOrderError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition. To drop the "
                "gradients, call optimizer.synchronize() first."
            )
        if self._synchronized and self._poison is None:
            self._reducer.note_unused()
        self._poison = None
        self._synchronized = False
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See torch.optim.Optimizer. Gradients that were computed since the last step are not combined any more."""
        self._passes.drop()
        self._state_replaced()
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def _state_replaced(self) -> None:
        """Ranks are about to be equal. Also called on the rank whose state the others get."""
        self._synchronized = False
        self._reducer.begin_anew()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch.optim.Optimizer. New parameters have the names that named_parameters gave them, if it did."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._take_in()

    def _take_in(self) -> bool:
        """Combine the gradients of all parameters that there are: groups may have been added to this optimizer, or to
        the one that it wraps. True if there are new ones."""
        new = []
        for number, group in enumerate(self._wrapped.param_groups[self._groups_taken_in :], self._groups_taken_in):
            for i, param in enumerate(group["params"]):
                new.append((self._parameter_names.setdefault(param, f"push_pull.parameter.{number}.{i}"), param))
        if new:
            self._groups_taken_in = len(self._wrapped.param_groups)
            self._passes.add(new)
            self._passes.hook(param for _, param in new)
        return bool(new)


#: What an optimizer has in common with the one that it wraps.
_SHARED = ("param_groups", "state")


def _is_scaler(frame: FrameType) -> bool:
    """Whether a GradScaler asks: it tells an optimizer in no other way that it is about to change gradients."""
    return frame.f_code.co_name == "_unscale_grads_" and isinstance(frame.f_locals.get("self"), torch.amp.GradScaler)
