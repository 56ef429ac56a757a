"""The kernels of ditherings: magnitudes are rounded up or down by chance, so that on average nothing is lost.

Linear: to multiples of 1/levels of the block's scale. Natural: to the scale, its half, its quarter …, ``levels`` of
them, or to 0. The scale is the largest magnitude or the Euclidean norm of the block. A block whose largest magnitude is
below 2**-100 becomes zeros; one with NaN, infinity or an infinite norm gets the scale NaN, so that all of it decodes to
NaN. Importing this module loads numba, so it is imported late. Any thread. Tables are those of block_loops.py.

A code is a signed number of 8, 4 or 2 bits; with 4, byte j has the elements j and j + 128, and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from byteps_py.codecs.block_loops import (
    ADDRESSES,
    ENTRIES,
    ERROR,
    F32,
    INFINITE,
    LANES,
    LEAST,
    NAN,
    blame_contributions,
    blame_inputs,
    deliver,
    for_kernels,
    keep_moments,
    largest_magnitude,
    salt_of,
    sum_inputs,
    sum_of_lanes,
)
from byteps_py.codecs.elements import (
    float_of,
    load,
    load_code,
    load_word,
    magnitude,
    noise,
    store,
    store_code,
)
from byteps_py.tensor_codec import SCALED_BLOCK, CodecKind
from byteps_py.tensors import DType

_BLOCK = SCALED_BLOCK
_NATURAL = (CodecKind.DITHERING_NATURAL, CodecKind.DITHERING_NATURAL_L2)
_L2 = (CodecKind.DITHERING_LINEAR_L2, CodecKind.DITHERING_NATURAL_L2)
_FRACTION = 0x7FFFFF


@for_kernels
def _bits(levels: int) -> int:
    return 2 if levels < 2 else 4 if levels < 8 else 8


@for_kernels
def _norm(values: Any, is_l2: bool, lanes: Any) -> Any:
    """The block's scale: 0 if it becomes zeros, NaN if it is not finite."""
    largest = largest_magnitude(values, _BLOCK)
    if largest < LEAST:
        return np.float32(0.0)
    if largest >= INFINITE:
        return float_of(np.int32(NAN))
    if not is_l2:
        return float_of(largest)
    inverse = np.float32(1.0) / float_of(largest)
    for j in range(LANES):
        lanes[j] = 0.0
    for row in range(0, _BLOCK, LANES):
        for j in range(LANES):
            part = values[row + j] * inverse
            lanes[j] += part * part
    norm = float_of(largest) * np.sqrt(sum_of_lanes(lanes))
    return norm if magnitude(norm) < INFINITE else float_of(np.int32(NAN))


@for_kernels
def _quantize_linear(values: Any, scale: Any, levels: int, salt: int, codes: Any) -> None:
    inverse, most = np.float32(1.0) / (scale / np.float32(levels)), np.int32(levels)
    for i in range(_BLOCK):
        # In the middle of 2**16 steps: a whole number stays what it is, and nothing is rounded but what is meant to be.
        chance = (np.float32(noise(i, salt) >> 16 & 0xFFFF) + np.float32(0.5)) * np.float32(2.0**-16)
        level = min(np.int32(abs(values[i]) * inverse + chance), most)
        codes[i] = -level if values[i] < 0 else level


@for_kernels
def _quantize_natural(values: Any, scale: Any, levels: int, salt: int, codes: Any) -> None:
    inverse, most = np.float32(1.0) / scale, np.int32(levels)
    least = np.int32((128 - levels) << 23)  # the bits of the lowest level
    up = float_of(np.int32((levels + 126) << 23))  # … and what makes 1 of it
    for i in range(_BLOCK):
        part = abs(values[i]) * inverse
        chance = np.int32(noise(i, salt) & _FRACTION)
        # Between two powers of 2, the fraction of a number says how far it is from the lower one.
        level = min(np.int32((magnitude(part) + chance) >> 23) - np.int32(127) + most, most)
        if magnitude(part) < least:
            level = np.int32(np.float32(chance) * np.float32(2.0**-23) < part * up)
        codes[i] = -level if values[i] < 0 else level


@for_kernels
def _pack(codes: Any, bits: int, item: int) -> None:
    if bits == 8:
        for j in range(_BLOCK):
            store_code(item, j, codes[j])
    elif bits == 4:
        half = _BLOCK // 2
        for j in range(half):
            store_code(item, j, np.int8(codes[j] & 15 | codes[j + half] << 4))
    else:
        part = _BLOCK // 4
        for j in range(part):
            low = codes[j] & 3 | (codes[j + part] & 3) << 2
            store_code(item, j, np.int8(low | (codes[j + 2 * part] & 3) << 4 | codes[j + 3 * part] << 6))


@for_kernels
def _unpack(item: int, bits: int, codes: Any) -> None:
    if bits == 8:
        for j in range(_BLOCK):
            codes[j] = load_code(item, j)
    elif bits == 4:
        half = _BLOCK // 2
        for j in range(half):
            codes[j] = np.int8(load_code(item, j) << 4) >> 4
            codes[j + half] = load_code(item, j) >> 4
    else:
        part = _BLOCK // 4
        for q in range(4):
            for j in range(part):
                codes[j + q * part] = np.int8(load_code(item, j) << (6 - 2 * q)) >> 6


@for_kernels
def _dequantize_linear(codes: Any, scale: Any, levels: int, values: Any) -> None:
    step = scale / np.float32(levels)
    for i in range(_BLOCK):
        values[i] = np.float32(codes[i]) * step


@for_kernels
def _dequantize_natural(codes: Any, scale: Any, levels: int, values: Any) -> None:
    below = np.int32(127 - levels)
    for i in range(_BLOCK):
        level = abs(np.int32(codes[i]))
        part = float_of(np.int32((level + below) << 23)) * scale
        part = part if level else np.float32(0.0) * scale
        values[i] = -part if codes[i] < 0 else part


@for_kernels
def _code(is_natural: bool, values: Any, scale: Any, levels: int, salt: int, codes: Any, item: int) -> None:
    store(F32, item, 0, scale)
    if not LEAST <= magnitude(scale) < INFINITE:
        for i in range(_BLOCK):
            codes[i] = 0
    elif is_natural:
        _quantize_natural(values, scale, levels, salt, codes)
    else:
        _quantize_linear(values, scale, levels, salt, codes)
    _pack(codes, _bits(levels), item + 4)


@for_kernels
def _read(is_natural: bool, item: int, levels: int, codes: Any, values: Any) -> None:
    _unpack(item + 4, _bits(levels), codes)
    if is_natural:
        _dequantize_natural(codes, load(F32, item, 0), levels, values)
    else:
        _dequantize_linear(codes, load(F32, item, 0), levels, values)


def encode(kind: CodecKind, dtype: DType) -> Callable[..., Any]:
    """(table, inputs, elements): sum inputs, momentum and error, and code the sum; the error becomes what the code
    lacks, but keeps its values, like the momentum, in a block with NaN or infinity."""
    is_natural, is_l2, of = kind in _NATURAL, kind in _L2, int(dtype)

    def kernel(table: int, inputs: int, count: int) -> None:
        values, moments = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
        sent, codes, lanes = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.int8), np.empty(LANES, np.float32)
        output, error = load_word(table, ADDRESSES + inputs), load_word(table, ERROR)
        levels = load_word(table, ENTRIES)
        item_bytes = 4 + _BLOCK * _bits(levels) // 8
        for start in range(0, count, _BLOCK):
            n = min(_BLOCK, count - start)
            sum_inputs(of, table, inputs, start, n, values, moments)
            for i in range(n, _BLOCK):
                values[i] = 0.0
            block = start // _BLOCK
            item, scale = output + block * item_bytes, _norm(values, is_l2, lanes)
            _code(is_natural, values, scale, levels, salt_of(table, block), codes, item)
            if magnitude(scale) >= INFINITE:
                blame_inputs(of, table, inputs, start, n)
                continue
            keep_moments(table, start, n, moments)
            if error:
                _read(is_natural, item, levels, codes, sent)
                for i in range(n):
                    store(F32, error + start * 4, i, values[i] - sent[i])

    return kernel


def decode(kind: CodecKind, dtype: DType) -> Callable[..., Any]:
    """(source, table, outputs, elements, divisor): write decoded elements to each output, rounded; divided, and rounded
    again, if the divisor is above 1."""
    is_natural, of = kind in _NATURAL, int(dtype)

    def kernel(source: int, table: int, outputs: int, count: int, divisor: int) -> None:
        values, codes = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.int8)
        levels = load_word(table, ENTRIES)
        item_bytes = 4 + _BLOCK * _bits(levels) // 8
        for start in range(0, count, _BLOCK):
            _read(is_natural, source + start // _BLOCK * item_bytes, levels, codes, values)
            deliver(of, table, outputs, start, min(_BLOCK, count - start), divisor, values)

    return kernel


def add(kind: CodecKind) -> Callable[..., Any]:
    """(table, inputs, outputs, bytes of each): decode, sum first to last in float32, code the sum. What it draws is not
    what any machine draws."""
    is_natural, is_l2 = kind in _NATURAL, kind in _L2

    def kernel(table: int, inputs: int, outputs: int, nbytes: int) -> None:
        values, part = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
        codes, lanes = np.empty(_BLOCK, np.int8), np.empty(LANES, np.float32)
        levels = load_word(table, ENTRIES)
        item_bytes = 4 + _BLOCK * _bits(levels) // 8
        for start in range(0, nbytes, item_bytes):
            _read(is_natural, load_word(table, ADDRESSES) + start, levels, codes, values)
            for k in range(1, inputs):
                _read(is_natural, load_word(table, ADDRESSES + k) + start, levels, codes, part)
                for i in range(_BLOCK):
                    values[i] += part[i]
            scale = _norm(values, is_l2, lanes)
            if magnitude(scale) >= INFINITE:
                blame_contributions(table, inputs, outputs, start, 1)
            salt = salt_of(table, start // item_bytes)
            for k in range(outputs):
                _code(is_natural, values, scale, levels, salt, codes, load_word(table, ADDRESSES + inputs + k) + start)

    return kernel
