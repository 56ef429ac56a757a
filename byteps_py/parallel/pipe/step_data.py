"""The data of one step on one rank: the batch in parts, the losses of the parts, and the outcome. One thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.trees import flatten, unflatten


class MicroBatches(list[Any]):
    """A batch that is cut already: one entry for each micro-batch, a tensor, or tuples, lists and dicts of tensors. The
    entries may differ in shape. ``Pipeline.step`` takes any other batch, also a list, for one value that it cuts.

        loss = pipe.step(MicroBatches([short, longer]), MicroBatches([0, 1]), loss_function)

    >>> cut(MicroBatches(["first", "second"]), 2, "inputs")
    ['first', 'second']
    """


def cut(value: Any, parts: int, what: str) -> list[Any]:
    """``value`` in ``parts`` equal parts: all tensors in it are cut along their first dimension, and other objects go
    to each part. MicroBatches are cut already. Raises UsageError. ``what``: for the message."""
    if isinstance(value, MicroBatches):
        if len(value) != parts:
            raise UsageError(f"{what}: {len(value)} micro-batches were given, and the pipeline has {parts}")
        return list(value)
    tensors, structure = flatten(value)
    for tensor in tensors:
        if not tensor.dim() or tensor.shape[0] % parts:
            size = f"a first dimension of {tensor.shape[0]}" if tensor.dim() else "no dimension"
            raise UsageError(
                f"{what}: a tensor with {size} can't be cut into {parts} equal parts; give a multiple, or "
                "bps.parallel.MicroBatches with one entry for each part"
            )
    pieces = [tensor.chunk(parts) for tensor in tensors]
    return [unflatten([piece[part] for piece in pieces], structure) for part in range(parts)]


def parts_of(batch: Any, micro_batches: int, each: int, what: str) -> list[Any]:
    """The parts of a batch: ``each`` of every micro-batch. Raises UsageError."""
    pieces = cut(batch, micro_batches, what)
    return pieces if each == 1 else [part for piece in pieces for part in cut(piece, each, f"half of the {what}")]


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


# ---- losses ----------------------------------------------------------------------------------------------------------

#: A mean over a part, or (sum over a part, number of the terms).
Loss = torch.Tensor | tuple[torch.Tensor, torch.Tensor | int | float]
LossFunction = Callable[[Any, Any], Loss]


class Outcome(NamedTuple):
    """The same on all ranks. ``is_counted``: the loss function counts; gradients are to be divided by ``terms``."""

    loss: torch.Tensor
    terms: float
    is_counted: bool


@dataclass(slots=True)
class Losses:
    """The losses of the parts whose last stage is on this rank. ``weight``: of a part's mean in the whole mean, and the
    scale of gradients."""

    function: LossFunction | None
    weight: float
    may_count: bool = True  # the function may return (sum, count)
    total: float = 0.0
    count: float = 0.0
    counted: int = 0  # parts whose loss is a sum with a count

    def of(self, output: Any, target: Any) -> torch.Tensor:
        """The loss of a part, from which the backward pass begins. Raises UsageError if it is none."""
        if self.function is None:
            raise UsageError("a loss function is needed")
        found = self.function(output, target)
        is_counted = isinstance(found, tuple) and len(found) == 2
        loss, count = found if isinstance(found, tuple) and is_counted else (found, 1)
        if is_counted and not self.may_count:
            raise UsageError("the schedule changes weights before all parts are counted: return the mean of each part")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError(
                "the loss function returns one number as a tensor, the mean over the micro-batch, or (sum, count); not "
                f"{'a tensor of the shape ' + str(tuple(loss.shape)) if isinstance(loss, torch.Tensor) else type(loss)}"
            )
        self.total += float(loss.detach())
        self.count += float(count)
        self.counted += is_counted
        return loss if is_counted else loss * self.weight


@dataclass(slots=True)
class StepData:
    """The data of one step on one worker. ``inputs``, ``targets``: by part; empty where the worker holds no first, or
    last, stage. ``loss_of``: (output, part) -> the loss whose backward pass begins there; None: there are no targets,
    and the outputs of the last stage are kept in ``outputs``."""

    inputs: Mapping[int, Any] = field(default_factory=dict)
    loss_of: Callable[[Any, int], torch.Tensor] | None = None
    outputs: dict[int, Any] = field(default_factory=dict)
    error: Exception | None = None
    #: Set as soon as the worker has to go on without computing.
    has_failed: bool = False

    def fail(self, error: Exception) -> None:
        """Go on without computing, because of ``error``."""
        self.error, self.has_failed = self.error or error, True
