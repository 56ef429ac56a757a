"""byteps_py for PyTorch: the interface of BytePS's ``byteps.torch``, with Horovod's additions.

Start with api.py (what a script calls) and optimizer.py (what most scripts use); then

    api, functions ─ ops ─ handles ─────────────────────┐
    optimizer ─ distributed ┐                           ├─ context ─ exchange ─ Session (byteps_py.session)
    parallel ───────────────┴ buckets ─ bucket, layout ─┘            └ cuda
    cross_barrier ─ pending ─ distributed;  adasum_optimizer ─ adasum;  elastic
"""

from byteps_py.errors import (
    BytePSError,
    CommunicationError,
    ConfigurationError,
    GradientOrderError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    ProtocolError,
    RendezvousError,
    StallError,
    UsageError,
)
from byteps_py.torch import elastic, parallel
from byteps_py.torch.api import (
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    byteps_push_pull,
    cross_rank,
    cross_size,
    declare,
    init,
    is_initialized,
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
from byteps_py.torch.compression import Compression
from byteps_py.torch.cross_barrier import CrossBarrier
from byteps_py.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from byteps_py.torch.ops import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from byteps_py.torch.optimizer import DistributedOptimizer
from byteps_py.torch.parallel import DistributedDataParallel
from byteps_py.torch.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from byteps_py.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "BytePSError",
    "CommunicationError",
    "Compression",
    "ConfigurationError",
    "CrossBarrier",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "GradientOrderError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "MismatchError",
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
    "UsageError",
    "add_process_set",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "byteps_push_pull",
    "cross_rank",
    "cross_size",
    "declare",
    "elastic",
    "global_process_set",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "parallel",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "rank",
    "remove_process_set",
    "resume",
    "shutdown",
    "size",
    "suspend",
    "synchronize",
]
