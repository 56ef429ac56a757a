"""Sums of which the GPUs of a machine make a part, as `bps topology` says: see byteps_py/topology/local_sums.py.

    each rank     copies slice s to the s-th rank of its group, from all others       scatter, a process group of NCCL
    rank s        adds the group's slices in their order, in float32, and rounds once
    the services  add the slices s of all groups and machines, in order               nothing to do if there is one
    each rank     gets all slices of the group's ranks                                gather, another process group

With a root, the group's ranks give it their slices, it alone hands the whole to the services, and broadcasts the
result. NCCL only moves bytes: in which order it would add is not said, and differs from machine to machine. So every
rank has the same bits, and with one group on each machine those of the services alone.

A thread of the pool carries out the first half of each sum, another one the second half, each in the order of the
calls and on a stream of its own. Any thread may call.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from byteps_py.errors import CommunicationError, StallError, TopologyError
from byteps_py.system.log import logger
from byteps_py.topology.choice import choose
from byteps_py.topology.local_plan import LocalStrategy
from byteps_py.topology.local_sums import LocalSumPlan, agree, as_values, of_values, plan_local_sums
from byteps_py.topology.machine_reader import read_used
from byteps_py.topology.machine_topology import MachineTopology
from byteps_py.torch.collectives.all_reduce import GroupSum
from byteps_py.torch.collectives.all_reduce.service import ServiceAllReduce
from byteps_py.torch.collectives.all_reduce.shares import add_up
from byteps_py.torch.collectives.completion import POOL, Completer
from byteps_py.torch.collectives.group_work import CallLog, GroupContext, GroupWork
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.movers import Mover, QueuedWork
from byteps_py.torch.collectives.tensor_bytes import check_writable, concatenated, device_of, split_into
from byteps_py.torch.collectives.work import Call


class SliceGroup(Protocol):
    """The operations of torch's process groups that sums need. Each returns a work, whose ``wait`` orders the caller's
    stream after it."""

    def alltoall_base(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: list[int], input_sizes: list[int]
    ) -> Any: ...
    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> Any: ...
    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor) -> Any: ...
    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any: ...
    def shutdown(self) -> None: ...


#: Makes the process group of ``size`` ranks that has this process at ``place``, for tensors of a device.
Connect = Callable[[Store, int, int, torch.device], SliceGroup]


def connect(store: Store, place: int, size: int, device: torch.device, timeout_s: float = 1800.0) -> SliceGroup:
    """A process group of NCCL, or of gloo for tensors in the host's memory. It belongs to its caller, not to
    torch.distributed's world."""
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cpu":
        return cast(SliceGroup, dist.ProcessGroupGloo(store, place, size, timeout))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return cast(SliceGroup, dist.ProcessGroupNCCL(store, place, size, options))


class LocalSumWork(GroupWork):
    """A sum under way."""

    def __init__(self, group_context: GroupContext, what: GroupSum) -> None:
        super().__init__(group_context, what.call)
        self.done = threading.Event()
        self.failure: Exception | None = None

    def end(self, queued: QueuedWork | None, failure: Exception | None = None) -> None:
        """The outputs are filled once ``queued`` has run, or ``failure`` is the operation's error."""
        self._queued, self.failure = queued, failure
        self.done.set()

    def _complete(self, deadline: float) -> None:
        self._wait_in_slices(deadline, self._await)
        if self.failure is not None:
            raise self.failure

    def _await(self, timeout_s: float) -> None:
        if not self.done.wait(timeout_s):
            raise StallError(f"{self.what}: the GPUs of this machine have not summed")

    def _is_ready(self) -> bool:
        return self.done.is_set() or self._group_context.aborted is not None


class TaskQueue:
    """Runs tasks one after another, on a thread of the pool. A task raises nothing. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_served = False

    def add(self, task: Callable[[], None]) -> None:
        """Run ``task`` after those added before. Returns at once."""
        with self._lock:
            self._waiting.append(task)
            if self._is_served:
                return
            self._is_served = True
        POOL.run(self._serve)

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_served = False
                    return
                task = self._waiting.popleft()
            task()
            del task  # it holds tensors


@dataclass(slots=True, eq=False)
class _Half:
    """What one of both threads uses on a device: a process group, and where its work is queued."""

    group: SliceGroup
    aside: Callable[[], AbstractContextManager[object]]


class PartContext(GroupContext):
    """The operations of those members that hand the same part of a tensor to the services. They end with those of all
    members."""

    def __init__(self, whole: GroupContext, members: Members, store: Store) -> None:
        super().__init__(members.session, whole.timeout_s, CallLog(members, store), whole.check_interval_s)
        self._whole = whole

    def check(self) -> None:
        self._whole.check()
        super().check()


class LocalGroupAllReduce:
    """The sums of one group of ranks, which has all ranks of each of its machines. ``plan``: the same on all."""

    def __init__(
        self,
        members: Members,
        group_context: GroupContext,
        store: Store,
        plan: LocalSumPlan,
        connect: Connect = connect,
    ) -> None:
        session = members.session
        self._members, self._group_context, self._store, self._plan = members, group_context, store, plan
        self._connect = connect
        own = plan.group_of(session.local_rank)
        self._place, self._size = own.index(session.local_rank), len(own)
        self._root = None if plan.root is None else own.index(plan.root)
        self._group_name = f"{members.prefix}/local/{session.machine_index}.{own[0]}"
        self._parts = self._part_sums(members, plan.holders(session.local_rank))
        self._lock = threading.Lock()
        self._halves: dict[torch.device, tuple[_Half, _Half]] = {}
        self._scatters, self._gathers = TaskQueue(), TaskQueue()
        self._latest: LocalSumWork | None = None

    def _part_sums(self, members: Members, holders: Sequence[int]) -> ServiceAllReduce | None:
        """The services' sums of this rank's part; None if it has none, or no other rank has it."""
        local_size = members.session.local_size
        ranks = tuple(rank for rank in members.ranks if rank % local_size in holders)
        if len(ranks) < 2:
            return None
        position = ranks.index(members.ranks[members.position])
        part = replace(members, ranks=ranks, position=position, prefix=f"{members.prefix}.part.{ranks[0]}")
        return ServiceAllReduce(part, PartContext(self._group_context, part, self._store), Completer())

    def begin(self, what: GroupSum) -> LocalSumWork:
        """See AllReduce. The first sum waits until the ranks of the group are connected, as NCCL does."""
        for target in what.targets:
            check_writable(target)
        device = device_of([*what.contributions, *what.targets])
        mover = self._members.mover(device)
        work = LocalSumWork(self._group_context, what)
        with self._lock:
            self._group_context.check()
            work.number = self._group_context.journal.record((what.call.what, what.kind), f"local sum {what.place}")
            before = mover.queued()
            self._latest = work
            self._scatters.add(lambda: self._scatter(work, what, mover, before))
        return work

    def close(self) -> None:
        """End the process groups, whose operations fail. No call follows."""
        for half in (half for pair in self._halves.values() for half in pair):
            half.group.shutdown()

    def finish(self) -> None:
        """See AllReduce."""
        with self._lock:
            latest = self._latest
        self._group_context.finish(latest)
        if self._parts is not None:
            self._parts.finish()

    # ---- on the first thread -----------------------------------------------------------------------------

    def _scatter(self, work: LocalSumWork, what: GroupSum, mover: Mover, before: QueuedWork | None) -> None:
        if what.agreement is not None:
            try:
                what.agreement.wait()
            except Exception as error:  # the same on all members, which can go on
                work.end(None, error)
                return
        try:
            scatter, _ = self._halves_of(what, mover)
            with torch.no_grad(), scatter.aside():
                if before is not None:
                    before.order(*what.contributions)
                sums, started = self._sum_of_group(scatter.group, what), None
                if sums is not None and self._parts is not None:
                    part, sums = sums, torch.empty_like(sums)
                    kind = replace(what.kind, shape=(part.numel(),), average=False)
                    call = Call(what.call.what, [sums], what.call.timeout_s)
                    started = self._parts.start(call, kind, [part], [sums])
                ready = mover.queued()
        except Exception as error:
            self._fail(work, error)
            return
        self._gathers.add(lambda: self._gather(work, what, mover, _Summed(sums, started, ready)))

    def _sum_of_group(self, group: SliceGroup, what: GroupSum) -> torch.Tensor | None:
        """This rank's part of the group's sum, or None."""
        flat = concatenated([tensor.contiguous() for tensor in what.contributions])
        count, size = flat.numel(), self._size
        slice_count = -(-count // size)
        given = flat
        if slice_count * size != count:
            given = flat.new_zeros(slice_count * size)
            given[:count].copy_(flat)
        taken = torch.empty_like(given)
        group.alltoall_base(_octets(taken), _octets(given), [], []).wait()
        rows = list(taken.view(size, slice_count))
        own = torch.empty_like(rows[0])
        add_up(rows, own, average=False)
        if self._root is None:
            return own
        is_root = self._place == self._root
        options = dist.GatherOptions()
        options.rootRank = self._root
        group.gather([[_octets(row) for row in rows]] if is_root else [], [_octets(own)], options).wait()
        return taken[:count] if is_root else None

    # ---- on the second thread ----------------------------------------------------------------------------

    def _gather(self, work: LocalSumWork, what: GroupSum, mover: Mover, summed: _Summed) -> None:
        try:
            _, gather = self._halves_of(what, mover)
            with torch.no_grad(), gather.aside():
                if summed.ready is not None:
                    summed.ready.order(*([] if summed.sums is None else [summed.sums]), *what.targets)
                if summed.started is not None:
                    summed.started.wait()
                self._share(gather.group, what, summed.sums)
                done = mover.queued()
        except Exception as error:
            self._fail(work, error)
            return
        work.end(done)

    def _share(self, group: SliceGroup, what: GroupSum, sums: torch.Tensor | None) -> None:
        """Give the part ``sums`` to the others of the group, and fill the targets."""
        first = what.contributions[0]
        count = sum(tensor.numel() for tensor in what.contributions)
        if sums is not None and what.kind.average:
            sums = sums.div_(self._members.count)
        if self._root is None:
            slice_count = -(-count // self._size)
            whole = first.new_empty(slice_count * self._size)
            if sums is not None:
                group._allgather_base(_octets(whole), _octets(sums)).wait()
        else:
            whole = first.new_empty(count) if sums is None else sums
            options = dist.BroadcastOptions()
            options.rootRank = self._root
            group.broadcast([_octets(whole)], options).wait()
        if what.targets:
            split_into(whole[:count], what.targets)

    # ---- details -----------------------------------------------------------------------------------------

    def _halves_of(self, what: GroupSum, mover: Mover) -> tuple[_Half, _Half]:
        device = device_of(what.contributions)
        found = self._halves.get(device)
        if found is None:
            stores = [PrefixStore(f"{self._group_name}/{device.type}/{half}", self._store) for half in range(2)]
            groups = [self._connect(store, self._place, self._size, device) for store in stores]
            found = self._halves[device] = _Half(groups[0], mover.aside()), _Half(groups[1], mover.aside())
        return found

    def _fail(self, work: LocalSumWork, error: Exception) -> None:
        """An error that is not that of this sum alone ends the group: others may be in the middle of it."""
        if not isinstance(error, CommunicationError):
            error = CommunicationError(
                f"{work.what}: the GPUs of this machine could not sum ({error}). BYTEPS_LOCAL_SUM=host sums otherwise"
            )
        if self._group_context.aborted is None:
            self._group_context.aborted = error
        work.end(None, error)


@dataclass(frozen=True, slots=True, eq=False)
class _Summed:
    """A sum between its halves. ``sums``: this rank's part, or None. ``started``: its way through the services."""

    sums: torch.Tensor | None
    started: GroupWork | None
    ready: QueuedWork | None


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """Flat and contiguous, as bytes: process groups that only move bytes take any dtype so."""
    return tensor.view(torch.uint8)


# ---- agreement -----------------------------------------------------------------------------------------------------


def agreed_plan(
    members: Members, store: Store, timeout_s: float, read: Callable[[], MachineTopology] | None = None
) -> LocalSumPlan:
    """The plan for ``members``, the same on all of them. ``read``: reads the machine with what the job uses; None: this
    one. Raises StallError if a machine does not say its plan."""
    session, settings = members.session, members.context.settings
    mode = settings.local_sum
    if mode == "host" or members.count < 2:
        return LocalSumPlan(LocalStrategy.HOST_SUM, f"BYTEPS_LOCAL_SUM={mode}")
    local_size = session.local_size
    machines = sorted({rank // local_size for rank in members.ranks})
    if not session.is_homogeneous or len(members.ranks) != local_size * len(machines):
        return LocalSumPlan(LocalStrategy.HOST_SUM, "the group has not all ranks of its machines, as many on each")
    key = f"{members.prefix}/local sums"
    if session.local_rank == 0:
        try:
            interface = settings.interface or settings.interfaces.partition(",")[0].strip()
            machine = read() if read is not None else read_used(os.environ, interface)
            plan = plan_local_sums(choose(machine), local_size, mode)
        except TopologyError as error:
            plan = LocalSumPlan(LocalStrategy.HOST_SUM, f"the machine can't be read: {error}")
        store.set(f"{key}/{session.machine_index}", json.dumps(as_values(plan)))
    plans = {}
    for number in machines:
        try:
            store.wait([f"{key}/{number}"], timedelta(seconds=timeout_s))
        except (RuntimeError, dist.DistError) as error:
            raise StallError(
                f"machine {number} has not said how its GPUs sum within {timeout_s:g} s: set BYTEPS_LOCAL_SUM={mode} "
                "on all ranks"
            ) from error
        plans[f"machine {number}"] = of_values(json.loads(store.get(f"{key}/{number}")))
    found = agree(plans)
    is_in_vain = not found.groups and members.position == 0 and members.count == session.size
    log = logger.warning if is_in_vain else logger.info
    log("BYTEPS_LOCAL_SUM=%s: ranks %s sum by %s: %s", mode, members.ranks, found.strategy, found.reason)
    return found
