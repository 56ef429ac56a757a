"""Everything that a parameter belongs to: a larger parameter of which it is a part, a Pipeline, and a wrapper that
averages its gradient.

DistributedOptimizer, DistributedDataParallel and broadcast_parameters take each parameter for a whole one, with one
value on all of their ranks, and its gradient for the rank's own. They ask here before they change anything.
Layers whose parameters are parts, pipelines, and wrappers that average gradients, announce themselves here. Any thread.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from byteps_py.errors import UsageError


class LayerInParts(Protocol):
    """A layer some of whose parameters are parts of larger ones."""

    def parts(self) -> Iterator[torch.Tensor]:
        """These parameters."""

    def ranks_of_parts(self) -> Sequence[int]:
        """The global ranks that have the parts."""


_layers: weakref.WeakSet[LayerInParts] = weakref.WeakSet()
#: The wrappers that average gradients, their names, and their parameters.
_averaging: weakref.WeakKeyDictionary[object, tuple[str, tuple[weakref.ref[torch.Tensor], ...]]] = (
    weakref.WeakKeyDictionary()
)
#: Parameters, and the pipelines that handle their gradients, as weak references.
_in_pipelines: WeakIdKeyDictionary = WeakIdKeyDictionary()


def announce_layer(layer: LayerInParts) -> None:
    """``layer`` has parameters that are parts. Its copies announce themselves."""
    _layers.add(layer)


def announce_averaging(wrapper: object, name: str, parameters: Iterable[torch.Tensor]) -> None:
    """``wrapper``, called ``name``, averages the gradients of ``parameters`` as long as it is there."""
    _averaging[wrapper] = name, tuple(weakref.ref(each) for each in parameters)


def announce_pipeline(pipeline: object, parameters: Iterable[torch.Tensor]) -> None:
    """``pipeline`` divides and sums the gradients of ``parameters``, as long as it is there."""
    reference = weakref.ref(pipeline)
    for parameter in parameters:
        _in_pipelines[parameter] = reference


def check_whole(named: Iterable[tuple[str, torch.Tensor]], ranks: Sequence[int], caller: str, remedy: str) -> None:
    """Raises UsageError that names the first of these tensors that is a part: a DTensor, a flat parameter of FSDP, or
    one whose other parts some of ``ranks`` have. ``caller``: the function that takes them for whole ones. ``remedy``:
    the advice in the message."""
    parts = _holders_of_parts(set(ranks))
    for name, tensor in named:
        kind = type(tensor).__name__
        if kind in ("DTensor", "FlatParameter") or hasattr(tensor, "device_mesh"):
            raise UsageError(
                f"{caller}: {name!r} is a part of a parameter ({kind}: FSDP, or DTensor parallelism, has cut it), and "
                "FSDP averages gradients and makes ranks equal itself. Use the optimizer, and the model, as they are"
            )
        if (others := parts.get(_memory_of(tensor))) and tensor.numel():
            raise UsageError(
                f"{caller}: tensor.parallelize has cut {name!r}, so that ranks {others} have different parts of it. "
                f"{remedy}"
            )


def find_part(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, list[int]] | None:
    """The name of the first of these tensors other parts of which lie on other ranks, and the ranks with a part; None
    if there is none."""
    parts = _holders_of_parts(None)
    return next(((name, parts[key]) for name, tensor in named if (key := _memory_of(tensor)) in parts), None)


def _holders_of_parts(ranks: set[int] | None) -> dict[int, list[int]]:
    """The ranks, of these (None: of all), that have parts of a parameter, by its memory here; if they are several."""
    parts: dict[int, list[int]] = {}
    for layer in list(_layers):
        holders = [rank for rank in layer.ranks_of_parts() if ranks is None or rank in ranks]
        if len(holders) > 1:
            parts.update((_memory_of(part), holders) for part in layer.parts())
    return parts


def check_unowned(named: Iterable[tuple[str, torch.Tensor]], caller: str) -> None:
    """Raises UsageError if something else averages the gradient of one of these parameters, or if a Pipeline has it."""
    named = list(named)
    for name, tensor in named:
        reference = _in_pipelines.get(tensor)
        if reference is not None and reference() is not None:
            raise UsageError(
                f"{caller}: {name!r} is in a Pipeline, whose ranks have different stages, and which averages gradients "
                "over its copies itself. Use torch's optimizer as it is; for copies, give the Pipeline a mesh with 'dp'"
            )
    if find_averaging([tensor for _, tensor in named]) is None:
        return
    gc.collect()  # a wrapper that nobody uses any more
    for name, tensor in named:
        if (other := find_averaging([tensor])) is not None:
            raise UsageError(
                f"{caller}: {other} averages the gradient of {name!r} already; twice is wrong. Use one of the two: the "
                f"plain optimizer with {other}, or {caller} with the module that is inside it"
            )


def find_averaging(tensors: Sequence[torch.Tensor], besides: str = "") -> str | None:
    """The wrapper, other than ``besides``, that averages the gradient of one of ``tensors``; None if there is none."""
    wanted = set(map(id, tensors))
    for _, (name, references) in list(_averaging.items()):
        if name != besides and any((there := each()) is not None and id(there) in wanted for each in references):
            return name
    if not dist.is_available() or not dist.is_initialized():  # torch's needs it
        return None
    # It keeps no list of its objects.
    kind = torch.nn.parallel.DistributedDataParallel
    for each in gc.get_objects():
        if issubclass(type(each), kind) and any(id(one) in wanted for one in each.parameters()):
            return "torch's DistributedDataParallel"
    return None


def _memory_of(tensor: torch.Tensor) -> int:
    """Equal for a parameter and its tensor in ``state_dict``."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # no memory of its own, such as a sparse tensor's
        return id(tensor)
