"""Large sums of a group on one machine, in shares (byteps_py/torch/shares).

Operations of a group go one after the other, in the order of the calls. The thread that waits carries one
out, or, if the caller will not wait at once, a thread of the pool. Any thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import torch

from byteps_py.errors import JoinedError, StallError
from byteps_py.torch.engine.members import Members
from byteps_py.torch.engine.operation_kind import OperationKind
from byteps_py.torch.engine.peer_streams import Near
from byteps_py.torch.engine.ring.ring_sum import RingSum
from byteps_py.torch.engine.work import Call, Pending


class NearRings:
    """The large sums of one group."""

    def __init__(self, members: Members, near: Near) -> None:
        self.near = near
        self.failure: Exception | None = None  # of an operation which other members may have carried on
        self._prefix = members.prefix
        self._lock = threading.Lock()

    def add_up(
        self,
        place: int,
        kind: OperationKind,
        call: Call,
        source: torch.Tensor,
        target: torch.Tensor | None,
        agreement: Pending | None,
    ) -> NearSum:
        """Of everybody's ``source``, flat and plain, into ``target``, as ``kind`` and RingSum say. Nothing is laid
        before the ``agreement`` is over, and well."""
        near, name = self.near, f"{self._prefix}.ring.{place}"
        with self._lock:
            near.around.check()
            work = NearSum(self, name, call, kind, source, target, agreement)
            work.number = near.around.journal.record((call.what, kind), name)
            near.sums.append(work)
            return work

    def finish(self) -> None:
        """Complete what is under way. Raises StallError."""
        for work in list(self.near.sums):
            self.near.around.finish(work)


class NearSum(Pending):
    """One sum. It goes on where it was if a wait for other members ends too early."""

    def __init__(
        self,
        rings: NearRings,
        name: str,
        call: Call,
        kind: OperationKind,
        source: torch.Tensor,
        target: torch.Tensor | None,
        agreement: Pending | None,
    ) -> None:
        super().__init__(rings.near.around, call.what, call.outputs, call.timeout_s)
        self._rings = rings
        near = rings.near
        self._sum: RingSum | None = RingSum(near.ring_sums, source, target, kind.average, name, kind.scatters)
        self._finish = call.finish
        self._agreement = agreement
        self._meet: Callable[[float], None] | None = None

    def _complete(self, deadline: float) -> None:
        rings = self._rings
        for earlier in list(rings.near.sums):
            if earlier is self:
                break
            self._slices(deadline, earlier.settle)
        agreement = self._agreement
        if agreement is not None:
            self._slices(deadline, agreement.settle)
            agreement.wait()
            self._agreement = None
        if rings.failure is not None:
            raise type(rings.failure)(*rings.failure.args)
        self._slices(deadline, self._go_on)
        if self._finish is not None:
            self._finish()

    def _go_on(self, timeout_s: float) -> None:
        work, deadline = self._sum, time.monotonic() + timeout_s
        if work is None:
            return
        try:
            if not work.has_begun and not self._rings.near.has_met:
                self._meet = self._meet or self._rings.near.meeting()
                self._meet(timeout_s)
            work.run(deadline)
        except (StallError, JoinedError):  # it may go on, or nobody has begun
            raise
        except Exception as error:
            self._rings.failure = error
            raise

    def _is_ready(self) -> bool:
        return self._around.aborted is not None or self._rings.failure is not None

    def _release(self) -> None:
        self._sum = self._finish = None
        with contextlib.suppress(ValueError):  # it has been removed
            self._rings.near.sums.remove(self)
