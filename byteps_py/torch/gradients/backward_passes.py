"""Tracks backward passes: which gradients they have computed, and when a gradient is final.

Owns the hooks on parameters. Autograd's threads call the hooks, the training thread everything else. Hooks hold their
owner by a weak reference, because parameters outlive an optimizer, and the next optimizer registers hooks of its own.
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
    """The backward passes over one optimizer's parameters."""

    #: The number of backward passes in a step. May be changed between steps.
    per_step: int

    def __init__(self) -> None:
        self._hooked: set[torch.nn.Parameter] = set()

    def hook(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Register hooks on ``params`` that require gradients and have none yet."""
        for param in params:
            if param.requires_grad and param not in self._hooked:
                self._hooked.add(param)
                param.register_post_accumulate_grad_hook(self._hook_of(param))

    @property
    @abc.abstractmethod
    def has_begun(self) -> bool:
        """True if a gradient was computed since the last step."""

    def add(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """Add parameters, and hooks on those that require gradients."""
        self.hook(param for _, param in named)

    @abc.abstractmethod
    def drop(self) -> None:
        """Forget gradients that were computed since the last step: the next pass is the first one."""

    @abc.abstractmethod
    def _hook_of(self, param: torch.nn.Parameter) -> Hook:
        """The hook of ``param``. It must not hold ``param``, which holds the hook."""


class CountedPasses(BackwardPasses):
    """Counts the passes of each parameter. Gradients are not exchanged."""

    def __init__(self, per_step: int) -> None:
        super().__init__()
        self.per_step = per_step
        self._counts: Counter[torch.Tensor] = Counter()

    @property
    def has_begun(self) -> bool:
        return bool(self._counts)

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
    """Hands each gradient to a reducer, which counts passes by bucket."""

    def __init__(self, reducer: GradientReducer, per_step: int) -> None:
        super().__init__()
        self._reducer = reducer
        reducer.too_often_remedy = _TOO_OFTEN
        reducer.passes_per_step = per_step

    @property
    def per_step(self) -> int:
        return self._reducer.passes_per_step

    @per_step.setter
    def per_step(self, per_step: int) -> None:
        self._reducer.passes_per_step = per_step

    def hook(self, params: Iterable[torch.nn.Parameter]) -> None:
        if not self._reducer.is_excluded:
            super().hook(params)

    @property
    def has_begun(self) -> bool:
        return self._reducer.has_begun

    def add(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self._reducer.add(named)
        super().add(named)

    def drop(self) -> None:
        self._reducer.drop()

    def _hook_of(self, param: torch.nn.Parameter) -> Hook:
        me, place = weakref.ref(self), self._reducer.place(param)

        def computed(param: torch.Tensor) -> None:
            passes = me()
            if passes is not None:
                passes._reducer.ready(place, param)

        return computed
