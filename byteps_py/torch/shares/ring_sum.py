"""One large sum in shares, chunk by chunk (chunks.py), through two small slots of each member
(byteps_py/session/nearby/ring.py).

Of the tensor itself every byte is read once from memory, and written once; the rest happens in the caches. The
communication service has no part in it, and no slot of the tensor's size. The order of the additions and the precision
are those of the service's kernels, so the result has the same bits.

One thread at a time.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping

import torch

from byteps_py import streaming
from byteps_py.session.nearby import Ring, Stream
from byteps_py.torch.shares.adding import add_to_both
from byteps_py.torch.shares.chunks import Chunks

#: What is not larger than a slot goes in one chunk: with 4 MB that takes 0.92 to 0.96 of the time of two, with 8 MB 1.3
#: times as long.
SLOT_BYTES = 4 << 20
#: Of larger ones. Of what two members have in two slots, half is being written, half read, and all stays in caches of
#: 8 MB: twice as much is 15 to 25 % slower, half as much no faster.
CHUNK_BYTES = 2 << 20
#: Where ranks have to share cores, steps for which all wait are no faster than the service, and far slower at times (4
#: ranks on 2 cores, 16 MB: 9.8 to 21 ms instead of 9.8 to 12). Not those of this process alone: all ranks of a machine
#: decide alike.
CORES = os.sysconf("SC_NPROCESSORS_ONLN")
#: For each 2 MB everybody tells all others: with more, the messages (5 µs each) would take as long as the copies.
_MOST_MEMBERS = 32


def has_cores(members: int) -> bool:
    """Whether so many members of a group on one machine, which all answer alike, should add in shares."""
    return 1 < members <= min(CORES, _MOST_MEMBERS)


class RingSum:
    """Of everybody's ``source``, flat and plain, into ``target``, which may be the same; None: for others only.

    ``own``: this member's position; ``others``: the local ranks of the others, by position. ``name``: see Ring. It goes
    on where it was if a wait for other members ends too early.
    """

    def __init__(
        self,
        ring: Ring,
        stream: Stream,
        own: int,
        others: Mapping[int, int],
        source: torch.Tensor,
        target: torch.Tensor | None,
        average: bool,
        name: str = "",
    ) -> None:
        self._ring, self._stream = ring, stream
        self._own, self._others = own, others
        self._source, self._target = source, target
        self._average = average
        self._name = name
        chunk_bytes = SLOT_BYTES if source.nbytes <= SLOT_BYTES else CHUNK_BYTES
        self._chunks = Chunks(source.numel(), source.itemsize, len(others) + 1, chunk_bytes)
        self._room_bytes = self._chunks.room * source.itemsize
        self._step = -1  # not begun
        self._is_given = self._is_told = False

    @property
    def has_begun(self) -> bool:
        return self._step >= 0

    def give(self) -> None:
        """The first chunk, before it is sure that ``run`` follows. Who then calls that says that all others have done
        the same, so nobody waits for it."""
        self._ring.prepare()
        self._give(0)
        self._is_given = True

    def run(self, deadline: float) -> None:
        """To its end. All members can be reached. Raises what the waits of the ring raise."""
        ring, chunks = self._ring, self._chunks
        if self._step < 0:
            ring.begin(self._stream, chunks.steps, self._name)
            self._is_told = self._is_given and ring.knows_all
            self._step = 1 if self._is_told else 0
        while self._step <= chunks.steps:
            step = self._step
            is_told = self._is_told and step == 1
            if step and not is_told:
                ring.await_step(step - 1, deadline - time.monotonic())
            if step < chunks.count and (step or not self._is_given):
                self._give(step)
            if 0 < step <= chunks.count:
                self._add(step - 1)
            if step > 1:
                self._take(step - 2)
            if step < chunks.steps:
                ring.lay(2 if is_told else 1)
            self._step += 1
        ring.end()

    def _give(self, chunk: int) -> None:
        """Lay what others are to add."""
        itemsize, address = self._source.itemsize, self._source.data_ptr()
        mine = self._ring.mine(chunk).address
        for position in self._others:
            first, count = self._chunks.of(position, chunk)
            streaming.copy(mine + position * self._room_bytes, address + first * itemsize, count * itemsize)

    def _add(self, chunk: int) -> None:
        """Lay the sum of one's own share."""
        ring, own = self._ring, self._own
        first, count = self._chunks.of(own, chunk)
        if not count:
            return
        itemsize, offset = self._source.itemsize, own * self._room_bytes
        rows = [
            ring.theirs(self._others[position], chunk).address + offset
            if position != own
            else self._source.data_ptr() + first * itemsize
            for position in range(len(self._others) + 1)
        ]
        total = None if self._target is None else self._target.data_ptr() + first * itemsize
        add_to_both(self._source.dtype, count, rows, total, ring.mine(chunk + 1).address + offset, self._average)

    def _take(self, chunk: int) -> None:
        """Copy the others' sums to where they belong."""
        if self._target is not None:
            itemsize, address = self._target.itemsize, self._target.data_ptr()
            for position, local_rank in self._others.items():
                first, count = self._chunks.of(position, chunk)
                theirs = self._ring.theirs(local_rank, chunk + 1).address + position * self._room_bytes
                ctypes.memmove(address + first * itemsize, theirs, count * itemsize)
