"""Backward passes: which gradients they have computed, and when one is final.

Owns the hooks on parameters. Autograd's threads call these, the training thread everything else. The hooks hold their
owner weakly: parameters outlive an optimizer, and the next one has hooks of its own.
"""

from __future__ import annotations

import abc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from byteps_py.errors import GradientOrderError
from byteps_py.torch.gradients.gradient_reducer import GradientReducer

Hook = Callable[[torch.Tensor], None]

#: Horovod's words.
_TOO_OFTEN = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)


class BackwardPasses(abc.ABC):
    """Of the parameters of one optimizer."""

    #: How many there may be in a step. It may be changed between steps.
    per_step: int

    def __init__(self) -> None:
        self._hooked: set[torch.nn.Parameter] = set()

    def hook(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Watch those that require gradients and are not watched yet."""
        for param in params:
            if param.requires_grad and param not in self._hooked:
                self._hooked.add(param)
                param.register_post_accumulate_grad_hook(self._hook_of(param))

    @property
    @abc.abstractmethod
    def begun(self) -> bool:
        """True if a gradient was computed in this step."""

    @abc.abstractmethod
    def add(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """There are more parameters."""

    @abc.abstractmethod
    def drop(self) -> None:
        """Forget what was computed in this step: the next pass is the first one."""

    @abc.abstractmethod
    def _hook_of(self, param: torch.nn.Parameter) -> Hook:
        """One that does not hold ``param``, which holds it."""


class CountedPasses(BackwardPasses):
    """Counts those of each parameter; its gradient stays where it is."""

    def __init__(self, per_step: int) -> None:
        super().__init__()
        self.per_step = per_step
        self._counts: Counter[torch.Tensor] = Counter()

    @property
    def begun(self) -> bool:
        return bool(self._counts)

    def add(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        pass

    def drop(self) -> None:
        self._counts.clear()

    def _hook_of(self, param: torch.nn.Parameter) -> Hook:
        me = weakref.ref(self)

        def computed(param: torch.Tensor) -> None:
            passes = me()
            if passes is not None:
                passes._count(param)

        return computed

    def _count(self, param: torch.Tensor) -> None:
        if self._counts[param] == self.per_step:
            raise GradientOrderError(_TOO_OFTEN)
        self._counts[param] += 1


class ReducedPasses(BackwardPasses):
    """Hands each gradient to a reducer, which counts those of a bucket together."""

    def __init__(self, reducer: GradientReducer, per_step: int) -> None:
        super().__init__()
        self._reducer = reducer
        reducer.too_often = _TOO_OFTEN
        reducer.passes = per_step

    @property
    def per_step(self) -> int:
        return self._reducer.passes

    @per_step.setter
    def per_step(self, per_step: int) -> None:
        self._reducer.passes = per_step

    def hook(self, params: Iterable[torch.nn.Parameter]) -> None:
        if not self._reducer.outside:
            super().hook(params)

    @property
    def begun(self) -> bool:
        return self._reducer.begun

    def add(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self._reducer.add(named)

    def drop(self) -> None:
        self._reducer.drop()

    def _hook_of(self, param: torch.nn.Parameter) -> Hook:
        me, place = weakref.ref(self), self._reducer.place(param)

        def computed(param: torch.Tensor) -> None:
            passes = me()
            if passes is not None:
                passes._reducer.ready(place, param)

        return computed
