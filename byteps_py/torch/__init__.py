"""byteps_py for PyTorch: the interface of BytePS's ``byteps.torch``, with Horovod's additions.

Start with horovod/api.py (init, rank, push_pull) and gradients/optimizer.py (DistributedOptimizer).

    gradients, elastic ─ horovod ─┐
    process_group ────────────────┴ collectives ─ Session (byteps_py.session)
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

from byteps_py import module_aliases as _aliases
from byteps_py.errors import (
    BytePSError,
    CommunicationError,
    ConfigurationError,
    GradientOrderError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    JoinedError,
    MismatchError,
    NonFiniteError,
    NonFiniteInputError,
    NotInitializedError,
    PeerLostError,
    ProtocolError,
    RendezvousError,
    StallError,
    UnsupportedError,
    UsageError,
)
from byteps_py.session.exception_hooks import shorten_tracebacks as _shorten_tracebacks
from byteps_py.torch import elastic, optim
from byteps_py.torch.compression import Compression
from byteps_py.torch.gradients.comm_hook import CommHookOptions, ddp_comm_hook
from byteps_py.torch.gradients.cross_barrier import CrossBarrier
from byteps_py.torch.gradients.distributed_data_parallel import DistributedDataParallel
from byteps_py.torch.gradients.hosted.restore import restore
from byteps_py.torch.gradients.optimizer import DistributedOptimizer
from byteps_py.torch.horovod import mpi_ops
from byteps_py.torch.horovod.allgather import allgather, allgather_async, grouped_allgather, grouped_allgather_async
from byteps_py.torch.horovod.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from byteps_py.torch.horovod.alltoall import alltoall, alltoall_async
from byteps_py.torch.horovod.api import (
    barrier,
    byteps_push_pull,
    cross_rank,
    cross_size,
    declare,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    poll,
    push_pull,
    push_pull_async,
    push_pull_async_inplace,
    push_pull_inplace,
    rank,
    resume,
    shutdown,
    size,
    suspend,
    synchronize,
)
from byteps_py.torch.horovod.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from byteps_py.torch.horovod.build_info import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from byteps_py.torch.horovod.functions import broadcast_optimizer_state, broadcast_parameters
from byteps_py.torch.horovod.objects import allgather_object, broadcast_object
from byteps_py.torch.horovod.ops import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from byteps_py.torch.horovod.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from byteps_py.torch.horovod.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from byteps_py.torch.horovod.sync_batch_norm import SyncBatchNorm
from byteps_py.torch.timeline import get_pushpull_speed, start_timeline, stop_timeline
from byteps_py.torch_backend import register as _register_backend

__all__ = [
    "Adasum",
    "Average",
    "BytePSError",
    "CommHookOptions",
    "CommunicationError",
    "Compression",
    "ConfigurationError",
    "CrossBarrier",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "GradientOrderError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "JoinedError",
    "Max",
    "Min",
    "MismatchError",
    "NonFiniteError",
    "NonFiniteInputError",
    "NotInitializedError",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "ProtocolError",
    "ReduceOp",
    "RendezvousError",
    "StallError",
    "Sum",
    "SyncBatchNorm",
    "UnsupportedError",
    "UsageError",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "byteps_push_pull",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "ddp_comm_hook",
    "declare",
    "elastic",
    "get_pushpull_speed",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "optim",
    "parallel",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "restore",
    "resume",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "suspend",
    "synchronize",
]


def __getattr__(name: str) -> _Any:
    home = _aliases.home_of(f"{__name__}.{name}")
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _importlib.import_module(home)


_register_backend()
_shorten_tracebacks()
