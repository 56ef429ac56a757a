"""Large sums: each member adds a share of the tensor. How a group carries them out, and the queue of a process group.

The operations of a group run one after the other, in the order of the calls. The waiting thread carries an operation
out; if the caller will not wait at once, a thread of the pool does. Any thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from byteps_py.errors import JoinedError, StallError
from byteps_py.session.peers import PeerTransport, SharedSlots
from byteps_py.torch.collectives.all_reduce import GroupSum
from byteps_py.torch.collectives.all_reduce.direct import DirectAllReduce
from byteps_py.torch.collectives.all_reduce.hierarchical import HierarchicalAllReduce
from byteps_py.torch.collectives.all_reduce.shared_memory import SLOT_BYTES, SharedMemoryAllReduce
from byteps_py.torch.collectives.dtypes import is_plain
from byteps_py.torch.collectives.fallback_work import FallbackWork
from byteps_py.torch.collectives.group_work import GroupWork
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.peer_streams import PeerStreams
from byteps_py.torch.collectives.router import Route
from byteps_py.torch.collectives.tensor_bytes import check_writable, concatenated, contiguous, split_into
from byteps_py.torch.collectives.work import Call, Work


class LargeSum(Protocol):
    """One sum."""

    @property
    def has_begun(self) -> bool:
        """True once this member has given something to others."""

    def run(self, deadline: float) -> None:
        """Complete the sum; if a wait ends early, a further call continues. ``deadline``: of time.monotonic(). Raises
        StallError, JoinedError (no member completes it) and the error that ends the session."""


class LargeAllReduce(Protocol):
    """The sums of a group, one at a time."""

    route: Route

    def start(
        self, source: torch.Tensor, target: torch.Tensor | None, average: bool, name: str, scatters: bool = False
    ) -> LargeSum:
        """The sum of flat and contiguous tensors. ``target``: see SharedMemorySum. ``name``: the same on all
        members."""


class LargeSums:
    """Adds large tensors of a group, in slots in shared memory.

    Args:
        name: of the group, the same on all members.
        ranks: of the members, by position. ``own``: the position of this one.
        machines: the positions of the members on each machine.
    """

    def __init__(
        self, transport: PeerTransport, name: str, ranks: Sequence[int], own: int, machines: Sequence[Sequence[int]]
    ) -> None:
        self._transport, self._name = transport, name
        near = {position: ranks[position] for some in machines if own in some for position in some}
        self._near = [rank for position, rank in near.items() if position != own]
        self.slots: SharedSlots | None = None
        #: None: machines have different numbers of members.
        self.all_reduce: LargeAllReduce | None = None
        if len(set(map(len, machines))) > 1:
            return
        if not self._near:
            others = {position: rank for position, rank in enumerate(ranks) if position != own}
            self.all_reduce = DirectAllReduce(transport, own, others)
            return
        self.slots = transport.shared_slots(transport.stream(f"{name}.slots", self._near), SLOT_BYTES)
        if len(machines) == 1:
            self.all_reduce = SharedMemoryAllReduce(self.slots, own, near)
        else:
            self.all_reduce = HierarchicalAllReduce(transport, ranks, machines, own, self.slots)

    def retire(self) -> None:
        """The group has ended on this rank, with no sum under way."""
        if self.slots is not None:
            self._transport.retire(self.slots, self._transport.stream(f"{self._name}.slots.over", self._near))


class LargeSumQueue:
    """The large sums of one process group under way, in the order of the calls. They survive a join of members."""

    def __init__(self, members: Members, streams: PeerStreams) -> None:
        on_machines = [range(members.count)] if streams.machines is None else streams.machines.positions
        self.streams = streams
        self.sums = LargeSums(streams.peers, members.prefix, members.ranks, members.position, on_machines)
        self.under_way: deque[Work] = deque()

    def finish(self) -> None:
        """Complete all sums under way. Raises StallError."""
        for work in list(self.under_way):
            self.streams.group_context.finish(work)

    def close(self) -> None:
        """The group has ended on this rank."""
        if not self.under_way:
            self.sums.retire()


class QueuedAllReduce:
    """The large sums of one group until its members join. See AllReduce."""

    def __init__(self, members: Members, queue: LargeSumQueue, all_reduce: LargeAllReduce) -> None:
        self.queue = queue
        self._all_reduce = all_reduce
        self.failure: Exception | None = None  # of an operation that other members may have continued
        self._prefix = members.prefix
        self._own = members.position
        self._count = members.count
        self._lock = threading.Lock()

    def begin(self, what: GroupSum) -> FallbackWork:
        """See AllReduce."""
        targets = what.targets
        for target in targets:
            check_writable(target)
        source = concatenated(contiguous(what.contributions))
        own = source.chunk(self._count)[self._own] if what.kind.scatters else source
        group_context, call, finish = self.queue.streams.group_context, what.call, None
        total: torch.Tensor | None = None
        # This member's contribution must not be overwritten before the others have read it.
        if len(targets) == 1 and is_plain(targets[0]) and (_is_same(targets[0], own) or _is_apart(targets[0], source)):
            total = targets[0].view(-1)
        elif targets:
            whole = total = torch.empty_like(own)

            def finish() -> None:
                split_into(whole, targets)

        name = f"{self._prefix}.shares.{what.place}"
        with self._lock:
            group_context.check()
            large_sum = self._all_reduce.start(source, total, what.kind.average, name, what.kind.scatters)
            work = LargeSumWork(self, call._replace(finish=finish), large_sum, what.agreement)
            work.number = group_context.journal.record((call.what, what.kind), name)
            self.queue.under_way.append(work)
        fallback = FallbackWork(self.queue.streams.fallbacks, call, work, what.fallback)
        if not what.is_awaited:
            fallback.complete_in_background(self.queue.streams.completer)
        return fallback

    def finish(self) -> None:
        """See AllReduce."""
        self.queue.finish()


class LargeSumWork(GroupWork):
    """One sum. If a wait for other members ends early, the next wait continues it. Nothing is given to others
    before the ``agreement`` has succeeded."""

    def __init__(self, sums: QueuedAllReduce, call: Call, large_sum: LargeSum, agreement: Work | None) -> None:
        super().__init__(sums.queue.streams.group_context, call)
        self._sums = sums
        self._sum: LargeSum | None = large_sum
        self._agreement = agreement
        self._introduction_wait: Callable[[float], None] | None = None

    def _complete(self, deadline: float) -> None:
        sums = self._sums
        for earlier in list(sums.queue.under_way):
            if earlier is self:
                break
            self._wait_in_slices(deadline, earlier.complete)
        agreement = self._agreement
        if agreement is not None:
            self._wait_in_slices(deadline, agreement.complete)
            agreement.wait()
            self._agreement = None
        if sums.failure is not None:
            raise type(sums.failure)(*sums.failure.args)
        self._wait_in_slices(deadline, self._continue)
        if self._finish is not None:
            self._finish()

    def _continue(self, timeout_s: float) -> None:
        work, deadline = self._sum, time.monotonic() + timeout_s
        if work is None:
            return
        streams = self._sums.queue.streams
        try:
            if not work.has_begun and not streams.are_introduced:
                self._introduction_wait = self._introduction_wait or streams.introduction_wait()
                self._introduction_wait(timeout_s)
            work.run(deadline)
        except (StallError, JoinedError):  # it may continue, or no member completes it
            raise
        except Exception as error:
            self._sums.failure = error
            raise

    def _is_ready(self) -> bool:
        return self._group_context.aborted is not None or self._sums.failure is not None

    def _release(self) -> None:
        self._sum = self._finish = None
        with contextlib.suppress(ValueError):  # it has been removed
            self._sums.queue.under_way.remove(self)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()


def _is_apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if they share no storage."""
    return one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
