"""Conversion of float16 and bfloat16 to float32 and back, as LLVM instructions on vectors of bits. Pure; any thread.

Values are rounded once, to nearest, ties to even; NaN stays NaN. All processors give the same bits for numbers.
"""

from __future__ import annotations

import sys

from llvmlite import binding, ir

from byteps_py.kernels.jit.llvm import call

_BITS = ir.IntType(32)


def widen_bfloat16(builder: ir.IRBuilder, stored: ir.Value) -> ir.Value:
    """i16 to float: a bfloat16 is the upper half of a float32.

    A vector comes out in another order, first the elements at even places, then those at odd ones: each then takes one
    instruction. ``round_bfloat16`` restores the order.
    """
    if stored.type.count == 1:
        bits = builder.zext(stored, _like(stored, _BITS))
        return builder.bitcast(builder.shl(bits, filled(bits, 16)), _like(stored, ir.FloatType()))
    pairs = builder.bitcast(stored, ir.VectorType(_BITS, stored.type.count // 2))
    even, odd = builder.shl(pairs, filled(pairs, 16)), builder.and_(pairs, filled(pairs, 0xFFFF0000))
    return builder.bitcast(_take(builder, even, odd, 0, stored.type.count), _like(stored, ir.FloatType()))


def round_bfloat16(builder: ir.IRBuilder, wide: ir.Value) -> ir.Value:
    """float to i16. The lower half of a NaN must be zero, as it is after any operation on bfloat16 values."""
    bits = builder.bitcast(wide, _like(wide, _BITS))
    if wide.type.count == 1:
        kept = builder.trunc(builder.lshr(bits, filled(bits, 16)), _like(wide, ir.IntType(16)))
        rest = builder.trunc(bits, _like(wide, ir.IntType(16)))
    else:
        half = wide.type.count // 2
        even, odd = _take(builder, bits, bits, 0, half), _take(builder, bits, bits, half, half)
        low, high = filled(even, 0xFFFF), filled(even, 0xFFFF0000)
        kept = builder.or_(builder.lshr(even, filled(even, 16)), builder.and_(odd, high))
        rest = builder.or_(builder.and_(even, low), builder.shl(odd, filled(odd, 16)))
        kept, rest = (builder.bitcast(each, _like(wide, ir.IntType(16))) for each in (kept, rest))
    # Round up if the rest is above a half, or is a half and the kept part odd. The carry may reach the exponent, and
    # so make the value infinite.
    rest = builder.or_(rest, builder.and_(kept, filled(kept, 1)))
    above = call(builder, "usub.sat", rest, filled(rest, 0x8000))
    return builder.add(kept, call(builder, "umin", above, filled(rest, 1)))


def widen_float16(builder: ir.IRBuilder, stored: ir.Value) -> ir.Value:
    """i16 to float."""
    if _has_float16():
        return builder.fpext(builder.bitcast(stored, _like(stored, ir.HalfType())), _like(stored, ir.FloatType()))
    floats = _like(stored, ir.FloatType())
    bits = builder.zext(stored, _like(stored, _BITS))
    magnitude = builder.and_(bits, filled(bits, 0x7FFF))
    # After the shift the exponent is 112 too small; the product also normalises float16's subnormal numbers.
    moved = builder.shl(magnitude, filled(bits, 13))
    scaled = builder.fmul(builder.bitcast(moved, floats), ir.Constant(floats, [2.0**112] * floats.count))
    special = builder.icmp_unsigned(">=", magnitude, filled(bits, 0x7C00))
    number = builder.select(special, builder.or_(moved, filled(bits, 0x7F800000)), builder.bitcast(scaled, bits.type))
    sign = builder.shl(builder.and_(bits, filled(bits, 0x8000)), filled(bits, 16))
    return builder.bitcast(builder.or_(number, sign), floats)


def round_float16(builder: ir.IRBuilder, wide: ir.Value) -> ir.Value:
    """float to i16."""
    stored = _like(wide, ir.IntType(16))
    if _has_float16():
        return builder.bitcast(builder.fptrunc(wide, _like(wide, ir.HalfType())), stored)
    bits = builder.bitcast(wide, _like(wide, _BITS))
    magnitude = builder.and_(bits, filled(bits, 0x7FFFFFFF))
    # Normal numbers: the exponent less 112, and the same bias as above; 65520 and more carry into infinity.
    odd = builder.and_(builder.lshr(bits, filled(bits, 13)), filled(bits, 1))
    biased = builder.add(builder.add(magnitude, odd), filled(bits, ((-112 << 23) + 0xFFF) & 0xFFFFFFFF))
    normal = builder.lshr(biased, filled(bits, 13))
    # Subnormal numbers: 2**-24, the smallest float16, is the last binary digit of a float32 of 0.5.
    half = 126 << 23
    moved = builder.fadd(builder.bitcast(magnitude, wide.type), ir.Constant(wide.type, [0.5] * wide.type.count))
    subnormal = builder.sub(builder.bitcast(moved, bits.type), filled(bits, half))
    number = builder.select(builder.icmp_unsigned("<", magnitude, filled(bits, 113 << 23)), subnormal, normal)
    nan = builder.icmp_unsigned(">", magnitude, filled(bits, 0x7F800000))
    special = builder.select(nan, filled(bits, 0x7E00), filled(bits, 0x7C00))
    number = builder.select(builder.icmp_unsigned(">=", magnitude, filled(bits, 143 << 23)), special, number)
    sign = builder.and_(builder.lshr(bits, filled(bits, 16)), filled(bits, 0x8000))
    return builder.trunc(builder.or_(number, sign), stored)


def _has_float16() -> bool:
    """True if the processor converts float16. Where it does not, LLVM would call a library, and abort without one.

    x86 processors have had these instructions since 2012, but a virtual machine may hide them, and users may tell numba
    not to use them. A process that has not loaded numba compiles with LLVM alone, so LLVM's answer counts there.
    """
    if not binding.get_process_triple().startswith(("x86_64", "i686")):
        return True
    registry = sys.modules.get("numba.core.registry")
    if registry is None:
        return bool(binding.get_host_cpu_features().get("f16c", False))
    _, _, features = registry.cpu_target.target_context.codegen().magic_tuple()
    return "+f16c" in features.split(",")


def _take(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, start: int, count: int) -> ir.Value:
    """``count`` elements of ``a`` followed by ``b``, from element ``start`` on."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_BITS, count), list(range(start, start + count))))


def _like(vector: ir.Value, element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, vector.type.count)


def filled(vector: ir.Value, value: int) -> ir.Constant:
    """A constant of the type of ``vector`` with ``value`` in every element."""
    return ir.Constant(vector.type, [value] * vector.type.count)
