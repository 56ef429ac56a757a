"""Parallel training: ``bps.parallel.DistributedDataParallel``, as in ``byteps.torch.parallel``, and pipelines (pipe/).

What needs torch is imported when it is first used, so that `bps schedule` needs none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from byteps_py.torch.gradients.distributed_data_parallel import DistributedDataParallel

_HOMES = {"DistributedDataParallel": "byteps_py.torch.gradients.distributed_data_parallel"}

__all__ = ["DistributedDataParallel"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value
