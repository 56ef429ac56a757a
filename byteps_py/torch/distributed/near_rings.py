"""Large sums among members on one machine: each adds its share of the tensor, and gives all others the sums.

Members do so chunk by chunk (chunks.py), through two small slots each (byteps_py/session/nearby/ring.py): of the tensor
itself every byte is read once from memory, and written once; the rest happens in the caches. The communication service
has no part in it, and no slot of the tensor's size.

Operations of a group go one after the other, in the order of the calls. Who waits carries one out, or, if the caller
will not wait at once, a thread of the pool. Any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Sequence

import torch

from byteps_py.errors import JoinedError, StallError
from byteps_py.session.nearby import Slot, Stream
from byteps_py.torch.distributed.chunks import Chunks
from byteps_py.torch.distributed.members import Members
from byteps_py.torch.distributed.near import SLOT_BYTES, Near
from byteps_py.torch.distributed.places import Kind
from byteps_py.torch.distributed.work import Pending

_HALF = (torch.float16, torch.bfloat16)


class NearRings:
    """The large sums of one group."""

    def __init__(self, members: Members, near: Near) -> None:
        self.near = near
        self.own = members.position
        self.count = members.count
        self.failure: Exception | None = None  # of an operation which other members may have carried on
        self._prefix = members.prefix
        self._lock = threading.Lock()

    def add_up(
        self,
        place: int,
        kind: Kind,
        what: str,
        source: torch.Tensor,
        target: torch.Tensor | None,
        outputs: list[torch.Tensor],
        timeout_s: float,
        finish: Callable[[], None] | None,
        agreement: Pending | None,
    ) -> RingSum:
        """Of everybody's ``source``, flat and plain, into ``target``, which may be the same; None: for others only.
        ``finish`` is called when it is there. ``agreement``: nothing is laid before it is over, and well."""
        near, name = self.near, f"{self._prefix}.ring.{place}"
        with self._lock:
            near.around.check()
            stream = near.neighbours.stream(name, near.others.values())
            work = RingSum(self, stream, source, target, kind.average, what, outputs, timeout_s, finish, agreement)
            work.number = near.around.journal.record((what, kind), name)
            near.sums.append(work)
            return work

    def finish(self) -> None:
        """Complete what is under way. Raises StallError."""
        for work in list(self.near.sums):
            self.near.around.finish(work)


class RingSum(Pending):
    """One sum. It goes on where it was if a wait for other members ends too early."""

    def __init__(
        self,
        rings: NearRings,
        stream: Stream,
        source: torch.Tensor,
        target: torch.Tensor | None,
        average: bool,
        what: str,
        outputs: list[torch.Tensor],
        timeout_s: float,
        finish: Callable[[], None] | None,
        agreement: Pending | None,
    ) -> None:
        super().__init__(rings.near.around, what, outputs, timeout_s)
        self._rings = rings
        self._stream = stream
        self._source, self._target = source, target
        self._average = average
        self._finish = finish
        self._agreement = agreement
        self._chunks = Chunks(source.numel(), source.itemsize, rings.count, SLOT_BYTES)
        self._room_bytes = self._chunks.room * source.itemsize
        self._step = -1  # not begun

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
        try:
            self._run(time.monotonic() + timeout_s)
        except (StallError, JoinedError):  # it may go on, or nobody has begun
            raise
        except Exception as error:
            self._rings.failure = error
            raise

    def _run(self, deadline: float) -> None:
        near, ring, chunks = self._rings.near, self._rings.near.ring, self._chunks
        if self._step < 0:
            near.await_meeting(deadline - time.monotonic())
            ring.begin(self._stream, chunks.steps)
            self._step = 0
        while self._step <= chunks.steps:
            step = self._step
            if step:
                ring.await_step(step - 1, deadline - time.monotonic())
            if step < chunks.count:
                self._give(step)
            if 0 < step <= chunks.count:
                self._add(step - 1)
            if step > 1:
                self._take(step - 2)
            if step < chunks.steps:
                ring.lay()
            self._step += 1
        ring.end()

    def _give(self, chunk: int) -> None:
        """Lay what others are to add."""
        itemsize, address = self._source.itemsize, self._source.data_ptr()
        mine = self._rings.near.ring.mine(chunk).address
        for position in self._rings.near.others:
            first, count = self._chunks.of(position, chunk)
            ctypes.memmove(mine + position * self._room_bytes, address + first * itemsize, count * itemsize)

    def _add(self, chunk: int) -> None:
        """Lay the sum of one's own share."""
        rings, ring, own = self._rings, self._rings.near.ring, self._rings.own
        first, count = self._chunks.of(own, chunk)
        if not count:
            return
        dtype, offset = self._source.dtype, own * self._room_bytes

        def room(slot: Slot) -> torch.Tensor:
            return torch.frombuffer(slot.memory, dtype=dtype, count=count, offset=offset)

        rows = [
            room(ring.theirs(rings.near.others[position], chunk))
            if position != own
            else self._source[first : first + count]
            for position in range(rings.count)
        ]
        mine = ring.mine(chunk + 1)
        add_up(rows, room(mine), self._average)
        if self._target is not None:
            nbytes = count * dtype.itemsize
            ctypes.memmove(self._target.data_ptr() + first * dtype.itemsize, mine.address + offset, nbytes)

    def _take(self, chunk: int) -> None:
        """Copy the others' sums to where they belong."""
        if self._target is not None:
            itemsize, address = self._target.itemsize, self._target.data_ptr()
            for position, local_rank in self._rings.near.others.items():
                first, count = self._chunks.of(position, chunk)
                theirs = self._rings.near.ring.theirs(local_rank, chunk + 1).address + position * self._room_bytes
                ctypes.memmove(address + first * itemsize, theirs, count * itemsize)

    def _is_ready(self) -> bool:
        return self._around.aborted is not None or self._rings.failure is not None

    def _release(self) -> None:
        self._target = self._finish = None
        self._source = self._source[:0]
        with contextlib.suppress(ValueError):  # it has been removed
            self._rings.near.sums.remove(self)


def add_up(rows: Sequence[torch.Tensor], total: torch.Tensor, average: bool) -> None:
    """Flat ``rows`` into ``total``, another one, as the service's kernels add: first to last, half precision in float32
    and rounded once, before the division of an average."""
    if len(rows) > 2 and total.dtype in _HALF:
        wide = rows[0].float()
        for row in rows[1:]:
            wide += row
        total.copy_(wide)
    else:
        torch.add(rows[0], rows[1], out=total)
        for row in rows[2:]:
            total += row
    if average:
        total.div_(len(rows))
