"""Updates that wait for their gradients: handed over by step(), applied when a layer needs its parameters.

Owns what stands in ``param.grad`` meanwhile. Must not know modules or the wrapped optimizer. The training thread
calls; a lock covers forward passes on other threads.

    step ─ add(bucket) ─► p.grad = stand-in ┐
    a layer's forward ─ wait_for(params) ───┴► the bucket's averages into p.grad ─► update ─► as zero_grad left it
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from byteps_py.torch.gradients.bucket import Bucket
from byteps_py.torch.gradients.gradient_reducer import GradientReducer

Hyperparameters = list[dict[str, Any]]  # of each parameter group, without its parameters
Update = Callable[[Hyperparameters, list[torch.nn.Parameter]], None]


class _GradientPlaceholder:
    """Takes a gradient's place while it is on its way, and sees what becomes of it.

    It reads as NaN, so that nobody works with a stale gradient, and takes no memory. Were the gradient left in its
    place, zero_grad(set_to_none=False) would overwrite shared memory that is being summed.
    """

    def __init__(self, param: torch.nn.Parameter) -> None:
        self.param = param
        self._gradient = param.grad
        self._tensor = torch.full((), math.nan, dtype=param.dtype, device=param.device).expand(param.shape)
        param.grad = self._tensor

    def give_way(self) -> Callable[[], None]:
        """Put the gradient back. The result, called after the update, does what was done to the stand-in."""
        left = self.param.grad
        self.param.grad = self._gradient
        if left is not self._tensor:

            def replay() -> None:
                self.param.grad = left
        else:
            # It is one element, seen everywhere, so that all that can be done to it is to fill it. Its version would
            # not say so: ``grad.data.zero_()`` does not change it.
            value = self._tensor

            def replay() -> None:
                grad = self.param.grad
                if grad is None:
                    return
                if not value.is_cpu:  # without waiting for the device
                    grad.copy_(torch.where(value.isnan(), grad, value))
                elif not math.isnan(filled := value.view(-1)[0].item() if value.numel() else math.nan):
                    grad.fill_(filled)

        return replay


class _PendingBucket:
    """A bucket on its way, and how its parameters are to be updated."""

    def __init__(self, bucket: Bucket, hyperparameters: Hyperparameters) -> None:
        self.bucket = bucket
        self.hyperparameters = hyperparameters
        self.params = [p for p, takes_part in zip(bucket.params, bucket.takes_part, strict=True) if takes_part]
        self.stand_ins = [_GradientPlaceholder(param) for param in self.params]


class PendingUpdates:
    """``update(hyperparameters, params)`` lets the wrapped optimizer update just these."""

    def __init__(self, reducer: GradientReducer, update: Update) -> None:
        self._reducer = reducer
        self._update = update
        self._awaited: dict[torch.nn.Parameter, _PendingBucket] = {}
        self._lock = threading.RLock()

    def __contains__(self, param: torch.nn.Parameter) -> bool:
        return param in self._awaited

    def add(self, bucket: Bucket, hyperparameters: Hyperparameters) -> None:
        awaited = _PendingBucket(bucket, hyperparameters)
        self._awaited.update((param, awaited) for param in awaited.params)

    def wait_for(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Return when ``params``, and what travels with them, are up to date.

        Raises the first error of their exchange; then nothing is pending, and what was has not been updated.
        """
        if not self._awaited:
            return
        with self._lock:
            for param in params:
                awaited = self._awaited.get(param)
                if awaited is not None:
                    self._apply(awaited)

    def finish(self) -> None:
        """``wait_for`` everything."""
        with self._lock:
            while self._awaited:
                self._apply(next(iter(self._awaited.values())))

    def _apply(self, awaited: _PendingBucket) -> None:
        replays = self._forget(awaited)
        try:
            is_usable = self._reducer.arrive(awaited.bucket)
            # The caller may be in a forward pass under autocast or inference_mode; step() was not.
            kinds = {param.device.type for param in awaited.params if torch.is_autocast_enabled(param.device.type)}
            with torch.inference_mode(False), _no_autocast(kinds), torch.no_grad():
                if is_usable:
                    self._update(awaited.hyperparameters, awaited.params)
                for replay in replays:
                    replay()
        except BaseException:
            self._drop()
            raise

    def _forget(self, awaited: _PendingBucket) -> list[Callable[[], None]]:
        for param in awaited.params:
            del self._awaited[param]
        return [stand_in.give_way() for stand_in in awaited.stand_ins]

    def _drop(self) -> None:
        """Take the rest in without using it: after an error no exchange may stay pending."""
        while self._awaited:
            awaited = next(iter(self._awaited.values()))
            self._forget(awaited)
            with contextlib.suppress(Exception):  # the first error is on its way to the caller
                self._reducer.arrive(awaited.bucket)


def _no_autocast(kinds: Iterable[str]) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
