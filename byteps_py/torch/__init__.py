"""byteps_py for PyTorch: the interface of BytePS's ``byteps.torch``, with Horovod's additions.

Start with horovod/api.py (init, rank), horovod/allreduce.py (push_pull) and gradients/optimizer.py
(DistributedOptimizer).

    run ┬ elastic ─ horovod ─┬ operations ─┐
        └─┬─────── gradients ┘             │
    local ┘                                │
    process_group ─────────────────────────┴ collectives ─ Session (byteps_py.session)
"""

import importlib as _importlib
from typing import Any as _Any

from byteps_py.wording import NO_TORCH as _NO_TORCH

try:
    import torch as _torch  # noqa: F401  first, so that the error names torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(_NO_TORCH, name="torch") from None

# ruff: noqa: F403, F405  names and type checkers come from the lists of these modules, whichever has a name defines it
from byteps_py import errors as _errors, module_aliases as _aliases
from byteps_py.errors import *
from byteps_py.session.failure_reports import shorten_tracebacks as _shorten_tracebacks
from byteps_py.torch import elastic, local, optim, timeline as _timeline, training_metrics as _training_metrics
from byteps_py.torch.compression import Compression
from byteps_py.torch.gradients.async_optimizer import AsyncOptimizer
from byteps_py.torch.gradients.comm_hook import CommHookOptions, ddp_comm_hook
from byteps_py.torch.gradients.cross_barrier import CrossBarrier
from byteps_py.torch.gradients.distributed_data_parallel import DistributedDataParallel
from byteps_py.torch.gradients.hosted.restore import restore
from byteps_py.torch.gradients.optimizer import DistributedOptimizer
from byteps_py.torch.horovod import allreduce as _allreduce, api as _api, collectives as _collectives
from byteps_py.torch.horovod.allreduce import *
from byteps_py.torch.horovod.api import *
from byteps_py.torch.horovod.collectives import *
from byteps_py.torch.horovod.sync_batch_norm import SyncBatchNorm
from byteps_py.torch.operations import (
    broadcasts as _objects,
    handles as _handles,
    process_sets as _process_sets,
    reductions as _reductions,
    state_broadcast as _state_broadcast,
)
from byteps_py.torch.operations.broadcasts import *
from byteps_py.torch.operations.handles import *
from byteps_py.torch.operations.process_sets import *
from byteps_py.torch.operations.reductions import *
from byteps_py.torch.operations.state_broadcast import *
from byteps_py.torch.process_group import ProcessGroupOptions
from byteps_py.torch.run import compression_state as _compression_state
from byteps_py.torch.run.compression_state import *
from byteps_py.torch.run.run_state import RunState
from byteps_py.torch.timeline import *
from byteps_py.torch.training_metrics import *
from byteps_py.torch_backend import register as _register_backend

#: The names of this package and, under the names of Horovod's and BytePS's modules (module_aliases.py), of those.
__all__ = [
    "AsyncOptimizer",
    "CommHookOptions",
    "Compression",
    "CrossBarrier",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "ProcessGroupOptions",
    "RunState",
    "SyncBatchNorm",
    "ddp_comm_hook",
    "elastic",
    "local",
    "mpi_ops",
    "optim",
    "parallel",
    "restore",
]
__all__ += _errors.__all__
__all__ += _timeline.__all__
__all__ += _training_metrics.__all__
__all__ += _api.__all__
__all__ += _allreduce.__all__
__all__ += _collectives.__all__
__all__ += _handles.__all__
__all__ += _objects.__all__
__all__ += _process_sets.__all__
__all__ += _reductions.__all__
__all__ += _state_broadcast.__all__
__all__ += _compression_state.__all__


def __getattr__(name: str) -> _Any:
    home = _aliases.home_of(f"{__name__}.{name}")
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _importlib.import_module(home)


_register_backend()
_shorten_tracebacks()
