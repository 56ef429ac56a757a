"""Checks of a kernel's result while it lies in registers, as LLVM instructions. No state; any thread.

``Checks.FINITE``: is the result NaN or infinite anywhere, and which inputs are there? ``Checks.CHECKSUM``: a checksum
of 64 bits over the result's bytes.
"""

from __future__ import annotations

from llvmlite import ir

from byteps_py.tensors import DType

_I64 = ir.IntType(64)
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
