"""What DistributedOptimizer (optimizer.py) makes of an optimizer: step() works with the gradients of all ranks.

Owns the order of calls; which gradients there are is known to passes.py, and what happens to a final one is the
GradientReducer's. The training thread calls.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from byteps_py.errors import GradientOrderError, NonFiniteError
from byteps_py.torch import context as contexts
from byteps_py.torch import nonfinite
from byteps_py.torch.arguments import check_passes
from byteps_py.torch.buckets import GradientReducer
from byteps_py.torch.passes import Passes

Names = dict[torch.nn.Parameter, str]


class _LeftOutError(Exception):
    """Ends the wrapped optimizer's step before it uses gradients that are not finite."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class Distributed:
    """What DistributedOptimizer puts before the wrapped optimizer's class."""

    param_groups: list[dict[str, Any]]
    _passes: Passes
    _reducer: GradientReducer
    _parameter_names: Names  # Horovod's name for it, which scripts read
    _synchronized: bool
    _should_synchronize: bool
    _poison: NonFiniteError | None = None  # the step with these gradients is to be left out

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
        self._reducer.finish()
        self._poison = self._reducer.poison
        self._synchronized = True
        self._passes.hook(p for group in self.param_groups for p in group["params"])  # unfrozen meanwhile

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
        if self._should_synchronize:
            if closure is not None:
                closure = self._synchronizing(closure)
            elif not self._synchronized or self._passes.begun:
                self.synchronize()
            else:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): the "
                    "gradients are taken as they are, as inside it. Write `with optimizer.skip_synchronize():` around "
                    "the step to say so",
                    stacklevel=2,
                )
        self._synchronized = False
        poison, self._poison = self._poison, None
        if poison is not None and closure is None:
            nonfinite.tell(poison, contexts.current().session)
            return None
        try:
            return super().step(closure)  # type: ignore[misc]
        except _LeftOutError as left_out:
            return left_out.loss

    # torch wraps a class's step() for its profiler and hooks; the wrapped optimizer's is wrapped already.
    step.hooked = True  # type: ignore[attr-defined]

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            self.synchronize()
            poison, self._poison = self._poison, None
            if poison is not None:
                nonfinite.tell(poison, contexts.current().session)
                raise _LeftOutError(loss)
            return loss

        return evaluate

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See torch.optim.Optimizer. Raises GradientOrderError while gradients are on their way."""
        if self._passes.begun:
            raise GradientOrderError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition. To drop the "
                "gradients, call optimizer.synchronize() first."
            )
        self._poison = None
        self._synchronized = False
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See torch.optim.Optimizer. Gradients that were computed since the last step are not combined any more."""
        self._passes.drop()
        self._synchronized = False
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch.optim.Optimizer. New parameters have the names that named_parameters gave them, if it did."""
        super().add_param_group(param_group)  # type: ignore[misc]
        number = len(self.param_groups) - 1
        new = [
            (self._parameter_names.setdefault(param, f"push_pull.parameter.{number}.{i}"), param)
            for i, param in enumerate(self.param_groups[-1]["params"])
        ]
        self._passes.add(new)
        self._passes.hook(param for _, param in new)
