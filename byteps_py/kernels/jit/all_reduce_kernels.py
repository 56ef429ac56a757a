"""A large sum in shared memory as LLVM instructions: its steps (byteps_py/session/peers/shared_slots.py), and the
addition of a share in one pass that reads every row and writes the result twice.

While all ranks keep up, the steps run no Python, and no system call except to yield the processor and to read the
clock. In Python a step costs each member some 30 µs, and a wake-up for it as much: chunks had to be large, and left the
caches in between. Here a step costs less than one. The elements are added by the service's own instructions
(vector.py). Any thread. The import loads LLVM: import this module late.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from byteps_py.kernels.all_reduce_table import AHEAD, ASLEEP, SLOTS, WORD, Status, TableEntry
from byteps_py.kernels.jit import llvm, vector
from byteps_py.kernels.jit.streaming import AT_ONCE_BYTES
from byteps_py.tensors import DType, Op

_I32, _I64, _VOID = ir.IntType(32), ir.IntType(64), ir.VoidType()
#: Polls of another member's word before the processor is yielded.
_POLLS = 16
_NS = 1_000_000_000
_ELEMENTS = 64  # added per iteration: as many float32 elements as fit into registers
_libc = ctypes.CDLL(None)


def compile_steps(kind: type[Steps] | None = None) -> Callable[[int], None]:
    """A function of a table's address (kernels/all_reduce_table.py): it takes steps until the sum is complete or
    the caller has something to do, which STATUS says."""
    function = ir.Function(llvm.new_module("byteps_steps"), ir.FunctionType(_VOID, [_I64]), "steps")
    (kind or Steps)(function).build()
    return llvm.compile_function(function)


class Steps:
    """Builds the function. Each method adds the instructions that do what its name says."""

    def __init__(self, function: ir.Function) -> None:
        self._function = function
        self._table = function.args[0]
        self._b = b = ir.IRBuilder(function.append_basic_block())
        self._index, self._poll_count = b.alloca(_I64), b.alloca(_I64)
        self._time = b.alloca(_I64, 2)
        self._members = self._get(TableEntry.MEMBERS)
        self._own = self._get(TableEntry.OWN)
        self._base = self._get(TableEntry.BASE)
        self._control = self._control_of(self._own)
        self._end = function.append_basic_block()

    def build(self) -> None:
        """Build the whole function: the loop over steps, and its exits."""
        b, chunks = self._b, self._get(TableEntry.CHUNKS)
        begin, added = self._function.append_basic_block(), self._function.append_basic_block()
        self._store(self._at(self._control, ASLEEP), _I64(0))
        b.cbranch(self._is(self._get(TableEntry.IS_ADDED)), added, begin)

        b.position_at_end(begin)
        step = self._get(TableEntry.STEP)
        with b.if_then(self._is(self._get(TableEntry.FIRST_STEP_ONLY))):
            self._put(TableEntry.FIRST_STEP_ONLY, _I64(0))
            self._give(step)
            self._leave(Status.DONE)
        with self._when(step, ">", self._get(TableEntry.FIRST_STEP_KNOWN)):
            self._await(step)
        with self._when(step, "<", chunks):
            self._give(step)
        with self._when(step, ">", _I64(0)), self._when(step, "<=", chunks):
            self._add(b.sub(step, _I64(1)))
        b.branch(added)

        b.position_at_end(added)
        step = self._get(TableEntry.STEP)
        self._put(TableEntry.IS_ADDED, _I64(0))
        takes = b.and_(self._is(self._get(TableEntry.TARGET)), b.not_(self._is(self._get(TableEntry.SCATTERS))))
        with self._when(step, ">", _I64(1)), b.if_then(takes):
            self._take(b.sub(step, _I64(2)))
        following_step = b.add(step, _I64(1))
        self._put(TableEntry.STEP, following_step)
        with self._when(step, ">", chunks):
            self._leave(Status.DONE)
        self._publish(b.add(self._base, following_step))
        b.branch(begin)

        b.position_at_end(self._end)
        b.ret_void()

    # ---- parts of a step -------------------------------------------------------------------------------

    def _await(self, step: ir.Value) -> None:
        """Wait until all other members have published as many steps of the same operation."""
        word = self._b.add(self._base, step)
        with self._each_other() as other:
            theirs = self._control_of(other)
            with self._unless_published(theirs, word):
                self._spin(theirs, word, step)
            record = self._b.add(theirs, self._get(TableEntry.RECORD))
            for place, entry in enumerate((TableEntry.KEY, TableEntry.TOTAL)):
                with self._when(self._load(self._at(record, 8 * place)), "!=", self._get(entry)):
                    self._leave(Status.DIFFERS)

    def _spin(self, theirs: ir.Value, word: ir.Value, step: ir.Value) -> None:
        """Poll, and after the time limit return to the caller, which sleeps."""
        b = self._b
        spin, over = self._function.append_basic_block(), self._function.append_basic_block()
        has_begun = b.icmp_unsigned(">", step, _I64(1))
        spin_limit = b.select(has_begun, self._get(TableEntry.SPIN_NS), self._get(TableEntry.FIRST_SPIN_NS))
        since = self._now()
        b.store(_I64(1), self._poll_count)
        b.branch(spin)
        b.position_at_end(spin)
        llvm.pause(b)
        poll_count = b.load(self._poll_count, typ=_I64)
        b.store(b.add(poll_count, _I64(1)), self._poll_count)
        with self._when(b.and_(poll_count, _I64(_POLLS - 1)), "==", _I64(0)):
            self._call(self._library(_libc.sched_yield), _I32)
            with (
                self._unless_published(theirs, word),
                self._when(b.sub(self._now(), since), ">", spin_limit),
            ):
                self._fall_asleep(theirs, word)
        b.cbranch(self._is_published(theirs, word), over, spin)
        b.position_at_end(over)

    def _fall_asleep(self, theirs: ir.Value, word: ir.Value) -> None:
        """Record that this member sleeps. A member that publishes a step afterwards sees that; a step published before
        is seen here."""
        asleep = self._at(self._control, ASLEEP)
        self._b.atomic_rmw("xchg", self._pointer(asleep), _I64(1), "seq_cst")
        self._b.fence("seq_cst")
        with self._unless_published(theirs, word):
            self._leave(Status.WAITS)
        self._store(asleep, _I64(0))

    def _publish(self, word: ir.Value) -> None:
        """Write this member's word, and return to the caller if a member has to be woken."""
        self._b.store_atomic(word, self._pointer(self._at(self._control, WORD)), "release", 8)
        self._b.fence("seq_cst")
        with self._each_other() as other:
            asleep = self._load(self._at(self._control_of(other), ASLEEP))
            with self._when(asleep, "!=", _I64(0)):
                self._leave(Status.WAKE)

    def _give(self, chunk: ir.Value) -> None:
        """Write the parts that the other members add."""
        b, mine, chunk_bytes, source = (
            self._b,
            self._slot(self._own, chunk),
            self._get(TableEntry.CHUNK_BYTES),
            self._get(TableEntry.SOURCE),
        )
        with self._each_other() as other:
            first, nbytes = self._piece(other, chunk)
            self._copy(b.add(mine, b.mul(other, chunk_bytes)), b.add(source, first), nbytes)

    def _add(self, chunk: ir.Value) -> None:
        """Write the sum of the own share, or return to the caller, which adds."""
        b, own, target = self._b, self._own, self._get(TableEntry.TARGET)
        first, nbytes = self._piece(own, chunk)
        with self._when(nbytes, "!=", _I64(0)):
            offset = b.mul(own, self._get(TableEntry.CHUNK_BYTES))
            rows = b.add(self._table, b.mul(b.add(b.mul(self._members, _I64(2)), _I64(TableEntry.CONTROLS)), _I64(8)))
            with self._each_other() as other:
                self._store(b.add(rows, b.mul(other, _I64(8))), b.add(self._slot(other, chunk), offset))
            self._store(b.add(rows, b.mul(own, _I64(8))), b.add(self._get(TableEntry.SOURCE), first))
            result = b.add(rows, b.mul(self._members, _I64(8)))
            copy = b.add(self._slot(own, b.add(chunk, _I64(1))), offset)
            place = b.select(self._is(target), b.add(target, first), copy)
            self._store(result, place)
            for_others = b.select(self._is(self._get(TableEntry.SCATTERS)), place, copy)
            self._store(self._at(result, 8), for_others)
            is_past = b.and_(b.icmp_unsigned("!=", for_others, place), self._is(self._get(TableEntry.IS_PAST)))
            adding = b.select(is_past, self._get(TableEntry.ADD_PAST), self._get(TableEntry.ADD))
            with self._when(adding, "==", _I64(0)):
                self._put(TableEntry.IS_ADDED, _I64(1))
                self._leave(Status.ADD)
            self._call(adding, _VOID, rows, nbytes)

    def _take(self, chunk: ir.Value) -> None:
        """Copy the other members' sums to the target."""
        b, chunk_bytes, target = self._b, self._get(TableEntry.CHUNK_BYTES), self._get(TableEntry.TARGET)
        with self._each_other() as other:
            first, nbytes = self._piece(other, chunk)
            theirs = b.add(self._slot(other, b.add(chunk, _I64(1))), b.mul(other, chunk_bytes))
            self._move(b.add(target, first), theirs, nbytes)

    def _copy(self, target: ir.Value, source: ir.Value, nbytes: ir.Value) -> None:
        """Copy the chosen way or, once, the other way. Records the time that it takes."""
        b = self._b
        past = b.xor(self._get(TableEntry.IS_PAST), self._get(TableEntry.IS_TRY))
        self._put(TableEntry.IS_TRY, _I64(0))
        since = self._now()
        streamed = b.select(self._is(past), b.and_(nbytes, _I64(-AT_ONCE_BYTES)), _I64(0))
        with self._when(streamed, "!=", _I64(0)):
            self._call(self._get(TableEntry.STREAM), _VOID, target, source, streamed)
        self._move(b.add(target, streamed), b.add(source, streamed), b.sub(nbytes, streamed))
        took = b.sub(self._now(), since)
        places = b.add(self._table, b.mul(past, _I64(8 * (TableEntry.TOOK_PAST_NS - TableEntry.TOOK_NS))))
        for entry, value in ((TableEntry.TOOK_NS, took), (TableEntry.TOOK_BYTES, nbytes)):
            place = self._at(places, 8 * entry)
            self._store(place, b.add(self._load(place), value))

    # ---- addresses -------------------------------------------------------------------------------------

    def _piece(self, position: ir.Value, chunk: ir.Value) -> tuple[ir.Value, ir.Value]:
        """(first byte, number of bytes) of a chunk of a member's share, as in Chunks.of."""
        b, share, chunk_bytes, total = (
            self._b,
            self._get(TableEntry.SHARE),
            self._get(TableEntry.CHUNK_BYTES),
            self._get(TableEntry.TOTAL),
        )
        begin = b.mul(position, share)
        start = b.add(begin, b.mul(chunk, chunk_bytes))
        first = self._least(start, total)
        end = self._least(self._least(b.add(begin, share), b.add(start, chunk_bytes)), total)
        return first, b.select(b.icmp_unsigned(">", end, first), b.sub(end, first), _I64(0))

    def _slot(self, position: ir.Value, step: ir.Value) -> ir.Value:
        b = self._b
        slots = self._load(
            b.add(self._table, b.mul(b.add(b.add(self._members, position), _I64(TableEntry.CONTROLS)), _I64(8)))
        )
        number = b.and_(b.add(self._base, step), _I64(SLOTS - 1))
        return b.add(slots, b.mul(number, self._get(TableEntry.SLOT_BYTES)))

    def _control_of(self, position: ir.Value) -> ir.Value:
        return self._load(
            self._b.add(self._table, self._b.mul(self._b.add(position, _I64(TableEntry.CONTROLS)), _I64(8)))
        )

    # ---- building blocks -------------------------------------------------------------------------------

    def _leave(self, status: Status) -> None:
        self._put(TableEntry.STATUS, _I64(status))
        self._b.branch(self._end)

    @contextlib.contextmanager
    def _when(self, a: ir.Value, relation: str, b: ir.Value) -> Iterator[None]:
        with self._b.if_then(self._b.icmp_unsigned(relation, a, b)):
            yield

    @contextlib.contextmanager
    def _unless_published(self, theirs: ir.Value, word: ir.Value) -> Iterator[None]:
        with self._b.if_then(self._b.not_(self._is_published(theirs, word))):
            yield

    def _is_published(self, theirs: ir.Value, word: ir.Value) -> ir.Value:
        """True if a member has published ``word`` steps. A difference of AHEAD or more means fewer, or another era."""
        b = self._b
        published = b.load_atomic(self._pointer(self._at(theirs, WORD)), "acquire", 8, typ=_I64)
        return b.icmp_unsigned("<", b.sub(published, word), _I64(AHEAD))

    @contextlib.contextmanager
    def _each_other(self) -> Iterator[ir.Value]:
        """A loop over the positions of the other members."""
        b = self._b
        loop, body, following, over = (self._function.append_basic_block() for _ in range(4))
        b.store(_I64(0), self._index)
        b.branch(loop)
        b.position_at_end(loop)
        position = b.load(self._index, typ=_I64)
        b.cbranch(b.icmp_unsigned("<", position, self._members), body, over)
        b.position_at_end(body)
        with self._when(position, "!=", self._own):
            yield position
        b.branch(following)
        b.position_at_end(following)
        b.store(b.add(position, _I64(1)), self._index)
        b.branch(loop)
        b.position_at_end(over)

    def _is(self, value: ir.Value) -> ir.Value:
        return self._b.icmp_unsigned("!=", value, _I64(0))

    def _least(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self._b.select(self._b.icmp_unsigned("<", a, b), a, b)

    def _now(self) -> ir.Value:
        """The monotonic clock in nanoseconds."""
        b = self._b
        place = b.ptrtoint(self._time, _I64)
        self._call(self._library(_libc.clock_gettime), _I32, _I32(time.CLOCK_MONOTONIC), place)
        return b.add(b.mul(self._load(place), _I64(_NS)), self._load(self._at(place, 8)))

    def _move(self, target: ir.Value, source: ir.Value, nbytes: ir.Value) -> None:
        self._call(self._library(_libc.memmove), _VOID, target, source, nbytes)

    def _library(self, function: Any) -> ir.Value:
        return _I64(ctypes.cast(function, ctypes.c_void_p).value)

    def _call(self, address: ir.Value, result: ir.Type, *arguments: ir.Value) -> None:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        self._b.call(self._b.inttoptr(address, kind.as_pointer()), arguments)

    def _get(self, entry: TableEntry) -> ir.Value:
        return self._load(self._at(self._table, 8 * entry))

    def _put(self, entry: TableEntry, value: ir.Value) -> None:
        self._store(self._at(self._table, 8 * entry), value)

    def _load(self, address: ir.Value) -> ir.Value:
        return self._b.load(self._pointer(address), typ=_I64)

    def _store(self, address: ir.Value, value: ir.Value) -> None:
        self._b.store(value, self._pointer(address))

    def _at(self, address: ir.Value, offset: int) -> ir.Value:
        return self._b.add(address, _I64(offset))

    def _pointer(self, address: ir.Value) -> ir.Value:
        return self._b.inttoptr(address, _I64.as_pointer())


def compile_sum(dtype: DType, rows: int, average: bool, past_caches: bool) -> Callable[[int, int], None]:
    """A function of (address of a table, bytes of each row). The table holds the addresses of ``rows`` inputs, of the
    result and of its copy. ``average``: divide by ``rows``. ``past_caches``: write the copy with non-temporal stores;
    it must be aligned to 64 bytes, and its reader has other caches."""
    function = ir.Function(llvm.new_module("byteps_sum"), ir.FunctionType(ir.VoidType(), [_I64, _I64]), "sum")
    builder = ir.IRBuilder(function.append_basic_block())
    table, end = function.args
    entries = [builder.add(table, _I64(8 * i)) for i in range(rows + 2)]
    addresses = [builder.load(builder.inttoptr(entry, _I64.as_pointer()), typ=_I64) for entry in entries]

    def fold(offset: ir.Value, width: int) -> None:
        *sources, target, copy = [builder.add(address, offset) for address in addresses]
        total = vector.load(builder, dtype, width, sources[0])
        for source in sources[1:]:
            total = vector.combine(builder, Op.SUM, dtype, total, vector.load(builder, dtype, width, source))
        result = vector.rounded(builder, dtype, total)
        if average:
            result = vector.divided(builder, dtype, result, _I64(rows))
        vector.store(builder, target, result)
        if past_caches and width > 1:
            llvm.store_past_caches(builder, result, copy)
        else:
            vector.store(builder, copy, result)

    def sweep(start: ir.Value, end: ir.Value, width: int) -> None:
        before, loop, after = builder.block, function.append_basic_block(), function.append_basic_block()
        builder.cbranch(builder.icmp_unsigned("<", start, end), loop, after)
        builder.position_at_end(loop)
        offset = builder.phi(_I64)
        fold(offset, width)
        following = builder.add(offset, _I64(width * dtype.itemsize))
        offset.add_incoming(start, before)
        offset.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_unsigned("<", following, end), loop, after)
        builder.position_at_end(after)

    middle = builder.and_(end, _I64(-_ELEMENTS * dtype.itemsize))
    sweep(_I64(0), middle, _ELEMENTS)
    sweep(middle, end, 1)
    if past_caches:
        llvm.end_of_stores(builder)
    builder.ret_void()
    return llvm.compile_function(function)
