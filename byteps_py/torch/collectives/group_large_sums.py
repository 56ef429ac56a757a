"""The large sums of a process group of which each member adds a share: in shared memory (ring/), over connections
(share_sums.py), or both (two_level_sums.py).

The operations of a group run one after the other, in the order of the calls. The waiting thread carries an operation
out; if the caller will not wait at once, a thread of the pool does. Any thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import torch

from byteps_py.errors import JoinedError, StallError
from byteps_py.torch.collectives.dtypes import is_plain
from byteps_py.torch.collectives.group_work import FallbackWork, GroupWork
from byteps_py.torch.collectives.large_sum import LargeSum, LargeSums
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.peer_streams import PeerStreams
from byteps_py.torch.collectives.peer_sums import LocalSum, Tensors, concatenated, contiguous, split_into
from byteps_py.torch.collectives.tensor_bytes import check_writable
from byteps_py.torch.collectives.work import Call


class GroupLargeSums:
    """The large sums of one group."""

    def __init__(self, members: Members, streams: PeerStreams, large_sums: LargeSums) -> None:
        self.streams = streams
        self._large_sums = large_sums
        self.failure: Exception | None = None  # of an operation that other members may have continued
        self._prefix = members.prefix
        self._own = members.position
        self._count = members.count
        self._lock = threading.Lock()

    def reduce(self, what: LocalSum, contributions: Tensors, targets: Tensors) -> FallbackWork:
        """Sum the ``contributions`` of all members, concatenated, to ``targets``: the same number of tensors, or
        none."""
        for target in targets:
            check_writable(target)
        whole = concatenated(contiguous(contributions))
        return self._add_up(what, whole, whole, targets)

    def reduce_scatter(self, what: LocalSum, contributions: Tensors, target: torch.Tensor) -> FallbackWork:
        """Sum the concatenated ``contributions`` of all members; ``target`` receives this member's even share."""
        check_writable(target)
        whole = concatenated(contiguous(contributions))
        return self._add_up(what, whole, whole.chunk(self._count)[self._own], [target])

    def finish(self) -> None:
        """Complete all sums under way. Raises StallError."""
        for work in list(self.streams.sums):
            self.streams.group_context.finish(work)

    def _add_up(self, what: LocalSum, source: torch.Tensor, own: torch.Tensor, targets: Tensors) -> FallbackWork:
        """``own``: the part of ``source`` whose sum this member receives."""
        streams, call, finish = self.streams, what.call, None
        target: torch.Tensor | None = None
        # This member's contribution must not be overwritten before the others have read it.
        if len(targets) == 1 and is_plain(targets[0]) and (_is_same(targets[0], own) or _is_apart(targets[0], source)):
            target = targets[0].view(-1)
        elif targets:
            whole = target = torch.empty_like(own)

            def finish() -> None:
                split_into(whole, targets)

        name = f"{self._prefix}.shares.{what.place}"
        with self._lock:
            streams.group_context.check()
            large_sum = self._large_sums.start(source, target, what.kind.average, name, what.kind.scatters)
            work = LargeSumWork(self, call._replace(finish=finish), large_sum, what.agreement)
            work.number = streams.group_context.journal.record((call.what, what.kind), name)
            streams.sums.append(work)
        fallback = FallbackWork(streams.fallbacks, call, work, what.otherwise)
        if not what.is_awaited:
            fallback.complete_in_background()
        return fallback


class LargeSumWork(GroupWork):
    """One sum. If a wait for other members ends early, the next wait continues it. Nothing is given to others
    before the ``agreement`` has succeeded."""

    def __init__(self, sums: GroupLargeSums, call: Call, large_sum: LargeSum, agreement: GroupWork | None) -> None:
        super().__init__(sums.streams.group_context, call)
        self._sums = sums
        self._sum: LargeSum | None = large_sum
        self._agreement = agreement
        self._introduction_wait: Callable[[float], None] | None = None

    def _complete(self, deadline: float) -> None:
        sums = self._sums
        for earlier in list(sums.streams.sums):
            if earlier is self:
                break
            self._wait_in_slices(deadline, earlier.settle)
        agreement = self._agreement
        if agreement is not None:
            self._wait_in_slices(deadline, agreement.settle)
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
        streams = self._sums.streams
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
            self._sums.streams.sums.remove(self)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()


def _is_apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if they share no storage."""
    return one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
