"""One large sum among the ranks of a machine: each adds a share of the tensor, chunk by chunk, and gives the result to
all others, through a few small slots of each rank in shared memory.

    SharedMemoryAllReduce ┬ SharedSlots      slots and control lines (byteps_py/session/peers/shared_slots.py)
    SharedMemorySum       ├ Chunks           which part is added by which member in which step (shares.py)
                          └ compile_steps    the steps (kernels/jit/all_reduce_kernels.py), which read a table
                                             (kernels/all_reduce_table.py)

Every byte of the tensor is read once from memory and written once; the rest happens in the caches. The communication
service takes no part, and no slot has the size of the tensor. The order of the additions and the precision are those of
the service's kernels, so the result has the same bits.

One thread at a time.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping

import torch

from byteps_py.kernels.all_reduce_table import Status, TableEntry, new_table, rows_at, slots_at
from byteps_py.kernels.jit import streaming
from byteps_py.kernels.jit.background import Compiled, address_of
from byteps_py.session.peers import SharedSlots
from byteps_py.system.spin_policy import SpinPolicy
from byteps_py.torch.collectives.all_reduce.shares import Chunks, add_to_both, kernels
from byteps_py.torch.collectives.dtypes import WIRE
from byteps_py.torch.collectives.router import Route

#: The bytes that a member writes in a step. Half as much takes 1.07 to 1.15 times as long; twice as much 0.93 times, on
#: another processor 1.1 times.
SLOT_BYTES = 256 << 10


def _build() -> Callable[[int], None]:
    from byteps_py.kernels.jit.all_reduce_kernels import compile_steps

    return compile_steps()


_steps = Compiled("steps", _build, "large sums go through the communication service")


def prepare() -> None:
    """Start compiling the instructions, unless that was done. Returns at once. Any thread."""
    _steps.prepare()
    streaming.prepare()


def is_able() -> bool:
    """True if sums can be added in shared memory; False while that is not known. All ranks of a machine get the same
    answer. Any thread."""
    prepare()
    return _steps.is_ready() and streaming.is_ready()


class SharedMemoryAllReduce:
    """The sums of one group, one at a time, if ``is_able``. ``own``: this member's position. ``ranks``: the ranks of
    all members, by position."""

    route = Route.SHARED_MEMORY

    #: The time to poll for a step once all members have begun: they have nothing else to do before the end. A rank that
    #: shares its core with another one also waits for that rank's steps.
    step_spin_s = 1e-3

    def __init__(self, slots: SharedSlots, own: int, ranks: Mapping[int, int]) -> None:
        self.slots, self.own, self.ranks = slots, own, ranks
        self.spin_policy = SpinPolicy()  # for steps after the first one
        self._tables: dict[tuple[torch.dtype, bool], array[int]] = {}
        self._era = -1  # of the tables

    def start(
        self, source: torch.Tensor, target: torch.Tensor | None, average: bool, name: str, scatters: bool = False
    ) -> SharedMemorySum:
        """The sum of the members' ``source``."""
        return SharedMemorySum(self, source, target, average, name, scatters)

    def table(self, dtype: torch.dtype, average: bool) -> array[int]:
        """A new table for sums of ``dtype``, with the entries that do not depend on the tensor. Call it once the slots'
        addresses are known."""
        if self._era != self.slots.era:
            self._era = self.slots.era
            self._tables.clear()
        table = self._tables.get((dtype, average))
        if table is None:
            members = len(self.ranks)
            table = new_table(members)
            for position, rank in self.ranks.items():
                table[TableEntry.CONTROLS + position] = self.slots.controls[rank]
                table[slots_at(members) + position] = self.slots.slots_of(rank)
            table[TableEntry.OWN], table[TableEntry.SLOT_BYTES] = self.own, self.slots.slot_bytes
            table[TableEntry.STREAM] = streaming.address()
            compiled = kernels(WIRE[dtype], members, average)
            compiled.prepare()
            if compiled.ready is not None:
                table[TableEntry.ADD], table[TableEntry.ADD_PAST] = map(address_of, compiled.ready)
                self._tables[dtype, average] = table
        return table[:]


class SharedMemorySum:
    """Adds every member's ``source``, a flat and contiguous tensor, into ``target``.

    ``target`` may be ``source``; None: only the others need the result. ``scatters``: ``target`` receives this member's
    even share, and may be that part of ``source``. ``average``: divide by the number of members. ``name``: the same on
    all members. If a wait for other members ends early, a further call of ``run`` continues.
    """

    def __init__(
        self,
        sums: SharedMemoryAllReduce,
        source: torch.Tensor,
        target: torch.Tensor | None,
        average: bool,
        name: str,
        scatters: bool = False,
    ) -> None:
        self._sums, self._slots = sums, sums.slots
        self._source, self._target, self._average, self._name = source, target, average, name
        self._scatters = scatters
        self._chunks = Chunks(source.numel(), source.itemsize, len(sums.ranks), sums.slots.slot_bytes, scatters)
        self._table: array[int] | None = None
        self.has_begun = False
        self._spins_for_steps: bool | None = None  # for later steps; None: not decided yet
        self._has_spun_in_vain = False  # for one of them

    def write_first_step(self) -> None:
        """Write the first chunk, if the members know each other's addresses, before it is certain that ``run`` follows.
        The caller knows that all other members do the same before they call ``run``, so ``run`` does not wait for the
        first step."""
        self._slots.prepare()
        if self._slots.knows_addresses:
            table = self._table = self._filled()
            table[TableEntry.FIRST_STEP_ONLY] = True
            self._go_through(table)
            table[TableEntry.STEP] = table[TableEntry.FIRST_STEP_KNOWN] = True

    def run(self, deadline: float, absent_elsewhere: Callable[[], list[int]] = list) -> None:
        """Complete the sum. All members are introduced. ``deadline``: of time.monotonic(). ``absent_elsewhere``: see
        SharedSlots.await_addresses. Raises the errors of the waits of SharedSlots."""
        try:
            self._run(deadline, absent_elsewhere)
        except BaseException:
            self._slots.pause()
            raise
        self._slots.end()

    def _run(self, deadline: float, absent_elsewhere: Callable[[], list[int]]) -> None:
        slots = self._slots
        if not self.has_begun:
            slots.begin(self._name, self._source.nbytes, self._chunks.steps)
            self.has_begun = True
        if not slots.knows_addresses:
            self._table = None  # from an earlier era
            slots.await_addresses(deadline - time.monotonic(), absent_elsewhere)
        table = self._table = self._table or self._filled()
        table[TableEntry.KEY] = slots.key
        while (status := self._take_steps(table)) is not Status.DONE:
            if status is Status.WAITS:
                slots.sleep(table[TableEntry.STEP], deadline - time.monotonic(), absent_elsewhere)
            elif status is Status.WAKE:
                slots.wake()
            elif status is Status.ADD:
                self._add(table)
            else:
                slots.differ(deadline - time.monotonic())

    def _filled(self) -> array[int]:
        slots, source, target, chunks = self._slots, self._source, self._target, self._chunks
        table, itemsize = self._sums.table(source.dtype, self._average), source.itemsize
        table[TableEntry.BASE], table[TableEntry.RECORD] = slots.base, slots.record
        table[TableEntry.CHUNKS] = chunks.count
        table[TableEntry.SHARE], table[TableEntry.CHUNK_BYTES] = (
            chunks.share * itemsize,
            chunks.chunk_elements * itemsize,
        )
        table[TableEntry.SOURCE], table[TableEntry.TOTAL] = source.data_ptr(), source.nbytes
        if target is not None:
            before = self._sums.own * table[TableEntry.SHARE] if self._scatters else 0
            table[TableEntry.TARGET] = (target.data_ptr() - before) % (1 << 64)
        table[TableEntry.SCATTERS] = self._scatters
        return table

    def _take_steps(self, table: array[int]) -> Status:
        spin_policy, is_first = self._sums.spin_policy, table[TableEntry.STEP] <= 1
        first_s = self._slots.spin_s() if is_first else 0.0
        if (is_due := self._spins_for_steps) is None:
            is_due = self._spins_for_steps = spin_policy.is_due()
        table[TableEntry.FIRST_SPIN_NS], table[TableEntry.SPIN_NS] = (
            int(first_s * 1e9),
            int(self._sums.step_spin_s * 1e9) * is_due,
        )
        self._go_through(table)
        status, is_still_first = Status(table[TableEntry.STATUS]), table[TableEntry.STEP] <= 1
        waits = status is Status.WAITS
        if first_s:
            self._slots.spun(in_vain=waits and is_still_first)
        if waits and not is_still_first:
            self._spins_for_steps = None
            if is_due:
                self._has_spun_in_vain = True
                spin_policy.ended(paid=False)
        elif is_due and status is Status.DONE and not self._has_spun_in_vain:
            spin_policy.ended(paid=True)
        return status

    def _go_through(self, table: array[int]) -> None:
        steps = _steps.ready
        if steps is None:
            raise RuntimeError("the steps are not compiled; call is_able() first")
        way = streaming.choice(table[TableEntry.CHUNK_BYTES])
        table[TableEntry.IS_PAST], table[TableEntry.IS_TRY] = way.streams, way.is_try_due()
        steps(table.buffer_info()[0])
        for streamed, place in ((False, TableEntry.TOOK_NS), (True, TableEntry.TOOK_PAST_NS)):
            if table[place + 1]:
                way.took(streamed, table[place + 1], table[place] / 1e9)
                table[place] = table[place + 1] = 0

    def _add(self, table: array[int]) -> None:
        """Add the chunk of the own share that the previous step has brought."""
        _, count = self._chunks.of(self._sums.own, table[TableEntry.STEP] - 1)
        *rows, result, copy = table[rows_at(len(self._sums.ranks)) :]
        add_to_both(self._source.dtype, count, rows, None if result == copy else result, copy, self._average)
