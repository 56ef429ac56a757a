"""Elements in memory and in codes, as instructions of a kernel that numba compiles.

Each function below is called in a kernel's loop with plain integers as addresses, and constants for kind and dtype. It
emits its instructions there, so that LLVM can make vectors of the loop. Importing this module loads numba, so it is
imported late. Any thread.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from byteps_py.tensor_codec import CodecKind
from byteps_py.tensors import DType

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32, _HALF = ir.FloatType(), ir.HalfType()


def _place(builder: ir.IRBuilder, kind: ir.Type, address: ir.Value, index: ir.Value) -> ir.Value:
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


def _int_intrinsic(result: Any, emit: Any, arguments: list[Any]) -> Any:
    def found(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        value = emit(builder, *args)
        return context.get_dummy_value() if value is None else value

    return result(*arguments), found


# ---- memory ----------------------------------------------------------------------------------------------------------


def _load(typingctx: Any, dtype: Any, address: Any, index: Any) -> Any:
    """Element ``index`` of a tensor at ``address``, as float32."""
    of = DType(dtype.literal_value)

    def emit(builder: ir.IRBuilder, _: ir.Value, address: ir.Value, index: ir.Value) -> ir.Value:
        if of is DType.FLOAT32:
            return builder.load(_place(builder, _F32, address, index), align=4)
        bits = builder.load(_place(builder, _I16, address, index), align=2)
        if of is DType.FLOAT16:
            return builder.fpext(builder.bitcast(bits, _HALF), _F32)
        return builder.bitcast(builder.shl(builder.zext(bits, _I32), _I32(16)), _F32)

    return _int_intrinsic(types.float32, emit, [dtype, types.int64, types.int64])


def _store(typingctx: Any, dtype: Any, address: Any, index: Any, value: Any) -> Any:
    """Round a float32 to an element of a tensor."""
    of = DType(dtype.literal_value)

    def emit(builder: ir.IRBuilder, _: ir.Value, address: ir.Value, index: ir.Value, value: ir.Value) -> None:
        if of is DType.FLOAT32:
            builder.store(value, _place(builder, _F32, address, index), align=4)
            return
        builder.store(_bits16(builder, of, value), _place(builder, _I16, address, index), align=2)

    return _int_intrinsic(types.void, emit, [dtype, types.int64, types.int64, types.float32])


def _bits16(builder: ir.IRBuilder, of: DType, value: ir.Value) -> ir.Value:
    if of is DType.FLOAT16:
        return builder.bitcast(builder.fptrunc(value, _HALF), _I16)
    bits = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
    even = builder.lshr(builder.add(bits, builder.add(odd, _I32(0x7FFF))), _I32(16))
    quiet = builder.or_(builder.lshr(bits, _I32(16)), _I32(0x40))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, quiet, even), _I16)


def _rounded(typingctx: Any, dtype: Any, value: Any) -> Any:
    """A float32, rounded to a dtype."""
    of = DType(dtype.literal_value)

    def emit(builder: ir.IRBuilder, _: ir.Value, value: ir.Value) -> ir.Value:
        if of is DType.FLOAT32:
            return value
        bits = _bits16(builder, of, value)
        if of is DType.FLOAT16:
            return builder.fpext(builder.bitcast(bits, _HALF), _F32)
        return builder.bitcast(builder.shl(builder.zext(bits, _I32), _I32(16)), _F32)

    return _int_intrinsic(types.float32, emit, [dtype, types.float32])


def _load_code(typingctx: Any, address: Any, index: Any) -> Any:
    """Byte ``index`` at ``address``."""

    def emit(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
        return builder.load(_place(builder, _I8, address, index))

    return _int_intrinsic(types.int8, emit, [types.int64, types.int64])


def _store_code(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    def emit(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, value: ir.Value) -> None:
        builder.store(value, _place(builder, _I8, address, index))

    return _int_intrinsic(types.void, emit, [types.int64, types.int64, types.int8])


def _load_position(typingctx: Any, address: Any, index: Any) -> Any:
    """The 16-bit number ``index`` at ``address``."""

    def emit(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
        return builder.zext(builder.load(_place(builder, _I16, address, index), align=2), _I64)

    return _int_intrinsic(types.int64, emit, [types.int64, types.int64])


def _store_position(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    def emit(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, value: ir.Value) -> None:
        builder.store(builder.trunc(value, _I16), _place(builder, _I16, address, index), align=2)

    return _int_intrinsic(types.void, emit, [types.int64, types.int64, types.int64])


def _load_word(typingctx: Any, address: Any, index: Any) -> Any:
    """Entry ``index`` of a table of 64-bit numbers."""

    def emit(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
        return builder.load(_place(builder, _I64, address, index), align=8)

    return _int_intrinsic(types.int64, emit, [types.int64, types.int64])


def _store_word(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    def emit(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, value: ir.Value) -> None:
        builder.store(value, _place(builder, _I64, address, index), align=8)

    return _int_intrinsic(types.void, emit, [types.int64, types.int64, types.int64])


# ---- codes -----------------------------------------------------------------------------------------------------------


def _magnitude(typingctx: Any, value: Any) -> Any:
    """The bits of a float32 without its sign: a number that orders absolute values, infinity and NaN last."""

    def emit(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
        return builder.and_(builder.bitcast(value, _I32), _I32(0x7FFFFFFF))

    return _int_intrinsic(types.int32, emit, [types.float32])


def _float_of(typingctx: Any, bits: Any) -> Any:
    def emit(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
        return builder.bitcast(bits, _F32)

    return _int_intrinsic(types.float32, emit, [types.int32])


def _f32(value: float) -> ir.Constant:
    return ir.Constant(_F32, value)


#: Of the 8-bit floats: bits of the mantissa, the least normal number's exponent.
_FLOAT8 = {CodecKind.FLOAT8_E4M3: (3, -6), CodecKind.FLOAT8_E5M2: (2, -14)}


def _quantized(typingctx: Any, kind: Any, value: Any) -> Any:
    """The code of a float32 within the range of ``kind``, to nearest, ties to even."""
    of = CodecKind(kind.literal_value)

    def emit(builder: ir.IRBuilder, _: ir.Value, value: ir.Value) -> ir.Value:
        if of is CodecKind.INT8:
            # Adding 1.5 · 2**23 leaves no room for a fraction: the sum's last bits are the rounded number.
            bits = builder.bitcast(builder.fadd(value, _f32(12582912.0)), _I32)
            return builder.trunc(bits, _I8)
        mantissa, least = _FLOAT8[of]
        drop = 23 - mantissa
        bits = builder.bitcast(value, _I32)
        size = builder.and_(bits, _I32(0x7FFFFFFF))
        odd = builder.and_(builder.lshr(size, _I32(drop)), _I32(1))
        up = builder.add(size, builder.add(odd, _I32((1 << drop - 1) - 1)))
        normal = builder.sub(builder.lshr(up, _I32(drop)), _I32((least + 126) << mantissa))
        # Below the least normal number steps are as long as just above it: the same trick as for INT8.
        magic = 2.0 ** (least - mantissa + 23)
        whole = builder.bitcast(builder.fadd(builder.bitcast(size, _F32), _f32(magic)), _I32)
        small = builder.and_(whole, _I32(0xFF))
        is_small = builder.icmp_unsigned("<", size, _I32((least + 127) << 23))
        sign = builder.and_(builder.lshr(bits, _I32(24)), _I32(0x80))
        return builder.trunc(builder.or_(sign, builder.select(is_small, small, normal)), _I8)

    return _int_intrinsic(types.int8, emit, [kind, types.float32])


def _dequantized(typingctx: Any, kind: Any, code: Any) -> Any:
    """The number that a code stands for."""
    of = CodecKind(kind.literal_value)

    def emit(builder: ir.IRBuilder, _: ir.Value, code: ir.Value) -> ir.Value:
        if of is CodecKind.INT8:
            return builder.sitofp(code, _F32)
        wide = builder.zext(code, _I16)
        if of is CodecKind.FLOAT8_E5M2:  # the upper half of a float16
            return builder.fpext(builder.bitcast(builder.shl(wide, _I16(8)), _HALF), _F32)
        sign = builder.shl(builder.and_(wide, _I16(0x80)), _I16(8))
        size = builder.shl(builder.and_(wide, _I16(0x7F)), _I16(7))
        half = builder.bitcast(builder.or_(sign, size), _HALF)
        return builder.fmul(builder.fpext(half, _F32), _f32(256.0))  # whose exponents begin 2**8 lower

    return _int_intrinsic(types.float32, emit, [kind, types.int8])


# ---- numbers that seem to be drawn -----------------------------------------------------------------------------------


def _xor_shift(builder: ir.IRBuilder, value: ir.Value, by: int) -> ir.Value:
    return builder.xor(value, builder.lshr(value, value.type(by)))


def _noise(typingctx: Any, index: Any, salt: Any) -> Any:
    """A number of 32 bits for element ``index`` of what has this salt: equal arguments, equal numbers."""

    def emit(builder: ir.IRBuilder, index: ir.Value, salt: ir.Value) -> ir.Value:
        low, high = builder.trunc(salt, _I32), builder.trunc(builder.lshr(salt, _I64(32)), _I32)
        x = builder.add(builder.mul(builder.trunc(index, _I32), _I32(0x9E3779B1)), low)
        x = builder.mul(builder.add(_xor_shift(builder, x, 16), high), _I32(0x7FEB352D))
        x = builder.mul(_xor_shift(builder, x, 15), _I32(0x846CA68B))
        return _xor_shift(builder, x, 16)

    return _int_intrinsic(types.int32, emit, [types.int64, types.int64])


def _mixed(typingctx: Any, value: Any) -> Any:
    """A number each bit of which depends on all bits of ``value`` (the steps of splitmix64)."""

    def emit(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
        x = builder.add(value, _I64(0x9E3779B97F4A7C15))
        x = builder.mul(_xor_shift(builder, x, 30), _I64(0xBF58476D1CE4E5B9))
        x = builder.mul(_xor_shift(builder, x, 27), _I64(0x94D049BB133111EB))
        return _xor_shift(builder, x, 31)

    return _int_intrinsic(types.int64, emit, [types.int64])


def _for_kernels(typing: Any) -> Any:
    return intrinsic(prefer_literal=True)(typing)


load, store, rounded = _for_kernels(_load), _for_kernels(_store), _for_kernels(_rounded)
load_code, store_code = _for_kernels(_load_code), _for_kernels(_store_code)
load_position, store_position = _for_kernels(_load_position), _for_kernels(_store_position)
load_word, store_word = _for_kernels(_load_word), _for_kernels(_store_word)
magnitude, float_of = _for_kernels(_magnitude), _for_kernels(_float_of)
quantized, dequantized = _for_kernels(_quantized), _for_kernels(_dequantized)
noise, mixed = _for_kernels(_noise), _for_kernels(_mixed)
