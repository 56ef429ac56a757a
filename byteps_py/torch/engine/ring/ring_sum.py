"""One large sum in shares, chunk by chunk (chunks.py), through a few small slots of each member
(byteps_py/session/peers/ring.py).

Of the tensor itself every byte is read once from memory, and written once; the rest happens in the caches. The
communication service has no part in it, and no slot of the tensor's size. The order of the additions and the precision
are those of the service's kernels, so the result has the same bits.

One thread at a time.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping

import torch

from byteps_py.kernels.jit import streaming
from byteps_py.kernels.jit.background import Compiled, address_of
from byteps_py.session.peers import Ring
from byteps_py.spin_policy import SpinPolicy
from byteps_py.torch.engine.dtypes import WIRE
from byteps_py.torch.engine.ring.adding import add_to_both, kernels
from byteps_py.torch.engine.ring.chunks import Chunks
from byteps_py.torch.engine.ring.step_table import Status, TableEntry, new_table, rows_at, slots_at

#: What a member lays in a step. Half as much takes 1.07 to 1.15 times as long; twice as much 0.93 times, on another
#: processor 1.1 times.
SLOT_BYTES = 256 << 10


def _build() -> Callable[[int], None]:
    from byteps_py.torch.engine.ring.steps import compile_steps

    return compile_steps()


_steps = Compiled("steps", _build, "large sums go through the communication service")


def prepare() -> None:
    """Have the instructions compiled, unless they are. Returns at once."""
    _steps.prepare()
    streaming.prepare()


def is_able() -> bool:
    """Whether sums can go in shares, once that is known. All ranks of a machine answer alike."""
    prepare()
    return _steps.is_ready() and streaming.is_ready()


class RingSums:
    """Those of one ring, one at a time, if it ``is_able``. ``own``: this member's position; ``ranks``: the local ranks
    of all, by position."""

    #: How long to look for a step once all members have begun: they have nothing else to do before the end. A rank that
    #: shares its core with another one waits for a step of that one, too.
    step_look_s = 1e-3

    def __init__(self, ring: Ring, own: int, ranks: Mapping[int, int]) -> None:
        self.ring, self.own, self.ranks = ring, own, ranks
        self.spin_policy = SpinPolicy()  # for steps after the first
        self._tables: dict[tuple[torch.dtype, bool], array[int]] = {}
        self._era = -1  # of these

    def table(self, dtype: torch.dtype, average: bool) -> array[int]:
        """For sums of ``dtype``, with what does not depend on the tensor. The ring knows all its members."""
        if self._era != self.ring.era:
            self._era = self.ring.era
            self._tables.clear()
        table = self._tables.get((dtype, average))
        if table is None:
            members = len(self.ranks)
            table = new_table(members)
            for position, local_rank in self.ranks.items():
                table[TableEntry.CONTROLS + position] = self.ring.controls[local_rank]
                table[slots_at(members) + position] = self.ring.slots(local_rank)
            table[TableEntry.OWN], table[TableEntry.SLOT_BYTES] = self.own, self.ring.slot_bytes
            table[TableEntry.STREAM] = streaming.address()
            compiled = kernels(WIRE[dtype], members, average)
            compiled.prepare()
            if compiled.ready is not None:
                table[TableEntry.ADD], table[TableEntry.ADD_PAST] = map(address_of, compiled.ready)
                self._tables[dtype, average] = table
        return table[:]


class RingSum:
    """Of everybody's ``source``, flat and plain, into ``target``, which may be the same; None: for others only.
    ``scatters``: ``target`` is for this member's even share, and may lie where that lies in ``source``. ``name``: what
    all members call it. It goes on where it was if a wait for other members ends too early."""

    def __init__(
        self,
        sums: RingSums,
        source: torch.Tensor,
        target: torch.Tensor | None,
        average: bool,
        name: str,
        scatters: bool = False,
    ) -> None:
        self._sums, self._ring = sums, sums.ring
        self._source, self._target, self._average, self._name = source, target, average, name
        self._scatters = scatters
        self._chunks = Chunks(source.numel(), source.itemsize, len(sums.ranks), sums.ring.slot_bytes, scatters)
        self._table: array[int] | None = None
        self.has_begun = False
        self._looks_for_steps: bool | None = None  # after the first; None: to be decided anew
        self._has_looked_in_vain = False  # for one of these

    def give(self) -> None:
        """The first chunk, if members know each other, before it is sure that ``run`` follows. A caller of that says
        that all others have done the same, so nobody waits for it."""
        self._ring.prepare()
        if self._ring.knows_all:
            table = self._table = self._filled()
            table[TableEntry.IS_OFFER] = True
            self._go_through(table)
            table[TableEntry.STEP] = table[TableEntry.IS_TOLD] = True

    def run(self, deadline: float) -> None:
        """To its end. All members can be reached. Raises what the waits of the ring raise."""
        try:
            self._run(deadline)
        except BaseException:
            self._ring.pause()
            raise
        self._ring.end()

    def _run(self, deadline: float) -> None:
        ring = self._ring
        if not self.has_begun:
            ring.begin(self._name, self._source.nbytes, self._chunks.steps)
            self.has_begun = True
        if not ring.knows_all:
            self._table = None  # of another era
            ring.meet(deadline - time.monotonic())
        table = self._table = self._table or self._filled()
        table[TableEntry.KEY] = ring.key
        while (status := self._take_steps(table)) is not Status.DONE:
            if status is Status.WAITS:
                ring.sleep(table[TableEntry.STEP], deadline - time.monotonic())
            elif status is Status.WAKE:
                ring.wake()
            elif status is Status.ADD:
                self._add(table)
            else:
                ring.differ(deadline - time.monotonic())

    def _filled(self) -> array[int]:
        ring, source, target, chunks = self._ring, self._source, self._target, self._chunks
        table, itemsize = self._sums.table(source.dtype, self._average), source.itemsize
        table[TableEntry.BASE], table[TableEntry.RECORD] = ring.base, ring.record
        table[TableEntry.CHUNKS] = chunks.count
        table[TableEntry.SHARE], table[TableEntry.ROOM] = chunks.share * itemsize, chunks.room * itemsize
        table[TableEntry.SOURCE], table[TableEntry.TOTAL] = source.data_ptr(), source.nbytes
        if target is not None:
            before = self._sums.own * table[TableEntry.SHARE] if self._scatters else 0
            table[TableEntry.TARGET] = (target.data_ptr() - before) % (1 << 64)
        table[TableEntry.SCATTERS] = self._scatters
        return table

    def _take_steps(self, table: array[int]) -> Status:
        spin_policy, is_first = self._sums.spin_policy, table[TableEntry.STEP] <= 1
        first_s = self._ring.patience_s() if is_first else 0.0
        if (is_due := self._looks_for_steps) is None:
            is_due = self._looks_for_steps = spin_policy.is_due()
        table[TableEntry.FIRST_PATIENCE_NS], table[TableEntry.PATIENCE_NS] = (
            int(first_s * 1e9),
            int(self._sums.step_look_s * 1e9) * is_due,
        )
        self._go_through(table)
        status, is_still_first = Status(table[TableEntry.STATUS]), table[TableEntry.STEP] <= 1
        waits = status is Status.WAITS
        if first_s:
            self._ring.looked(in_vain=waits and is_still_first)
        if waits and not is_still_first:
            self._looks_for_steps = None
            if is_due:
                self._has_looked_in_vain = True
                spin_policy.ended(paid=False)
        elif is_due and status is Status.DONE and not self._has_looked_in_vain:
            spin_policy.ended(paid=True)
        return status

    def _go_through(self, table: array[int]) -> None:
        steps = _steps.ready
        if steps is None:
            raise RuntimeError("there are no instructions for steps; is_able() tells whether there are")
        way = streaming.choice(table[TableEntry.ROOM])
        table[TableEntry.IS_PAST], table[TableEntry.IS_TRY] = way.streams, way.is_try_due()
        steps(table.buffer_info()[0])
        for streamed, place in ((False, TableEntry.TOOK_NS), (True, TableEntry.TOOK_PAST_NS)):
            if table[place + 1]:
                way.took(streamed, table[place + 1], table[place] / 1e9)
                table[place] = table[place + 1] = 0

    def _add(self, table: array[int]) -> None:
        """The chunk of the own share that the step before this one has brought."""
        _, count = self._chunks.of(self._sums.own, table[TableEntry.STEP] - 1)
        *rows, result, copy = table[rows_at(len(self._sums.ranks)) :]
        add_to_both(self._source.dtype, count, rows, None if result == copy else result, copy, self._average)
