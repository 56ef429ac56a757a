"""Backward passes: which gradients they have computed, and when one is final.

Owns the hooks on parameters. Autograd's threads call these, the training thread everything else. The hooks hold their
owner weakly: parameters outlive an optimizer, and the next one has hooks of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch

from byteps_py.errors import GradientOrderError
from byteps_py.torch.bucket import Place
from byteps_py.torch.buckets import GradientReducer

#: Horovod's words.
_TOO_OFTEN = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)


class Passes:
    """Counts the passes of each parameter; its gradient stays where it is.

    per_step: how many there may be before ``drop``, which begins the next step.
    """

    def __init__(self, per_step: int) -> None:
        self.set_per_step(per_step)
        self._counts: dict[torch.nn.Parameter, int] = {}

    def set_per_step(self, per_step: int) -> None:
        """From the next step on."""
        self.per_step = per_step

    @property
    def begun(self) -> bool:
        """True if a gradient was computed in this step."""
        return any(self._counts.values())

    def hook(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Watch those that require gradients and are not watched yet."""
        me = weakref.ref(self)

        def computed(param: torch.Tensor) -> None:
            passes = me()
            if passes is not None:
                passes._count(cast(torch.nn.Parameter, param))

        for param in params:
            if param.requires_grad and param not in self._counts:
                self._counts[param] = 0
                param.register_post_accumulate_grad_hook(computed)

    def _count(self, param: torch.nn.Parameter) -> None:
        if self._counts[param] == self.per_step:
            raise GradientOrderError(_TOO_OFTEN)
        self._counts[param] += 1

    def add(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """There are more parameters."""

    def drop(self) -> None:
        """The next pass is the first one of its step."""
        self._counts = dict.fromkeys(self._counts, 0)


class ReducedPasses(Passes):
    """Hands each gradient to a reducer, which counts those of a bucket together."""

    def __init__(self, reducer: GradientReducer, per_step: int) -> None:
        self._reducer = reducer
        self._hooked: set[torch.nn.Parameter] = set()
        reducer.too_often = _TOO_OFTEN
        super().__init__(per_step)

    def set_per_step(self, per_step: int) -> None:
        super().set_per_step(per_step)
        self._reducer.passes = per_step

    @property
    def begun(self) -> bool:
        return self._reducer.begun

    def hook(self, params: Iterable[torch.nn.Parameter]) -> None:
        if self._reducer.outside:
            return
        me = weakref.ref(self)
        for param in params:
            if param.requires_grad and param not in self._hooked:
                self._hooked.add(param)
                param.register_post_accumulate_grad_hook(_handing(me, self._reducer.place(param)))

    def add(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self._reducer.add(named)

    def drop(self) -> None:
        self._reducer.drop()


def _handing(me: weakref.ref[ReducedPasses], place: Place) -> Callable[[torch.Tensor], None]:
    def computed(param: torch.Tensor) -> None:
        passes = me()
        if passes is not None:
            passes._reducer.ready(place, param)

    return computed
