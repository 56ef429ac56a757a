"""The process group: every collective of torch.distributed, each as a reduction, a gather or an exchange.

Owns nothing but the parts that carry operations out. Any thread may call; operations of a group go in the order of the
calls, which must be the same on all its members.

    SUM AVG MIN MAX PRODUCT PREMUL_SUM, broadcast, barrier   reductions.py: through the summation servers
    gathers, all-to-all, scatter, BAND BOR BXOR              direct.py: from member to member
    send, recv                                               point_to_point.py: between two members
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Backend, PrefixStore, Store

from byteps_py.errors import BytePSError, CommunicationError, UsageError
from byteps_py.torch.engine.compilation import not_traced
from byteps_py.torch.engine.work import limit_of
from byteps_py.torch.process_group import monitored_barrier
from byteps_py.torch.process_group.group_metadata import Options
from byteps_py.torch.process_group.reduction_collectives import ReductionCollectives
from byteps_py.torch.process_group.transfer_collectives import TransferCollectives

_CALLED = [
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "broadcast",
    "barrier",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
    "send",
    "recv",
    "recv_anysource",
    "_start_coalescing",
    "_end_coalescing",
    "monitored_barrier",
]


@not_traced(_CALLED)
class BytePSProcessGroup(ReductionCollectives, TransferCollectives):
    """See torch.distributed.ProcessGroup. All tensors dense, on cpu or cuda; non-reducing operations take any dtype."""

    # ---- life ------------------------------------------------------------------------------------------

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Like barrier, and the error names the members that have not come."""
        limit_s = limit_of(timeout)
        if limit_s is None:
            limit_s = self._around.timeout_s
        monitored_barrier.barrier(self._store, self._members, limit_s, wait_all_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        self._around.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def get_group_store(self) -> Store:
        return self._store

    def abort(self) -> None:
        """End all waits for operations of this group with an error, and refuse new ones."""
        self._around.aborted = CommunicationError(f"process group {self.group_name!r} was aborted")

    def shutdown(self) -> None:
        """No more operations. The world's group also leaves the job, unless init() has joined it."""
        if self._around.aborted is None:
            self._around.aborted = UsageError(f"process group {self.group_name!r} was destroyed")
            if self._streams is not None:
                with contextlib.suppress(BytePSError):  # the session has ended before
                    self._streams.close()
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> BytePSProcessGroup | None:
        """What torch.distributed.split_group calls, on all members: a group of those at ``ranks``, positions in this
        group; None on the others. ``device_types`` makes no difference: one group serves all."""
        number = next(self._splits)
        if self._members.position not in ranks:
            return None
        limit = timeout or getattr(opts, "_timeout", None) or timedelta(seconds=self._around.timeout_s)
        options = opts if isinstance(opts, Backend.Options) else Options(limit)
        members = self._members.split(ranks, number)
        name = group_name or f"{self.group_name}:split:{number}"
        group = type(self)(members, PrefixStore(f"{name}/", self._store), limit.total_seconds(), options)
        group._is_split = True
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split:{number}")
        return group

    # ---- the same by their names from torch 2.13 on -----------------------------------------------------

    all_gather_single = TransferCollectives._allgather_base
    all_gather_single_coalesced = TransferCollectives.allgather_into_tensor_coalesced
    reduce_scatter_single = ReductionCollectives._reduce_scatter_base
    reduce_scatter_single_coalesced = ReductionCollectives.reduce_scatter_tensor_coalesced
    all_to_all_single = TransferCollectives.alltoall_base
