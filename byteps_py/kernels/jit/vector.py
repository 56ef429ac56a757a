"""Arithmetic on elements, as LLVM instructions on whole vectors: load and widen, combine, round, divide, store.

Owns how each dtype is widened to the type in which it is added, and rounded back. Must not know loops, contributions or
Python callers: these functions run while a kernel is compiled and add instructions to it. No state; any thread.

Why not plain loops and LLVM's vectoriser? Where an output is one of the inputs, the vectoriser's alias check takes the
scalar loop, and sums of any number of inputs would go through memory. Here a vector value lives in registers, and a
chunk is loaded before any of it is stored. There are no fast-math flags: all machines compute the same bits.

float16 and bfloat16 are vectors of bits, which are converted to float32 and back. Values are rounded once, to nearest,
ties to even; NaN stays NaN. All processors give the same bits for numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from llvmlite import binding, ir

from byteps_py.kernels.jit.llvm import call
from byteps_py.tensors import DType, Op

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


# In caches, sums of float16 in pieces of 16 elements are 1.3 to 1.6 times as fast on a Zen 5 as in pieces of 8 (32 is
# as fast as 16); on a Zen 4, 0.93 times (one piece of all elements takes 1.3 times as long there). bfloat16 is slower
# in pieces of any size.
_HALVES_AT_ONCE = 16
_STORED: dict[DType, ir.Type] = {
    DType.FLOAT32: ir.FloatType(),
    DType.FLOAT64: ir.DoubleType(),
    DType.FLOAT16: ir.IntType(16),  # bits, see py
    DType.BFLOAT16: ir.IntType(16),
    DType.INT8: ir.IntType(8),
    DType.INT16: ir.IntType(16),
    DType.INT32: ir.IntType(32),
    DType.INT64: ir.IntType(64),
    DType.UINT8: ir.IntType(8),
}


def stored_type(dtype: DType, width: int) -> ir.VectorType:
    """The type of ``width`` elements as they lie in memory."""
    return ir.VectorType(_STORED[dtype], width)


def widened_type(dtype: DType, width: int) -> ir.VectorType:
    """The type of ``width`` elements while they are combined."""
    halved = dtype in (DType.FLOAT16, DType.BFLOAT16)
    return ir.VectorType(ir.FloatType(), width) if halved else stored_type(dtype, width)


def piece_width(dtype: DType, width: int) -> int:
    """How many of ``width`` elements should form one vector value."""
    return min(width, _HALVES_AT_ONCE) if dtype is DType.FLOAT16 else width


def joined(builder: ir.IRBuilder, pieces: list[ir.Value]) -> ir.Value:
    """One vector of all ``pieces``, whose number is a power of two."""
    while len(pieces) > 1:
        order = ir.Constant(ir.VectorType(_BITS, 2 * pieces[0].type.count), list(range(2 * pieces[0].type.count)))
        pieces = [builder.shuffle_vector(a, b, order) for a, b in zip(pieces[::2], pieces[1::2], strict=True)]
    return pieces[0]


def load(builder: ir.IRBuilder, dtype: DType, width: int, address: ir.Value) -> ir.Value:
    """Load ``width`` elements from an address of any alignment, and widen them."""
    return _widen(builder, dtype, load_stored(builder, dtype, width, address))


def load_stored(builder: ir.IRBuilder, dtype: DType, width: int, address: ir.Value) -> ir.Value:
    """Load ``width`` elements from an address of any alignment, as they lie in memory."""
    return builder.load(builder.inttoptr(address, stored_type(dtype, width).as_pointer()), align=1)


def store(builder: ir.IRBuilder, address: ir.Value, stored: ir.Value) -> None:
    """Store elements, in the form they have in memory, at an address of any alignment."""
    builder.store(stored, builder.inttoptr(address, stored.type.as_pointer()), align=1)


def combine(builder: ir.IRBuilder, op: Op, dtype: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    """``a op b``; operands and result are widened."""
    return _COMBINE[op](builder, dtype, a, b)


def rounded(builder: ir.IRBuilder, dtype: DType, wide: ir.Value) -> ir.Value:
    """Widened elements rounded, to nearest even, to the type in memory."""
    if dtype is DType.FLOAT16:
        return round_float16(builder, wide)
    if dtype is DType.BFLOAT16:
        return round_bfloat16(builder, wide)
    return wide


def divided(builder: ir.IRBuilder, dtype: DType, stored: ir.Value, divisor: ir.Value) -> ir.Value:
    """Elements in the form they have in memory, divided by an integer above 1: true division of floats, floor division
    of integers."""
    if not dtype.is_floating:
        return _floor_divide(builder, dtype, stored, divisor)
    wide = _widen(builder, dtype, stored)
    by = splat(builder, builder.sitofp(divisor, wide.type.element), wide.type.count)
    return rounded(builder, dtype, builder.fdiv(wide, by))


def _widen(builder: ir.IRBuilder, dtype: DType, stored: ir.Value) -> ir.Value:
    if dtype is DType.FLOAT16:
        return widen_float16(builder, stored)
    if dtype is DType.BFLOAT16:
        return widen_bfloat16(builder, stored)
    return stored


def _floor_divide(builder: ir.IRBuilder, dtype: DType, value: ir.Value, divisor: ir.Value) -> ir.Value:
    count = value.type.count
    if dtype is DType.INT64:
        return _floor_divide_long(builder, value, divisor)
    # Processors divide vectors of floats, not of integers. The result is exact: a quotient that is not an integer is at
    # least 1/divisor away from one, and the rounding error is below that, with 24 bits for integers of 8 and 16 bits,
    # and 53 for those of 32.
    unsigned = dtype is DType.UINT8
    real = ir.DoubleType() if dtype is DType.INT32 else ir.FloatType()
    reals = ir.VectorType(real, count)
    dividend = builder.uitofp(value, reals) if unsigned else builder.sitofp(value, reals)
    floor = call(builder, "floor", builder.fdiv(dividend, splat(builder, builder.sitofp(divisor, real), count)))
    return builder.fptoui(floor, value.type) if unsigned else builder.fptosi(floor, value.type)


def _floor_divide_long(builder: ir.IRBuilder, value: ir.Value, divisor: ir.Value) -> ir.Value:
    """In two steps, an estimate and the remainder: 3.9 times as fast as integer division on a Zen 4. Exact for divisors
    below 2**40: the estimate is off by less than 2**11 / divisor + 1, so the remainder is exact as a float."""
    reals = ir.VectorType(ir.DoubleType(), value.type.count)
    by = splat(builder, divisor, value.type.count)
    real_by = builder.sitofp(by, reals)

    def floor(dividend: ir.Value) -> ir.Value:
        quotient = call(builder, "floor", builder.fdiv(builder.sitofp(dividend, reals), real_by))
        return builder.fptosi(quotient, value.type)

    estimate = floor(value)
    return builder.add(estimate, floor(builder.sub(value, builder.mul(estimate, by))))


def _sum(builder: ir.IRBuilder, dtype: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.fadd(a, b) if dtype.is_floating else builder.add(a, b)


def _product(builder: ir.IRBuilder, dtype: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.fmul(a, b) if dtype.is_floating else builder.mul(a, b)


def _minimum(builder: ir.IRBuilder, dtype: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    # IEEE 754-2019 minimum: NaN if either operand is, and -0.0 below 0.0. The order of contributions does not matter.
    name = "minimum" if dtype.is_floating else "umin" if dtype is DType.UINT8 else "smin"
    return call(builder, name, a, b)


def _maximum(builder: ir.IRBuilder, dtype: DType, a: ir.Value, b: ir.Value) -> ir.Value:
    name = "maximum" if dtype.is_floating else "umax" if dtype is DType.UINT8 else "smax"
    return call(builder, name, a, b)


_COMBINE: dict[Op, Callable[[ir.IRBuilder, DType, ir.Value, ir.Value], ir.Value]] = {
    Op.SUM: _sum,
    Op.PRODUCT: _product,
    Op.MIN: _minimum,
    Op.MAX: _maximum,
}


def splat(builder: ir.IRBuilder, scalar: ir.Value, width: int) -> ir.Value:
    """A vector with ``scalar`` in every element."""
    undefined = ir.Constant(ir.VectorType(scalar.type, width), ir.Undefined)
    first = builder.insert_element(undefined, scalar, _BITS(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_BITS, width), [0] * width))
