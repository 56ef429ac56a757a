"""What a stage's forward pass begins with: tensors whose gradients are kept, and which the stage may change in place.

Autograd refuses a change in place of a leaf that requires a gradient. So a tensor that came from another stage becomes
the output of an operation, whose backward pass keeps the gradient. One thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from byteps_py.parallel.pipe.trees import flatten, unflatten


@dataclass(slots=True)
class StageInput:
    """The gradient of one tensor; None if the stage has not used it."""

    gradient: torch.Tensor | None = None


def begin_graph(value: Any) -> tuple[Any, list[StageInput]]:
    """(``value`` for the stage, the place of the gradient of each tensor in it that requires one). The memory of
    ``value`` belongs to the stage from now on."""
    if not torch.is_grad_enabled():
        return value, []
    tensors, structure = flatten(value)
    places = [StageInput() if tensor.requires_grad else None for tensor in tensors]
    if not any(places):
        return value, []
    begun: list[torch.Tensor] = []
    for tensor, place in zip(tensors, places, strict=True):
        if place is not None:
            anchor = torch.zeros((), device=tensor.device, requires_grad=True)
            # A tensor with a version counter of its own; a view of a message's memory could have no gradient.
            tensor = _Begin.apply(anchor, tensor.data, place)  # type: ignore[no-untyped-call]
        begun.append(tensor)
    return unflatten(begun, structure), [place for place in places if place is not None]


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor, place: StageInput) -> torch.Tensor:
        ctx.place = place
        ctx.mark_dirty(tensor)  # an output that is no view, so that it can be changed in place
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        ctx.place.gradient = gradients[0]
        return None, None, None


def copied(value: Any) -> Any:
    """``value`` with the same tensors in memory of their own."""
    tensors, structure = flatten(value)
    return unflatten([tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors], structure)


def cloned(value: Any) -> Any:
    """As ``copied``, for autograd: gradients flow to ``value``."""
    tensors, structure = flatten(value)
    return unflatten([tensor.clone() for tensor in tensors], structure)


@dataclass(slots=True)
class ComputedInputs:
    """Inputs of the first stage that the program has computed, and which require gradients: as the output of a module
    in front of the pipeline."""

    _roots: list[torch.Tensor] = field(default_factory=list)
    _leaves: list[torch.Tensor] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._roots)

    def detach(self, parts: Sequence[Any]) -> list[Any]:
        """``parts``, cut off from the graph that has computed them."""
        return [self._detached(part) for part in parts]

    def backward(self, factor: float) -> None:
        """Once all parts have had their backward passes: that of the program's own graph, with ``factor`` times their
        gradients."""
        pairs = [(root, leaf.grad) for root, leaf in zip(self._roots, self._leaves, strict=True)]
        given = [(root, gradient) for root, gradient in pairs if gradient is not None]
        if given:
            torch.autograd.backward([root for root, _ in given], [gradient * factor for _, gradient in given])

    def _detached(self, part: Any) -> Any:
        tensors, structure = flatten(part)
        own = []
        for tensor in tensors:
            if tensor.requires_grad:
                leaf = tensor.detach().requires_grad_()
                self._roots.append(tensor)
                self._leaves.append(leaf)
                tensor = leaf.clone()
            own.append(tensor)
        return unflatten(own, structure)
