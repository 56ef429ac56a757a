"""The process group: every collective of torch.distributed, each as a reduction, a gather or an exchange.

Owns the life of a group; the base classes have the collectives. Any thread may call. The operations of a group run in
the order of the calls, which must be the same on all its members.

    SUM AVG MIN MAX PRODUCT PREMUL_SUM, broadcast, barrier   reduction_collectives.py
    gathers, all-to-all, scatter, BAND BOR BXOR              transfer_collectives.py
    send, recv                                               transfer_collectives.py

Each operation goes from member to member or through the summation servers: collectives/router.py chooses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Backend, PrefixStore, Store

from byteps_py.errors import BytePSError, CommunicationError, UsageError
from byteps_py.torch.collectives.machine_memory import MachineMemory
from byteps_py.torch.collectives.work import limit_of, not_traced
from byteps_py.torch.process_group import monitored_barrier
from byteps_py.torch.process_group.group_metadata import Options
from byteps_py.torch.process_group.reduction_collectives import ReductionCollectives
from byteps_py.torch.process_group.transfer_collectives import TransferCollectives

_COLLECTIVES = [
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


@not_traced(_COLLECTIVES)
class BytePSProcessGroup(ReductionCollectives, TransferCollectives):
    """See torch.distributed.ProcessGroup. Tensors are dense, on cpu or cuda.

    Operations that do not reduce take any dtype.
    """

    # ---- life ------------------------------------------------------------------------------------------

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Like barrier, but the StallError names the missing members. timeout: by default that of the group."""
        limit_s = limit_of(timeout)
        if limit_s is None:
            limit_s = self._group_context.timeout_s
        monitored_barrier.barrier(self._store, self._members, limit_s, wait_all_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations."""
        self._group_context.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def get_group_store(self) -> Store:
        """torch's store of this group."""
        return self._store

    def abort(self) -> None:
        """End all waits for operations of this group with a CommunicationError, and refuse new operations."""
        self._group_context.aborted = CommunicationError(f"process group {self.group_name!r} was aborted")

    def shutdown(self) -> None:
        """Refuse new operations. The default group also leaves the job, unless byteps_py.init() has joined it."""
        if self._group_context.aborted is None:
            self._group_context.aborted = UsageError(f"process group {self.group_name!r} was destroyed")
            if self._large_sums is not None:
                with contextlib.suppress(BytePSError):  # the session may have ended
                    self._large_sums.close()
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
        """Called by torch.distributed.split_group on all members. Returns the group of the members at ``ranks``, which
        are positions in this group; None on other members. device_types: without effect, a group serves all."""
        number = next(self._splits)
        if self._members.position not in ranks:
            return None
        limit = timeout or getattr(opts, "_timeout", None) or timedelta(seconds=self._group_context.timeout_s)
        options = opts if isinstance(opts, Backend.Options) else Options(limit)
        members = self._members.split(ranks, number)
        name = group_name or f"{self.group_name}:split:{number}"
        group = type(self)(members, PrefixStore(f"{name}/", self._store), limit.total_seconds(), options)
        group._is_split = True
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split:{number}")
        return group

    # ---- memory of the machine --------------------------------------------------------------------------

    @property
    def machine_index(self) -> int:
        """The index of this rank's machine in the job."""
        return self._members.session.machine_index

    def share_memory(self, nbytes: int) -> MachineMemory:
        """Memory that the members on this machine share. They call it together, as they call a collective; members on
        other machines need not. Raises OSError, StallError and what ends the group or the session."""
        return MachineMemory(self._members, self._group_context, next(self._memories), nbytes)

    # ---- other names, from torch 2.13 on ----------------------------------------------------------------

    all_gather_single = TransferCollectives._allgather_base
    all_gather_single_coalesced = TransferCollectives.allgather_into_tensor_coalesced
    reduce_scatter_single = ReductionCollectives._reduce_scatter_base
    reduce_scatter_single_coalesced = ReductionCollectives.reduce_scatter_tensor_coalesced
    all_to_all_single = TransferCollectives.alltoall_base
