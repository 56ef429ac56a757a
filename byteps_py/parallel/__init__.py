"""Parallel training: ``bps.parallel.DistributedDataParallel``, as in ``byteps.torch.parallel``, and pipelines (pipe/).

Classes that need torch are imported when they are first used: `bps schedule` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from byteps_py.parallel.pipe.pipeline import Pipeline
    from byteps_py.parallel.pipe.skips import pop, stash
    from byteps_py.parallel.pipe.split import split
    from byteps_py.torch.gradients.distributed_data_parallel import DistributedDataParallel

_HOMES = {
    "DistributedDataParallel": "byteps_py.torch.gradients.distributed_data_parallel",
    "Pipeline": "byteps_py.parallel.pipe.pipeline",
    "pop": "byteps_py.parallel.pipe.skips",
    "split": "byteps_py.parallel.pipe.split",
    "stash": "byteps_py.parallel.pipe.skips",
}

__all__ = ["DistributedDataParallel", "Pipeline", "pop", "split", "stash"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value
