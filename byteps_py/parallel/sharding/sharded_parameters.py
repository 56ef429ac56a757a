"""Which parameters a sharded optimizer has (``shard``). One thread."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.weak import WeakIdKeyDictionary

#: The names of their optimizers' classes.
_SHARDED: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_sharded(parameters: Iterable[torch.Tensor], optimizer: str) -> None:
    """``optimizer``: the name of its class."""
    for parameter in parameters:
        _SHARDED[parameter] = optimizer


def sharded_with(parameter: torch.Tensor) -> str | None:
    """The name of the optimizer's class; None if the parameter is not sharded."""
    name: str | None = _SHARDED.get(parameter)
    return name
