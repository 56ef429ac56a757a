"""What DistributedOptimizer (optimizer.py) makes of an optimizer: step() works with the gradients of all ranks.

Owns hooks, accumulation over passes and the order of calls; what happens to a final gradient is the
GradientReducer's. Hooks run on autograd's threads, everything else on the training thread.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from byteps_py.errors import GradientOrderError, NonFiniteError
from byteps_py.torch import context as contexts
from byteps_py.torch import nonfinite
from byteps_py.torch.arguments import check_passes
from byteps_py.torch.bucket import Bucket, Place
from byteps_py.torch.buckets import GradientReducer

Names = dict[torch.nn.Parameter, str]


class _LeftOutError(Exception):
    """Ends the wrapped optimizer's step before it uses gradients that are not finite."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class _Watched:
    """A parameter with a hook. ``passes``: backward passes since the last synchronization."""

    __slots__ = ("passes", "place")

    def __init__(self, place: Place | None) -> None:
        self.place = place
        self.passes = 0


class Passes:
    """Counts backward passes of each parameter; on the last one its gradient is ready.

    reducer: None if gradients stay where they are.
    """

    def __init__(self, reducer: GradientReducer | None, passes: int) -> None:
        self.reducer = reducer
        self.per_step = passes
        self._hooked: dict[torch.nn.Parameter, _Watched] = {}
        self._begun: list[_Watched] = []  # has had a pass since the last synchronization

    @property
    def begun(self) -> bool:
        """True if a gradient was computed since the last synchronization."""
        return bool(self._begun)

    def hook(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Watch those that require gradients and are not watched yet."""
        # Weak: the parameters outlive this optimizer, and the next one has hooks of its own.
        me = weakref.ref(self)

        def computed(watched: _Watched, _: torch.Tensor) -> None:
            passes = me()
            if passes is not None:
                passes._computed(watched)

        reducer = self.reducer
        if reducer is not None and reducer.outside:
            return
        for param in params:
            if param.requires_grad and param not in self._hooked:
                watched = self._hooked[param] = _Watched(None if reducer is None else reducer.place(param))
                param.register_post_accumulate_grad_hook(functools.partial(computed, watched))

    def _computed(self, watched: _Watched) -> None:
        done = watched.passes + 1
        if done > self.per_step:
            raise GradientOrderError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        if done == 1:
            self._begun.append(watched)
        watched.passes = done
        if done == self.per_step and self.reducer is not None and watched.place is not None:
            self.reducer.ready(watched.place)

    def finish(self) -> None:
        try:
            if self.reducer is not None:
                self.reducer.finish()
        finally:
            self.over()

    @property
    def poison(self) -> NonFiniteError | None:
        """Why the step is to be left out."""
        return self.reducer.poison if self.reducer is not None else None

    def depart(self) -> list[Bucket]:
        """The first half of ``finish``, see GradientReducer."""
        try:
            return [] if self.reducer is None else self.reducer.depart()
        finally:
            self.over()

    def drop(self) -> None:
        """Forget what was computed since the last synchronization."""
        try:
            if self.reducer is not None:
                self.reducer.drop()
        finally:
            self.over()

    def over(self) -> None:
        """The next pass is the first one of its step."""
        for watched in self._begun:
            watched.passes = 0
        self._begun.clear()


class Distributed:
    """What DistributedOptimizer puts before the wrapped optimizer's class."""

    param_groups: list[dict[str, Any]]
    _passes: Passes
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
        self._passes.finish()
        self._poison = self._passes.poison
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
        if self._passes.reducer is not None:
            self._passes.reducer.add(new)
        self._passes.hook(param for _, param in new)
