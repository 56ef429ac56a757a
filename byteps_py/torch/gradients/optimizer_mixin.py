"""The class of distributed optimizers, as a script sees it: step() uses the gradients of all ranks.

Owns the names of torch and Horovod, those of parameters as a script gives them, and the state that an optimizer shares
with the one that it wraps. Its stepper makes the steps. The training thread calls.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Self

import torch

from byteps_py.errors import UsageError
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.gradients.stepper import Names, StepCall, Stepper
from byteps_py.torch.operations.state_broadcast import StateListener

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


def checked_names(
    optimizer: torch.optim.Optimizer, named_parameters: NamedParameters | None
) -> dict[torch.nn.Parameter, str]:
    """The name of each parameter, in the given order; numbers if ``named_parameters`` is empty. Raises UsageError."""
    named = list(named_parameters) if named_parameters is not None else []
    if any(not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)) for pair in named):
        raise UsageError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    seen: set[str] = set()
    duplicates = {name for name, _ in named if name in seen or seen.add(name)}  # type: ignore[func-returns-value]
    if duplicates:
        raise UsageError(
            "Parameter names in named_parameters must be unique. Found duplicates: " + ", ".join(sorted(duplicates))
        )
    if not named:
        return {
            param: f"push_pull.parameter.{g}.{i}"
            for g, group in enumerate(optimizer.param_groups)
            for i, param in enumerate(group["params"])
        }
    names = {param: name for name, param in reversed(named)}
    unnamed = [
        f"{tuple(param.shape)} at position {i} of group {g}"
        for g, group in enumerate(optimizer.param_groups)
        for i, param in enumerate(group["params"])
        if param not in names
    ]
    if unnamed:
        raise UsageError(
            "named_parameters was specified, but one or more model parameters were not named. Parameters of shape: "
            + ", ".join(unnamed)
        )
    return dict(reversed(names.items()))


class DistributedOptimizerMixin(StateListener):
    """The base class that DistributedOptimizer puts before the wrapped optimizer's class."""

    _wrapped: torch.optim.Optimizer  # the optimizer passed to DistributedOptimizer; owns groups and state
    _stepper: Stepper
    _parameter_names: Names  # Horovod's name for it, which scripts read

    def __init__(self, optimizer: torch.optim.Optimizer, stepper: Stepper) -> None:
        """``optimizer``: what the new object looks like, with the same state."""
        self.__dict__.update(optimizer.__dict__)
        for name in ("step", *_SHARED):  # a scheduler's wrapper would bypass the new class's step()
            self.__dict__.pop(name, None)
        self._wrapped = stepper.wrapped.optimizer
        self._stepper = stepper
        self._parameter_names = stepper.wrapped.names

    @classmethod
    def wrap(cls, optimizer: torch.optim.Optimizer, stepper: Stepper) -> Self:
        """An object of a class that derives from this one and from the optimizer's."""
        base = type(optimizer)
        kind = type(base.__name__, (cls, base), {"__doc__": base.__doc__})
        wrapper: Self = kind(optimizer, stepper)
        return wrapper

    @property
    def combining_ranks(self) -> tuple[int, ...]:
        """The global ranks that combine gradients; (): all."""
        return self._stepper.group

    def _check(self, call: str) -> None:
        if (refusal := self._stepper.refusal(call)) is not None:
            raise refusal

    # Properties, because holders of the wrapped optimizer (such as a scheduler made before) and holders of this one
    # must see the same objects, also after one of the two has loaded a state, which replaces the objects.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups."""
        if _is_scaler(sys._getframe(1)):
            self._check("unscale_")
            return self._stepper.groups_to_unscale()
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
        return self._stepper.wrapped.passes.per_step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum gradients over ``passes`` backward passes from the next step on.

        Raises GradientOrderError between backward() and step().
        """
        check_passes(passes)
        self._check("set_backward_passes_per_step")
        self._stepper.wrapped.passes.per_step = passes

    def synchronize(self) -> None:
        """Wait until every ``p.grad`` is the average over all ranks. A missing gradient counts as zeros.

        step() synchronizes by itself. Call this to clip or unscale gradients, then call step() inside
        skip_synchronize(). Has no effect with Adasum, where gradients stay this rank's own, and may be clipped before
        step(). Raises GradientOrderError, MismatchError, StallError, PeerLostError or NonFiniteError; UsageError if the
        optimizer is hosted, because averages do not come back to the ranks.
        """
        self._check("synchronize")
        self._stepper.finish()
        if self._stepper.averages is not None:
            self._stepper.averages.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, step() uses the gradients as they are. Raises GradientOrderError (an AssertionError) with Adasum, and
        UsageError if the optimizer is hosted."""
        self._check("skip_synchronize")
        averages = self._stepper.averages
        with averages.skipped() if averages is not None else contextlib.nullcontext():
            yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, unless the script has done so, then let the wrapped optimizer step.

        With a closure, the gradients of each evaluation are averaged. The loss that it returns is this rank's: for an
        optimizer that branches on it (LBFGS), return push_pull(loss.detach()). Raises as synchronize() does.

        With Adasum, the wrapped optimizer steps, then ranks combine the changes. If that fails, the weights stay as
        before the step.

        CrossBarrier's hands over the remaining gradients and returns. Until the next forward pass of a layer, the layer
        has its old weights, and its gradients are NaN. After synchronize(), and if the optimizer has step hooks, which
        need the new weights, step() waits and updates as DistributedOptimizer's does; so does the step with number
        ``num_steps``. Raises UsageError for a closure.

        Of a hosted optimizer, it lets the services step, and takes the new parameters. Raises UsageError for a closure,
        and for a hyperparameter that is NaN or infinite; MismatchError if ranks have different param_groups. After an
        error no rank has the step. With step_in_backward, it also raises GradientOrderError if a number of param_groups
        or a parameter was changed since backward(): the step has been made all the same, on all ranks, with what
        backward() has found.
        """
        overflows = bool(getattr(self, "found_inf", 0.0))
        call = StepCall(closure, super().step, getattr(self, "grad_scale", None), overflows)  # type: ignore[misc]
        loss = self._stepper.step(call)
        contexts.current().stepped(id(self))
        return loss

    # torch wraps a class's step() for its profiler and hooks. It has wrapped that of the original class already.
    step.hooked = True  # type: ignore[attr-defined]

    def _mark_stepped(self) -> None:
        """See WrappedOptimizer: of schedulers made with this object, which another one wraps."""
        self._opt_called = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See torch.optim.Optimizer. Raises GradientOrderError between backward() and step() or synchronize()."""
        self._check("zero_grad")
        self._stepper.zero()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """See torch.optim.Optimizer. Completes a step that is under way first."""
        self._check("state_dict")
        self._stepper.finish()
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See torch.optim.Optimizer. Discards gradients that were computed since the last step."""
        self._stepper.drop()
        self._stepper.state_replaced()
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def _state_replaced(self) -> None:
        self._stepper.state_replaced()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch.optim.Optimizer. New parameters keep the names from ``named_parameters``, or get numbers."""
        self._check("add_param_group")
        self._stepper.finish()
        super().add_param_group(param_group)  # type: ignore[misc]
        try:
            self._stepper.wrapped.add_groups()
        except UsageError:
            self._wrapped.param_groups.pop()
            raise


#: Attributes that an optimizer shares with the one that it wraps.
_SHARED = ("param_groups", "state")


def _is_scaler(frame: FrameType) -> bool:
    """True if a GradScaler is the caller. It has no other way to announce that it is about to change gradients."""
    return frame.f_code.co_name == "_unscale_grads_" and isinstance(frame.f_locals.get("self"), torch.amp.GradScaler)


def check_passes(passes: int) -> None:
    """Raises UsageError for a number of passes below 1."""
    if passes < 1:
        raise UsageError(f"backward_passes_per_step must be > 0, got {passes}: it must be at least 1")
