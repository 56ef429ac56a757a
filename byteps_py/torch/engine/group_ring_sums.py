"""Large sums of a process group in the ring: shared memory, of which each member adds a share (ring/).

Operations of a group go one after the other, in the order of the calls. The thread that waits carries one out, or, if
the caller will not wait at once, a thread of the pool. Any thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import torch

from byteps_py.errors import JoinedError, StallError
from byteps_py.torch.engine.dtypes import is_plain
from byteps_py.torch.engine.group_work import FallbackWork, GroupWork
from byteps_py.torch.engine.members import Members
from byteps_py.torch.engine.peer_streams import PeerStreams
from byteps_py.torch.engine.peer_sums import LocalSum, Tensors, joined, lay_out, plain
from byteps_py.torch.engine.ring.ring_sum import RingSum
from byteps_py.torch.engine.tensor_bytes import check_writable
from byteps_py.torch.engine.work import Call


class GroupRingSums:
    """Those of one group."""

    def __init__(self, members: Members, streams: PeerStreams) -> None:
        self.streams = streams
        self.failure: Exception | None = None  # of an operation which other members may have carried on
        self._prefix = members.prefix
        self._own = members.position
        self._count = members.count
        self._lock = threading.Lock()

    def reduce(self, what: LocalSum, contributions: Tensors, targets: Tensors) -> FallbackWork:
        """``contributions`` of all, summed to ``targets``, which are as many or none."""
        for target in targets:
            check_writable(target)
        whole = joined(plain(contributions))
        return self._add_up(what, whole, whole, targets)

    def reduce_scatter(self, what: LocalSum, contributions: Tensors, target: torch.Tensor) -> FallbackWork:
        """Of ``contributions``, end to end, each member gets an even share of the sum."""
        check_writable(target)
        whole = joined(plain(contributions))
        return self._add_up(what, whole, whole.chunk(self._count)[self._own], [target])

    def finish(self) -> None:
        """Complete what is under way. Raises StallError."""
        for work in list(self.streams.sums):
            self.streams.around.finish(work)

    def _add_up(self, what: LocalSum, source: torch.Tensor, own: torch.Tensor, targets: Tensors) -> FallbackWork:
        """``own``: that part of ``source`` whose sum this member is to have."""
        streams, call, finish = self.streams, what.call, None
        target: torch.Tensor | None = None
        # What the others are to have of this member's has to stay until they do.
        if len(targets) == 1 and is_plain(targets[0]) and (_is_same(targets[0], own) or _is_apart(targets[0], source)):
            target = targets[0].view(-1)
        elif targets:
            whole = target = torch.empty_like(own)

            def finish() -> None:
                lay_out(whole, targets)

        name = f"{self._prefix}.ring.{what.place}"
        with self._lock:
            streams.around.check()
            ring_sum = RingSum(streams.ring_sums, source, target, what.kind.average, name, what.kind.scatters)
            work = RingWork(self, call._replace(finish=finish), ring_sum, what.agreement)
            work.number = streams.around.journal.record((call.what, what.kind), name)
            streams.sums.append(work)
        fallback = FallbackWork(streams.fallbacks, call, work, what.otherwise)
        if not what.is_awaited:
            fallback.go_on_by_itself()
        return fallback


class RingWork(GroupWork):
    """One sum. It goes on where it was if a wait for other members ends too early. Nothing is laid in the ring before
    the ``agreement`` is over, and well."""

    def __init__(self, sums: GroupRingSums, call: Call, ring_sum: RingSum, agreement: GroupWork | None) -> None:
        super().__init__(sums.streams.around, call)
        self._sums = sums
        self._sum: RingSum | None = ring_sum
        self._agreement = agreement
        self._meet: Callable[[float], None] | None = None

    def _complete(self, deadline: float) -> None:
        sums = self._sums
        for earlier in list(sums.streams.sums):
            if earlier is self:
                break
            self._slices(deadline, earlier.settle)
        agreement = self._agreement
        if agreement is not None:
            self._slices(deadline, agreement.settle)
            agreement.wait()
            self._agreement = None
        if sums.failure is not None:
            raise type(sums.failure)(*sums.failure.args)
        self._slices(deadline, self._go_on)
        if self._finish is not None:
            self._finish()

    def _go_on(self, timeout_s: float) -> None:
        work, deadline = self._sum, time.monotonic() + timeout_s
        if work is None:
            return
        streams = self._sums.streams
        try:
            if not work.has_begun and not streams.has_met:
                self._meet = self._meet or streams.meeting()
                self._meet(timeout_s)
            work.run(deadline)
        except (StallError, JoinedError):  # it may go on, or nobody has begun
            raise
        except Exception as error:
            self._sums.failure = error
            raise

    def _is_ready(self) -> bool:
        return self._around.aborted is not None or self._sums.failure is not None

    def _release(self) -> None:
        self._sum = self._finish = None
        with contextlib.suppress(ValueError):  # it has been removed
            self._sums.streams.sums.remove(self)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()


def _is_apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """They share no memory."""
    return one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
