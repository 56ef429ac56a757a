"""Arithmetic on elements, as LLVM instructions on whole vectors: load and widen, combine, round, divide, store.

Owns how each dtype is widened to the type in which it is added, and rounded back. Must not know loops, contributions or
Python callers: these functions run while a kernel is compiled and add instructions to it. No state; any thread.

Why not plain loops and LLVM's vectoriser? Where an output is one of the inputs, the vectoriser's alias check takes the
scalar loop, and sums of any number of inputs would go through memory. Here a vector value lives in registers, and a
chunk is loaded before any of it is stored. There are no fast-math flags: all machines compute the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from byteps_py.kernels.jit import half_precision
from byteps_py.kernels.jit.llvm import call
from byteps_py.tensors import DType, Op

# In caches, sums of float16 in pieces of 16 elements are 1.3 to 1.6 times as fast on a Zen 5 as in pieces of 8 (32 is
# as fast as 16); on a Zen 4, 0.93 times (one piece of all elements takes 1.3 times as long there). bfloat16 is slower
# in pieces of any size.
_HALVES_AT_ONCE = 16
_INT = ir.IntType(32)
_STORED: dict[DType, ir.Type] = {
    DType.FLOAT32: ir.FloatType(),
    DType.FLOAT64: ir.DoubleType(),
    DType.FLOAT16: ir.IntType(16),  # bits, see half_precision.py
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
        order = ir.Constant(ir.VectorType(_INT, 2 * pieces[0].type.count), list(range(2 * pieces[0].type.count)))
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
        return half_precision.round_float16(builder, wide)
    if dtype is DType.BFLOAT16:
        return half_precision.round_bfloat16(builder, wide)
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
        return half_precision.widen_float16(builder, stored)
    if dtype is DType.BFLOAT16:
        return half_precision.widen_bfloat16(builder, stored)
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
    first = builder.insert_element(undefined, scalar, _INT(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_INT, width), [0] * width))
