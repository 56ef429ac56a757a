"""The process group: every collective of torch.distributed, each as a reduction, a gather or an exchange.

Owns the life of a group; the base classes have the collectives. Any thread may call. The operations of a group run in
the order of the calls, which must be the same on all its members.

``init_process_group`` and ``byteps_py.init()`` share the process's one session; the first call opens it. A rank learns
its machine from the environment. Without a launcher (``torch.multiprocessing.spawn``) the ranks exchange their machines
through torch's store.

    SUM AVG MIN MAX PRODUCT PREMUL_SUM, broadcast, barrier   reduction_collectives.py
    gathers, all-to-all, scatter, BAND BOR BXOR              transfer_collectives.py
    send, recv                                               transfer_collectives.py

Each operation goes from member to member or through the summation servers: collectives/router.py chooses.

``MachineMemory`` is memory that the members on one machine share. Its callers agree on the order of writes, and one
thread at a time calls it: nothing is locked there.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, Store

from byteps_py.config.settings import Settings
from byteps_py.errors import CommunicationError, StallError, UnsupportedError, UsageError
from byteps_py.session.peers import PeerTransport, Stream, StreamReceipt
from byteps_py.session.solo import SoloSession
from byteps_py.system.shm import Segment
from byteps_py.tensors import NonFinite
from byteps_py.torch.collectives import context as contexts, nonfinite, torch_rendezvous
from byteps_py.torch.collectives.completion import POOL
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.group_history import end_history, history_of
from byteps_py.torch.collectives.group_work import GroupContext
from byteps_py.torch.collectives.members import Members, prefix_of
from byteps_py.torch.collectives.recording import LATER_NAMES, recorded
from byteps_py.torch.collectives.torch_rendezvous import HOLDER
from byteps_py.torch.collectives.work import not_traced, timeout_s_of
from byteps_py.torch.process_group import ProcessGroupOptions
from byteps_py.torch.process_group.reduction_collectives import ReductionCollectives
from byteps_py.torch.process_group.transfer_collectives import TransferCollectives


class MachineMemory:
    """``nbytes`` of memory that this machine's members of a group share; the first of them makes it. A page of it uses
    memory once it is touched, and reads as zeros before.

    All members of a machine create it together. ``number``: of such memories of the group, from 0. Raises OSError on
    the member that makes it, if the system can't provide as much; StallError and the error that ends the group or the
    session.
    """

    def __init__(self, members: Members, group_context: GroupContext, number: int, nbytes: int) -> None:
        session = members.session
        first = session.rank - session.local_rank
        near = [rank for rank in members.ranks if first <= rank < first + session.local_size]
        #: The other members on this machine.
        self.others = tuple(rank for rank in near if rank != session.rank) if session.size > 1 else ()
        self._group_context = group_context
        self._peers: PeerTransport | None = None
        self._turns: Stream | None = None
        self._segment: Segment | None = None
        group_context.check()
        if self.others and session.peers is not None:
            name = f"{members.prefix}.memory.{number}"
            peers = self._peers = session.peers
            peers.directory.request_introduction(f"{name}#{session.incarnation}", self.others)
            group_context.wait_in_slices(
                peers.directory.introduction_wait(f"{name}#{session.incarnation}", self.others)
            )
            self._turns = peers.stream(f"{name}.turns", self.others)
            shared = peers.shared_segment(peers.stream(name, self.others), min(near), nbytes)
            group_context.wait_in_slices(shared.map)
            self._segment = shared.segment
        else:
            self._segment = Segment.create(nbytes)
            self._segment.close_descriptor()
        #: All of it: uint8, of ``nbytes`` elements. It keeps the memory, also after the session.
        self.octets = torch.frombuffer(self._segment.view, dtype=torch.uint8, count=nbytes)

    def check(self) -> None:
        """Raises the error that every operation of the group would raise: UsageError if it was destroyed,
        NotInitializedError after the session, or the error that has ended either."""
        self._group_context.check()

    def wait_for_others(self) -> None:
        """Return when all members of this machine have called it. Their earlier writes are visible then. Raises
        StallError, JoinedError and the error that ends the group or the session."""
        self._group_context.check()
        peers, turns = self._peers, self._turns
        if peers is None or turns is None:
            return
        receipt = StreamReceipt(turns, is_mutual=True, owner=self)
        for rank in self.others:
            receipt.expect(rank, (), 0)
        peers.send(turns, self.others, ((0, 0),), is_led=False)
        self._group_context.wait_in_slices(lambda timeout_s: peers.collect(receipt, timeout_s))

    def forget(self) -> None:
        """Give all of its pages back to the system. Afterwards they read as zeros on all members."""
        if self._segment is not None:
            self._segment.forget(0, self._segment.nbytes)


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


#: What members of a group do together. See group_history.py.
CALLED_TOGETHER = (*_COLLECTIVES, *LATER_NAMES, "shutdown")

_worlds = 0  # default groups that this process has created
#: Monitored barriers so far, by the prefix of the group.
_barriers: dict[str, int] = {}
_barriers_lock = threading.Lock()


@not_traced(_COLLECTIVES)
@recorded
class BytePSProcessGroup(ReductionCollectives, TransferCollectives):
    """See torch.distributed.ProcessGroup. Tensors are dense, on cpu or cuda.

    Operations that do not reduce take any dtype.
    """

    # ---- life ------------------------------------------------------------------------------------------

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Like barrier, but the StallError names the missing members. timeout: by default that of the group."""
        limit_s = timeout_s_of(timeout)
        if limit_s is None:
            limit_s = self._group_context.timeout_s
        _monitored_barrier(self._store, self._members, limit_s, wait_all_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations."""
        self._group_context.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def begin_anew(self) -> None:
        """See GroupBase."""
        with _barriers_lock:
            _barriers.pop(self._members.prefix, None)
        super().begin_anew()

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
            self._end()
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
        options = opts if isinstance(opts, Backend.Options) else ProcessGroupOptions(limit)
        members = self._members.split(ranks, number)
        name = group_name or f"{self.group_name}:split:{number}"
        group = type(self)(members, PrefixStore(f"{name}/", self._store), limit.total_seconds(), options)
        group._is_split = True
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split:{number}")
        if (history := history_of(members.context)) is not None:
            history.made(group, CALLED_TOGETHER)
        return group

    # ---- memory of the machine --------------------------------------------------------------------------

    @property
    def machine_index(self) -> int:
        """The index of this rank's machine in the job."""
        return self._members.session.machine_index

    def share_memory(self, nbytes: int) -> MachineMemory:
        """Memory that the members on this machine share. They call it together, as they call a collective; members on
        other machines need not. Raises OSError, StallError and the error that ends the group or the session."""
        if (history := history_of(self._members.context)) is not None:
            history.refuse("ranks of a machine share memory (share_memory() of a group)")
        return MachineMemory(self._members, self._group_context, next(self._memories), nbytes)


# ---- creation ------------------------------------------------------------------------------------------------


def create(opts: Any, pg_options: Any = None) -> BytePSProcessGroup:
    """Create a group. torch calls it on the group's members. pg_options: ProcessGroupOptions.

    Raises ConfigurationError, RendezvousError, UnsupportedError for BYTEPS_NONFINITE=skip, and UsageError if the job
    differs from the world in size or ranks.
    """
    global _worlds
    context = contexts.current()
    is_world = not dist.is_initialized()
    if is_world:
        _worlds += 1
    ranks = tuple(opts.global_ranks_in_group) or tuple(range(opts.group_size))
    timeout: timedelta = getattr(pg_options, "_timeout", None) or opts.timeout
    if is_world:
        _join_job(context, opts.store, opts.group_rank, opts.group_size)
    session = context.session if len(ranks) > 1 else SoloSession()
    members = Members(context, session, ranks, opts.group_rank, prefix_of(_worlds, opts.group_id, ranks))
    leave = (lambda: _leave(context)) if is_world else None
    options = pg_options if isinstance(pg_options, Backend.Options) else ProcessGroupOptions(timeout)
    group = BytePSProcessGroup(members, opts.store, timeout.total_seconds(), options, leave)
    if (history := history_of(context)) is not None:
        history.made(group, CALLED_TOGETHER)
    return group


def count_worlds(at_least: int = 0) -> int:
    """The number of worlds that this process has made so far, which names those that follow; made ``at_least`` as
    large. For ranks of one world whose processes have made different numbers of others."""
    global _worlds
    _worlds = max(_worlds, at_least)
    return _worlds


def _leave(context: Context) -> None:
    end_history(context)
    context.release(HOLDER)
    POOL.close()


def _join_job(context: Context, store: Store, rank: int, size: int) -> None:
    if not context.is_open:
        settings = Settings.from_env()
        if size > 1 and torch_rendezvous.is_single_rank(settings):
            settings = torch_rendezvous.discover_machines(settings, store, rank, size)
        context.open(settings, holder=HOLDER)
    else:
        context.open(holder=HOLDER)
    try:
        _check_mode(nonfinite.mode_of(context))
    except UnsupportedError:
        context.release(HOLDER)
        raise
    session = context.session
    if (session.rank, session.size) != (rank, size):
        context.release(HOLDER)
        raise UsageError(
            f"torch.distributed says rank {rank} of {size}, byteps_py rank {session.rank} of {session.size}: ranks "
            "must be numbered machine by machine, and the world must have all ranks of the job. Start them with "
            "torchrun or bpslaunch, or pass rank=byteps_py.rank() and world_size=byteps_py.size() to init_process_group"
        )


def _check_mode(mode: NonFinite) -> None:
    """Raises UnsupportedError for BYTEPS_NONFINITE=skip."""
    if mode is NonFinite.SKIP:
        raise UnsupportedError(
            "a collective of torch.distributed can't leave out a step, which is your optimizer's: use "
            "BYTEPS_NONFINITE=raise or allow, or byteps_py's DistributedOptimizer without init_process_group"
        )


# ---- the monitored barrier -----------------------------------------------------------------------------------


def _monitored_barrier(store: Store, members: Members, timeout_s: float, is_thorough: bool) -> None:
    """A barrier through the store: it finds missing members even if the job's services can't be reached.

    Raises StallError after ``timeout_s``. The first member's error names the first missing member, or all of them if
    ``is_thorough``. The errors begin like gloo's, which scripts look for.
    """
    with _barriers_lock:
        call = _barriers[members.prefix] = _barriers.get(members.prefix, 0) + 1
    deadline = time.monotonic() + timeout_s
    key = f"{members.prefix}/monitored/{call}"
    if members.position:
        store.set(f"{key}/{members.position}", "here")
        if not appears(store, f"{key}/go", deadline):
            raise StallError(
                f"Rank {members.ranks[members.position]} successfully reached monitoredBarrier, but received errors "
                f"while waiting for send/recv from rank {members.ranks[0]}: no answer within {timeout_s:g} s. That "
                "rank may be missing, or it waits for others: see its error"
            )
        return
    missing = []
    for position in range(1, members.count):
        if not appears(store, f"{key}/{position}", deadline):
            missing.append(members.ranks[position])
            if not is_thorough:
                break
    if missing:
        raise StallError(
            f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} failed to pass monitoredBarrier in "
            f"{timeout_s * 1000:g} ms; look at what {'they are' if len(missing) > 1 else 'it is'} doing"
        )
    store.set(f"{key}/go", "go")


def appears(store: Store, key: str, deadline: float, clock: Callable[[], float] = time.monotonic) -> bool:
    """True if ``key`` is in the store before the deadline."""
    # Stores round waits down to milliseconds. A wait that ends before the deadline would look like a failed store.
    left_ms = max(0, math.ceil(1000 * (deadline - clock())))
    try:
        store.wait([key], timedelta(milliseconds=left_ms + 1))
    except RuntimeError:  # each kind of store raises a type of its own
        if clock() < deadline:
            raise
        return False
    return True
