"""Pending updates of CrossBarrier: step() adds them, and they are applied when a layer needs its parameters.

Owns ``param.grad`` meanwhile. Must not know modules or the wrapped optimizer. The training thread calls; a lock covers
forward passes on other threads.

    step ─ add(bucket) ─► p.grad = placeholder ─┐
    a layer's forward ─ wait_for(params) ───────┴► averages into p.grad ─► update ─► repeat zero_grad's change to p.grad
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
    """Replaces a gradient while it is in flight, and records what the script does to it.

    It reads as NaN, so that no stale gradient is used, and takes no memory. If the gradient stayed in place,
    zero_grad(set_to_none=False) would overwrite shared memory that is being summed.
    """

    def __init__(self, param: torch.nn.Parameter) -> None:
        self.param = param
        self._gradient = param.grad
        self._tensor = torch.full((), math.nan, dtype=param.dtype, device=param.device).expand(param.shape)
        param.grad = self._tensor

    def restore(self) -> Callable[[], None]:
        """Put the gradient back. Call the result after the update: it repeats the script's change to the gradient."""
        replacement = self.param.grad
        self.param.grad = self._gradient
        if replacement is not self._tensor:

            def replay() -> None:
                self.param.grad = replacement
        else:
            # All elements share one value, so the script can only have filled it. The tensor's version would not show
            # that: ``grad.data.zero_()`` does not change it.
            value = self._tensor

            def replay() -> None:
                grad = self.param.grad
                if grad is None:
                    return
                if not value.is_cpu:  # does not wait for the device
                    grad.copy_(torch.where(value.isnan(), grad, value))
                elif not math.isnan(filled := value.view(-1)[0].item() if value.numel() else math.nan):
                    grad.fill_(filled)

        return replay


class _PendingBucket:
    """A bucket in flight, and the hyperparameters for the update of its parameters."""

    def __init__(self, bucket: Bucket, hyperparameters: Hyperparameters) -> None:
        self.bucket = bucket
        self.hyperparameters = hyperparameters
        self.params = [p for p, participates in zip(bucket.params, bucket.participates, strict=True) if participates]
        self.placeholders = [_GradientPlaceholder(param) for param in self.params]


class PendingUpdates:
    """``update(hyperparameters, params)`` lets the wrapped optimizer update only ``params``."""

    def __init__(self, reducer: GradientReducer, update: Update) -> None:
        self._reducer = reducer
        self._update = update
        self._pending: dict[torch.nn.Parameter, _PendingBucket] = {}
        self._lock = threading.RLock()

    def __contains__(self, param: torch.nn.Parameter) -> bool:
        return param in self._pending

    def add(self, bucket: Bucket, hyperparameters: Hyperparameters) -> None:
        """Add the parameters of ``bucket``, which is in flight. Their gradients become placeholders."""
        pending = _PendingBucket(bucket, hyperparameters)
        self._pending.update((param, pending) for param in pending.params)

    def wait_for(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Return when ``params`` are up to date, and the parameters whose gradients travel with theirs.

        Raises the first error of their exchange. Then nothing is pending, and the pending updates are discarded.
        """
        if not self._pending:
            return
        with self._lock:
            for param in params:
                pending = self._pending.get(param)
                if pending is not None:
                    self._apply(pending)

    def finish(self) -> None:
        """Return when all parameters are up to date. Raises as ``wait_for`` does."""
        with self._lock:
            while self._pending:
                self._apply(next(iter(self._pending.values())))

    def _apply(self, pending: _PendingBucket) -> None:
        replays = self._remove(pending)
        try:
            is_usable = self._reducer.finish_bucket(pending.bucket)
            # The caller may be in a forward pass under autocast or inference_mode, in which step() was not.
            kinds = {param.device.type for param in pending.params if torch.is_autocast_enabled(param.device.type)}
            with torch.inference_mode(False), _no_autocast(kinds), torch.no_grad():
                if is_usable:
                    self._update(pending.hyperparameters, pending.params)
                for replay in replays:
                    replay()
        except BaseException:
            self._discard_rest()
            raise

    def _remove(self, pending: _PendingBucket) -> list[Callable[[], None]]:
        for param in pending.params:
            del self._pending[param]
        return [placeholder.restore() for placeholder in pending.placeholders]

    def _discard_rest(self) -> None:
        """Receive the other buckets without using them: after an error no exchange may stay pending."""
        while self._pending:
            pending = next(iter(self._pending.values()))
            self._remove(pending)
            with contextlib.suppress(Exception):  # the caller gets the first error
                self._reducer.finish_bucket(pending.bucket)


def _no_autocast(kinds: Iterable[str]) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
