"""The loops of a kernel, as LLVM instructions: the order in which memory is read and written, and results are checked.

Owns chunks, inputs and outputs. ``vector`` owns the arithmetic on elements, ``result_checks`` the checks of results.
These functions run while a kernel is compiled and add instructions to it. No state; any thread.

    for each chunk:   in[0] ──load──► total
                      in[1] ──load──► combine ─► total       totals live in registers
                        …
                      round once ─► divide ─► check ─► out[0], out[1], …
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba.core import cgutils

from byteps_py.kernels.jit import result_checks, vector
from byteps_py.tensors import Checks, DType, Op

_I64 = ir.IntType(64)
# Enough to hide the latency of an addition; little enough to stay in 16 registers of 256 bits. There are no prefetch
# hints: on a Zen 4 they made float32 sums of 4 and 8 inputs slower from 1 MB on, and float16 no faster.
_CHUNK_BYTES = 256
# Inputs of at least this many bytes come from memory. There, two cache lines of each input in turn are faster (float32
# of 64 MB, Zen 5: 0.98 to 1.04 times the speed of gcc's loop, with one line 0.86 to 1.03, with four 0.86 to 1.07; Zen
# 4: with one 0.96 to 1.10, with four 0.80 to 0.97), and looking for NaN costs nothing. In caches, four lines are.
_FROM_MEMORY = 4 << 20
_MEMORY_CHUNK_BYTES = 128
# These numbers of inputs have a loop of their own, which keeps the addresses in registers: up to 1.25 times as fast in
# caches (Zen 5), for 20 ms more of compiling.
_UNROLLED = (2, 4, 8)


def chunk_width(dtype: DType) -> int:
    """The number of elements of ``dtype`` that are reduced at once."""
    return _CHUNK_BYTES // max(dtype.itemsize, 4)


class Loops:
    """Emits one kernel.

    ``arguments`` are the kernel's parameters: table, inputs, outputs, end, divisor. ``table`` is the address of an
    array of 64-bit words: the inputs' addresses, the outputs' addresses, and room for the results of checks (see
    ``kernels.reduction``). ``end`` is the size of one input in bytes.
    """

    def __init__(
        self,
        builder: ir.IRBuilder,
        op: Op,
        dtype: DType,
        wanted: Checks,
        arguments: Sequence[ir.Value],
    ) -> None:
        table, inputs, outputs, end, divisor = arguments
        self._builder, self._op, self._dtype = builder, op, dtype
        self._table, self._inputs, self._end, self._divisor = table, inputs, end, divisor
        self._outputs_end = builder.add(inputs, outputs)
        self._finite = result_checks.Finite(builder, dtype) if Checks.FINITE in wanted and dtype.is_floating else None
        width = chunk_width(dtype)
        self._sum = result_checks.Checksum(builder, width * dtype.itemsize // 8) if Checks.CHECKSUM in wanted else None
        self._known: list[ir.Value] = []  # the table's first addresses, inside a loop that has read them

    def emit(self) -> None:
        """Emit the whole kernel: large chunks, then single elements, then the checksum."""
        builder, size = self._builder, self._dtype.itemsize
        width = chunk_width(self._dtype)
        start, wide_end = _I64(0), builder.and_(self._end, _I64(-width * size))
        if size >= 4 and self._sum is None:
            is_large = builder.icmp_unsigned(">=", self._end, _I64(_FROM_MEMORY))
            wide_end = builder.select(is_large, _I64(0), wide_end)
            self._sweep(start, wide_end, width)
            start, wide_end = wide_end, builder.and_(self._end, _I64(-_MEMORY_CHUNK_BYTES))
            width = _MEMORY_CHUNK_BYTES // size
        self._sweep(start, wide_end, width)
        with cgutils.for_range_slice(builder, wide_end, self._end, _I64(size)) as (offset, _):
            self._fold(offset, 1, self._inputs)
        if self._sum is not None:
            self._set(builder.add(self._outputs_end, builder.add(self._inputs, _I64(1))), self._sum.value(self._end))

    def _sweep(self, start: ir.Value, end: ir.Value, width: int, counts: tuple[int, ...] = _UNROLLED) -> None:
        """Reduce the bytes between two offsets, ``width`` elements at once. ``counts``: numbers of inputs that have a
        loop of their own."""
        builder, step = self._builder, _I64(width * self._dtype.itemsize)
        if not counts:
            with cgutils.for_range_slice(builder, start, end, step) as (offset, _):
                self._fold(offset, width, self._inputs)
            return
        count = _I64(counts[0])
        with builder.if_else(builder.icmp_signed("==", self._inputs, count)) as (then, otherwise):
            with then:
                # Read once. LLVM would read them for each chunk: as far as it knows, an output may overlap the table.
                self._known = [builder.load(self._entry(_I64(i))) for i in range(counts[0] + 1)]
                with cgutils.for_range_slice(builder, start, end, step) as (offset, _):
                    self._fold(offset, width, count)
                self._known = []
            with otherwise:
                self._sweep(start, end, width, counts[1:])

    def _fold(self, offset: ir.Value, width: int, inputs: ir.Value) -> None:
        """Reduce the ``width`` elements that lie ``offset`` bytes into every input, in pieces."""
        builder, op, dtype = self._builder, self._op, self._dtype
        piece = vector.piece_width(dtype, width)
        starts = range(0, width * dtype.itemsize, piece * dtype.itemsize)

        def load(index: ir.Value) -> list[ir.Value]:
            start = self._address(index, offset)
            return [vector.load(builder, dtype, piece, builder.add(start, _I64(at))) for at in starts]

        def add(index: ir.Value) -> None:
            for total, value in zip(totals, load(index), strict=True):
                builder.store(vector.combine(builder, op, dtype, builder.load(total), value), total)

        with builder.goto_entry_block():  # LLVM keeps them in registers
            totals = [builder.alloca(vector.widened_type(dtype, piece)) for _ in starts]
            results = [builder.alloca(vector.stored_type(dtype, piece)) for _ in starts]

        if op is Op.BROADCAST:
            source = self._address(_I64(0), offset)
            for at, result in zip(starts, results, strict=True):
                stored = vector.load_stored(builder, dtype, piece, builder.add(source, _I64(at)))
                builder.store(stored, result)
        else:
            for total, value in zip(totals, load(_I64(0)), strict=True):
                builder.store(value, total)
            if isinstance(inputs, ir.Constant):
                for i in range(1, inputs.constant):
                    add(_I64(i))
            else:
                with cgutils.for_range_slice(builder, _I64(1), inputs, _I64(1)) as (index, _):
                    add(index)
            for total, result in zip(totals, results, strict=True):
                builder.store(vector.rounded(builder, dtype, builder.load(total)), result)
            with builder.if_then(builder.icmp_signed(">", self._divisor, _I64(1)), likely=False):
                for result in results:
                    builder.store(vector.divided(builder, dtype, builder.load(result), self._divisor), result)
        if self._finite is not None or self._sum is not None:
            whole = vector.joined(builder, [builder.load(result) for result in results])
            if self._finite is not None:
                self._look_for_poison(self._finite, whole, offset, width)
            if self._sum is not None:
                self._sum.add(whole)

        def write(index: ir.Value) -> None:
            start = self._address(index, offset)
            for at, result in zip(starts, results, strict=True):
                vector.store(builder, builder.add(start, _I64(at)), builder.load(result))

        write(inputs)
        second = builder.add(self._inputs, _I64(1))
        with cgutils.for_range_slice(builder, second, self._outputs_end, _I64(1)) as (index, _):
            write(index)

    def _look_for_poison(self, finite: result_checks.Finite, result: ir.Value, offset: ir.Value, width: int) -> None:
        """Where a result is NaN or infinite, find which inputs are too, before an output overwrites one of them."""
        builder = self._builder
        bad = finite.exceptions(result)
        with builder.goto_entry_block():
            unexplained = builder.alloca(bad.type)
        with builder.if_then(finite.any(bad), likely=False):
            builder.store(bad, unexplained)
            with cgutils.for_range_slice(builder, _I64(0), self._inputs, _I64(1)) as (index, _):
                stored = vector.load_stored(builder, self._dtype, width, self._address(index, offset))
                found = finite.exceptions(stored)
                builder.store(builder.and_(builder.load(unexplained), builder.not_(found)), unexplained)
                with builder.if_then(finite.any(found)):
                    self._set(builder.add(self._outputs_end, index), _I64(1))
            with builder.if_then(finite.any(builder.load(unexplained))):
                self._set(builder.add(self._outputs_end, self._inputs), _I64(1))

    def _entry(self, index: ir.Value) -> ir.Value:
        entry = self._builder.add(self._table, self._builder.mul(index, _I64(8)))
        return self._builder.inttoptr(entry, _I64.as_pointer())

    def _address(self, index: ir.Value, offset: ir.Value) -> ir.Value:
        is_known = isinstance(index, ir.Constant) and index.constant < len(self._known)
        place = self._known[index.constant] if is_known else self._builder.load(self._entry(index))
        return self._builder.add(place, offset)

    def _set(self, index: ir.Value, value: ir.Value) -> None:
        self._builder.store(value, self._entry(index))
