"""A function of the training script that makes a step, as a RepeatableCall: see RunState.retry. The training thread
calls.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from byteps_py.errors import CommunicationError, UsageError
from byteps_py.torch.gradients.hosted.stepper import HostedStepper
from byteps_py.torch.run.model_state import ModelState

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunParts:
    """Of a RunState. ``copies``: of what a step may change beside weights, the optimizer's states and the loader.
    ``put_back``: be as of these, which stay as they are."""

    model: torch.nn.Module
    copies: Callable[[], dict[str, Any]]
    put_back: Callable[[dict[str, Any]], None]


class RetriedCall(Generic[T]):
    """``call``: a function with its arguments. ``run``: what belongs to it."""

    def __init__(self, run: RunParts, stepper: HostedStepper, call: functools.partial[T]) -> None:
        self._run, self._stepper, self._call = run, stepper, call

    def make(self) -> T:
        found = self._call()
        if self._stepper.wrapped.passes.has_begun:
            raise UsageError(
                "RunState.retry: the function has computed gradients and has not stepped with them, so it can't be "
                "called again by itself: compute all gradients of a step, and call optimizer.step(), in one function"
            )
        return found

    def finish(self) -> T:
        raise CommunicationError(
            "all ranks are started again: the step was made, and the rest of the function can't be repeated without it"
        )

    def state(self) -> _Before:
        leaves = tree_leaves((self._call.args, self._call.keywords))
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        params = self._stepper.wrapped.params
        return _Before(
            self._run.copies(), ModelState.of(self._run.model, tensors), [_GradientBefore.of(each) for each in params]
        )

    def put_back(self, state: _Before) -> None:
        state.model.check()
        for gradient in state.gradients:
            gradient.check()
        for gradient in state.gradients:
            gradient.put_back()
        state.model.put_back()
        self._run.put_back(state.run)


@dataclass(frozen=True, slots=True)
class _GradientBefore:
    """A parameter's gradient before a call. It is not kept: zero_grad() has removed it, or does so in the call."""

    param: torch.nn.Parameter
    gradient: weakref.ref[torch.Tensor] | None
    version: int

    @classmethod
    def of(cls, param: torch.nn.Parameter) -> _GradientBefore:
        grad = param.grad
        return cls(param, None, 0) if grad is None else cls(param, weakref.ref(grad), grad._version)

    @property
    def _is_there(self) -> bool:
        return self.gradient is not None and self.param.grad is not None and self.gradient() is self.param.grad

    def check(self) -> None:
        """Raises CommunicationError if there was one, and the call has changed it."""
        grad = self.param.grad
        if self._is_there and grad is not None and grad._version != self.version:
            raise CommunicationError(
                "all ranks are started again: the step under way has changed a gradient that was there before it, of "
                f"shape {list(grad.shape)}. Use zero_grad() as it is, without set_to_none=False"
            )

    def put_back(self) -> None:
        if not self._is_there:
            self.param.grad = None


@dataclass(frozen=True, slots=True)
class _Before:
    """``run``: of the RunState."""

    run: dict[str, Any]
    model: ModelState
    gradients: Sequence[_GradientBefore]
