"""float16 and bfloat16 to float32 and back, as LLVM instructions on vectors of bits. Pure; any thread.

Rounding is to nearest, ties to even, once; NaN stays NaN. Every processor gives the same bits for numbers.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core.registry import cpu_target

_BITS = ir.IntType(32)


def widen_bfloat16(builder: ir.IRBuilder, stored: ir.Value) -> ir.Value:
    """i16 to float: a bfloat16 is the upper half of a float32."""
    bits = builder.zext(stored, _like(stored, _BITS))
    return builder.bitcast(builder.shl(bits, _all(bits, 16)), _like(stored, ir.FloatType()))


def round_bfloat16(builder: ir.IRBuilder, wide: ir.Value) -> ir.Value:
    bits = builder.bitcast(wide, _like(wide, _BITS))
    high = builder.lshr(bits, _all(bits, 16))
    # Half a unit, less a bit where the kept part is even. A carry runs up the exponent, at the end into infinity.
    bias = builder.add(builder.and_(high, _all(bits, 1)), _all(bits, 0x7FFF))
    nearest = builder.lshr(builder.add(bits, bias), _all(bits, 16))
    # The same addition would make an infinity, or a zero, of some NaNs.
    nan = builder.fcmp_unordered("uno", wide, wide)
    return builder.trunc(builder.select(nan, _all(bits, 0x7FC0), nearest), _like(wide, ir.IntType(16)))


def widen_float16(builder: ir.IRBuilder, stored: ir.Value) -> ir.Value:
    """i16 to float."""
    if _has_float16():
        return builder.fpext(builder.bitcast(stored, _like(stored, ir.HalfType())), _like(stored, ir.FloatType()))
    floats = _like(stored, ir.FloatType())
    bits = builder.zext(stored, _like(stored, _BITS))
    magnitude = builder.and_(bits, _all(bits, 0x7FFF))
    # Moved into place its exponent is 112 too small; the product also normalises float16's subnormal numbers.
    moved = builder.shl(magnitude, _all(bits, 13))
    scaled = builder.fmul(builder.bitcast(moved, floats), ir.Constant(floats, [2.0**112] * floats.count))
    special = builder.icmp_unsigned(">=", magnitude, _all(bits, 0x7C00))
    number = builder.select(special, builder.or_(moved, _all(bits, 0x7F800000)), builder.bitcast(scaled, bits.type))
    sign = builder.shl(builder.and_(bits, _all(bits, 0x8000)), _all(bits, 16))
    return builder.bitcast(builder.or_(number, sign), floats)


def round_float16(builder: ir.IRBuilder, wide: ir.Value) -> ir.Value:
    stored = _like(wide, ir.IntType(16))
    if _has_float16():
        return builder.bitcast(builder.fptrunc(wide, _like(wide, ir.HalfType())), stored)
    bits = builder.bitcast(wide, _like(wide, _BITS))
    magnitude = builder.and_(bits, _all(bits, 0x7FFFFFFF))
    # Normal numbers: the exponent less 112, and the same bias as above; 65520 and more carry into infinity.
    odd = builder.and_(builder.lshr(bits, _all(bits, 13)), _all(bits, 1))
    biased = builder.add(builder.add(magnitude, odd), _all(bits, ((-112 << 23) + 0xFFF) & 0xFFFFFFFF))
    normal = builder.lshr(biased, _all(bits, 13))
    # Subnormal ones: a float32 has 2**-24, float16's least, as its last digit when 0.5 is added to it.
    half = 126 << 23
    moved = builder.fadd(builder.bitcast(magnitude, wide.type), ir.Constant(wide.type, [0.5] * wide.type.count))
    subnormal = builder.sub(builder.bitcast(moved, bits.type), _all(bits, half))
    number = builder.select(builder.icmp_unsigned("<", magnitude, _all(bits, 113 << 23)), subnormal, normal)
    nan = builder.icmp_unsigned(">", magnitude, _all(bits, 0x7F800000))
    special = builder.select(nan, _all(bits, 0x7E00), _all(bits, 0x7C00))
    number = builder.select(builder.icmp_unsigned(">=", magnitude, _all(bits, 143 << 23)), special, number)
    sign = builder.and_(builder.lshr(bits, _all(bits, 16)), _all(bits, 0x8000))
    return builder.trunc(builder.or_(number, sign), stored)


def _has_float16() -> bool:
    """Whether the processor converts float16. LLVM aborts the process where it would need a library for it.

    x86 has done so since 2012, but virtual machines may hide it.
    """
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return not triple.startswith(("x86_64", "i686")) or "+f16c" in features.split(",")


def _like(vector: ir.Value, element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, vector.type.count)


def _all(vector: ir.Value, value: int) -> ir.Constant:
    return ir.Constant(vector.type, [value] * vector.type.count)
