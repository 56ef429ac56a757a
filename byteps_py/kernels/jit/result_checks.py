"""Checks of a kernel's result while it lies in registers, as LLVM instructions. No state; any thread.

``Checks.FINITE``: is the result NaN or infinite anywhere, and which inputs are there? ``Checks.CHECKSUM``: a checksum
of 64 bits over the result's bytes.

``compile_checksums`` compiles a function that computes this checksum of many pieces of memory. A change within one word
always changes it. The import loads LLVM: import it late.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from byteps_py.kernels.jit import llvm
from byteps_py.tensors import DType

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_WORDS = {2: ir.IntType(16), 4: ir.IntType(32), 8: ir.IntType(64)}
# A value with all bits of its exponent set is NaN or infinite.
_EXPONENT = {DType.FLOAT32: 0x7F800000, DType.FLOAT64: 0x7FF << 52, DType.FLOAT16: 0x7C00, DType.BFLOAT16: 0x7F80}

#: The golden ratio's bits. Odd, so that multiplying by it modulo 2**64 loses no information.
MULTIPLIER = 0x9E3779B97F4A7C15
#: Half a word. The shift brings upper bits down; multiplication alone only moves bits up.
SHIFT = 32


class Finite:
    """Emits the check ``Checks.FINITE`` for stored elements of one dtype."""

    def __init__(self, builder: ir.IRBuilder, dtype: DType) -> None:
        self._builder = builder
        self._word, self._exponent = _WORDS[dtype.itemsize], _EXPONENT[dtype]

    def exceptions(self, stored: ir.Value) -> ir.Value:
        """One bit per element: set if it is NaN or infinite."""
        words = ir.VectorType(self._word, stored.type.count)
        exponent = ir.Constant(words, [self._exponent] * words.count)
        return self._builder.icmp_unsigned(
            "==", self._builder.and_(self._builder.bitcast(stored, words), exponent), exponent
        )

    def any(self, bits: ir.Value) -> ir.Value:
        """True if any bit is set."""
        return self._builder.icmp_unsigned(
            "!=", self._builder.bitcast(bits, ir.IntType(bits.type.count)), ir.IntType(bits.type.count)(0)
        )


class Checksum:
    """Emits the check ``Checks.CHECKSUM``.

    Each lane takes its word of every chunk: ``lane = ((lane ^ lane >> SHIFT) + word) · MULTIPLIER``, modulo 2**64. This
    step loses no information of the lane or of the word. So a change within one word, such as a flipped bit, always
    changes the checksum. Elements after the last whole chunk go through one more lane, one by one. At the end all lanes
    and the length go through another.
    """

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self._builder = builder
        self._lanes = ir.VectorType(_I64, lanes)
        with builder.goto_entry_block():
            self._wide, self._narrow = builder.alloca(self._lanes), builder.alloca(_I64)
            builder.store(ir.Constant(self._lanes, [0] * lanes), self._wide)
            builder.store(_I64(0), self._narrow)

    def add(self, stored: ir.Value) -> None:
        """Take a chunk, or one element."""
        builder = self._builder
        if stored.type.count > 1:
            words = builder.bitcast(stored, self._lanes)
            builder.store(self._step(builder.load(self._wide), words), self._wide)
        else:
            bits = builder.bitcast(stored, ir.IntType(_bits(stored.type.element)))
            builder.store(self._step(builder.load(self._narrow), builder.zext(bits, _I64)), self._narrow)

    def value(self, nbytes: ir.Value) -> ir.Value:
        """The checksum of all that was added, ``nbytes`` in total."""
        builder = self._builder
        total = self._step(nbytes, builder.load(self._narrow))
        lanes = builder.load(self._wide)
        for i in range(self._lanes.count):
            total = self._step(total, builder.extract_element(lanes, ir.IntType(32)(i)))
        return builder.xor(total, builder.lshr(total, _I64(SHIFT)))

    def _step(self, lane: ir.Value, word: ir.Value) -> ir.Value:
        builder, kind = self._builder, lane.type
        is_vector = isinstance(kind, ir.VectorType)

        def constant(value: int) -> ir.Constant:
            return ir.Constant(kind, [value] * kind.count if is_vector else value)

        mixed = builder.xor(lane, builder.lshr(lane, constant(SHIFT)))
        return builder.mul(builder.add(mixed, word), constant(MULTIPLIER))


def _bits(element: ir.Type) -> int:
    if isinstance(element, ir.IntType):
        return int(element.width)
    return 64 if isinstance(element, ir.DoubleType) else 32


_LANES = ir.VectorType(_I64, 32)  # a product has a long latency: many at a time
_CHUNK = 8 * _LANES.count


def compile_checksums() -> Callable[[int, int, int, int], None]:
    """The function. Arguments: address of the memory, address of a table with offset and length of each piece, number
    of pieces, address of the checksums."""
    function = ir.Function(llvm.new_module("byteps_checksums"), ir.FunctionType(ir.VoidType(), [_I64] * 4), "checksums")
    base, table, count, found = function.args
    entry, pieces, body, after = (function.append_basic_block() for _ in range(4))
    builder = ir.IRBuilder(entry)
    builder.branch(pieces)
    builder.position_at_end(pieces)
    index = builder.phi(_I64)
    index.add_incoming(_I64(0), entry)
    builder.cbranch(builder.icmp_unsigned("<", index, count), body, after)
    builder.position_at_end(body)
    row = builder.add(table, builder.shl(index, _I64(4)))
    start = builder.add(base, _load(builder, row, _I64))
    nbytes = _load(builder, builder.add(row, _I64(8)), _I64)
    end = builder.add(start, nbytes)
    middle = builder.add(start, builder.and_(nbytes, _I64(-_CHUNK)))
    lanes = _sweep(builder, start, middle, _LANES, ir.Constant(_LANES, [0] * _LANES.count))
    words = builder.add(middle, builder.and_(builder.sub(end, middle), _I64(-8)))
    total = _sweep(builder, middle, words, _I64, _step(builder, _I64(0), nbytes))
    total = _sweep(builder, words, end, _I8, total)
    for lane in range(_LANES.count):
        total = _step(builder, total, builder.extract_element(lanes, ir.IntType(32)(lane)))
    total = builder.xor(total, builder.lshr(total, _I64(SHIFT)))
    place = builder.add(found, builder.shl(index, _I64(3)))
    builder.store(total, builder.inttoptr(place, _I64.as_pointer()), align=8)
    index.add_incoming(builder.add(index, _I64(1)), builder.block)
    builder.branch(pieces)
    builder.position_at_end(after)
    builder.ret_void()
    return llvm.compile_function(function)


def _sweep(builder: ir.IRBuilder, start: ir.Value, end: ir.Value, kind: ir.Type, first: ir.Value) -> ir.Value:
    """The checksum ``first``, extended by every value of ``kind`` between two addresses."""
    before, head, loop, after = builder.block, *(builder.function.append_basic_block() for _ in range(3))
    width = _CHUNK if isinstance(kind, ir.VectorType) else kind.width // 8
    builder.branch(head)
    builder.position_at_end(head)
    address, state = builder.phi(_I64), builder.phi(first.type)
    address.add_incoming(start, before)
    state.add_incoming(first, before)
    builder.cbranch(builder.icmp_unsigned("<", address, end), loop, after)
    builder.position_at_end(loop)
    value = _load(builder, address, kind)
    if kind is _I8:
        value = builder.zext(value, _I64)
    state.add_incoming(_step(builder, state, value), loop)
    address.add_incoming(builder.add(address, _I64(width)), loop)
    builder.branch(head)
    builder.position_at_end(after)
    return state


def _load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1, typ=kind)


def _step(builder: ir.IRBuilder, lane: ir.Value, word: ir.Value) -> ir.Value:
    kind = lane.type

    def constant(value: int) -> ir.Constant:
        return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)

    mixed = builder.xor(lane, builder.lshr(lane, constant(SHIFT)))
    return builder.mul(builder.add(mixed, word), constant(MULTIPLIER))
