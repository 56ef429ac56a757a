"""Which parameters a sharded optimizer has (``shard``), and which a Pipeline: not both, since each divides and sums
gradients. One thread."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.utils.weak import WeakIdKeyDictionary

#: The names of their optimizers' classes.
_SHARDED: WeakIdKeyDictionary = WeakIdKeyDictionary()
#: The pipelines, as weak references.
_IN_PIPELINES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_sharded(parameters: Iterable[torch.Tensor], optimizer: str) -> None:
    """``optimizer``: the name of its class."""
    for parameter in parameters:
        _SHARDED[parameter] = optimizer


def note_in_pipeline(parameters: Iterable[torch.Tensor], pipeline: object) -> None:
    """``pipeline`` handles the gradients of these, as long as it exists."""
    reference = weakref.ref(pipeline)
    for parameter in parameters:
        _IN_PIPELINES[parameter] = reference


def is_in_pipeline(parameter: torch.Tensor) -> bool:
    """Whether a Pipeline handles its gradients."""
    reference = _IN_PIPELINES.get(parameter)
    return reference is not None and reference() is not None


def sharded_with(parameter: torch.Tensor) -> str | None:
    """The name of the optimizer's class; None if the parameter is not sharded."""
    name: str | None = _SHARDED.get(parameter)
    return name
