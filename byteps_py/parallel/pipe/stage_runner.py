"""A stage of the model on one worker: the forward and the backward pass of one part at a time.

The inputs of a part begin a graph of their own, and the outputs are its roots. So a backward pass needs nothing but the
gradients of the outputs, and leaves those of the inputs. Autograd refuses a change in place of a leaf that requires a
gradient, but a stage may change its inputs: a tensor that came from another stage becomes the output of an operation,
whose backward pass keeps the gradient. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from byteps_py.parallel.pipe.buffers import as_before
from byteps_py.parallel.pipe.skips import MAIN, forward_pass
from byteps_py.parallel.pipe.trees import described, flatten, unflatten
from byteps_py.torch.run.model_state import SavedBuffer, saved_buffers


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
    """Like ``copied``, for autograd: gradients flow to ``value``."""
    tensors, structure = flatten(value)
    return unflatten([tensor.clone() for tensor in tensors], structure)


Values = dict[str, Any]
#: Called with (module, value); makes the output.
Apply = Callable[[nn.Module, Any], Any]


def call(module: nn.Module, value: Any) -> Any:
    """The stage is called with one value, as a module of nn.Sequential is."""
    return module(value)


@dataclass(slots=True)
class _Part:
    """Between the forward and the backward pass of a part. ``places`` and ``roots``: by name, for the tensors that
    require gradients."""

    places: dict[str, list[StageInput]]
    roots: dict[str, list[torch.Tensor]]
    apply: Apply


@dataclass(slots=True)
class StageRunner:
    """``stashes``: the names of skip connections that begin here and end at later stages. ``recompute``: keep the
    inputs of a part only, and repeat its forward pass before the backward pass. ``is_first``: inputs come from the
    program, with graphs of their own; others are memory that this stage may change."""

    module: nn.Module
    stashes: Sequence[str] = ()
    recompute: bool = False
    is_first: bool = False
    _parts: dict[int, _Part] = field(default_factory=dict)

    def forward(self, part: int, inputs: Values, apply: Apply = call) -> Values:
        """The outputs for later stages, detached. ``inputs``: from earlier ones, by name."""
        inputs, places = self._begun(inputs)
        outputs = self._run(inputs, apply)
        if torch.is_grad_enabled():
            roots = {name: _requiring(value) for name, value in outputs.items()}
            self._parts[part] = _Part(places, roots, apply)
        return {name: _detached(value) for name, value in outputs.items()}

    def loss(self, part: int, inputs: Values, apply: Apply) -> torch.Tensor:
        """The forward pass of the last stage: ``apply`` returns the loss, whose backward pass begins with it."""
        inputs, places = self._begun(inputs)
        loss: torch.Tensor = self._run(inputs, apply)[MAIN]
        if torch.is_grad_enabled():
            self._parts[part] = _Part(places, {MAIN: [loss]} if loss.requires_grad else {}, apply)
        return loss.detach()

    def backward(self, part: int, gradients: Mapping[str, Sequence[torch.Tensor | None]]) -> dict[str, list[Any]]:
        """The gradients of the inputs, by name: one for each tensor that requires gradients, None if it was not used.
        ``gradients``: of the outputs, likewise; nothing for a loss. Gradients of parameters are added to theirs."""
        kept = self._parts.pop(part)
        pairs = [
            (root, gradient)
            for name, roots in kept.roots.items()
            for root, gradient in zip(roots, gradients.get(name) or map(torch.ones_like, roots), strict=True)
            if gradient is not None
        ]
        if pairs:
            torch.autograd.backward(*(list(column) for column in zip(*pairs, strict=True)))  # type: ignore[arg-type]
        return {name: [one.gradient for one in places] for name, places in kept.places.items()}

    def forget(self) -> None:
        """Drop all parts: the step has failed."""
        self._parts.clear()

    def _begun(self, inputs: Values) -> tuple[Values, dict[str, list[StageInput]]]:
        if self.is_first:
            return inputs, {name: [] for name in inputs}
        begun = {name: begin_graph(value) for name, value in inputs.items()}
        return {name: value for name, (value, _) in begun.items()}, {name: one for name, (_, one) in begun.items()}

    def _run(self, inputs: Values, apply: Apply) -> Values:
        repeats = self.recompute and torch.is_grad_enabled()
        value = inputs[MAIN]
        incoming = {name: tensor for name, tensor in inputs.items() if name != MAIN}

        before: list[SavedBuffer] = []  # those that the forward pass has changed, once it has ended

        def run(value: Any, incoming: dict[str, torch.Tensor]) -> Values:
            if repeats:  # from the same values, also if the stage changes its inputs in place
                value, incoming = cloned(value), cloned(incoming)
            with as_before(before), forward_pass(incoming, self.stashes) as outgoing:
                result = apply(self.module, value)
            return {MAIN: result, **outgoing}

        if not repeats:
            return run(value, incoming)
        saved = saved_buffers([self.module])
        outputs = _checkpointed(run, value, incoming)
        before += [one for one in saved if one.has_changed]
        return outputs


def _checkpointed(run: Callable[..., Values], *arguments: Any) -> Values:
    """torch's checkpoint of ``run``, which ends before an exception of ``run`` is raised. In torch 2.11 and before, an
    exception leaves a checkpoint open: it also takes tensors that later forward passes of this thread save, and their
    backward passes repeat ``run``."""
    failed: list[BaseException] = []
    has_run = False

    def without_raising(*arguments: Any) -> Values:
        nonlocal has_run
        if has_run:  # for the backward pass, which torch may end by an exception
            return run(*arguments)
        has_run = True
        try:
            return run(*arguments)
        except BaseException as error:
            failed.append(error)
            return {}

    outputs: Values = torch.utils.checkpoint.checkpoint(without_raising, *arguments, use_reentrant=False)
    if failed:
        raise failed.pop()  # pop: its traceback refers to the list
    return outputs


def _requiring(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in flatten(value)[0] if tensor.requires_grad]


def _detached(value: Any) -> Any:
    tensors, structure = flatten(value)
    described(structure)  # raises an error of this stage, in place of one on the way to the next
    return unflatten([tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors], structure)
