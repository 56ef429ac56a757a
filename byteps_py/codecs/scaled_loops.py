"""The kernels of INT8 and the FLOAT8s: blocks of bytes with a common scale.

A block's largest magnitude becomes the largest number of the 8-bit type, so nothing saturates. A block whose largest
magnitude is below 2**-100 becomes zeros. A block with NaN or infinity gets the scale NaN, so that all of it decodes to
NaN. Importing this module loads numba, so it is imported late. Any thread. Tables are those of block_loops.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from byteps_py.codecs.block_loops import (
    ADDRESSES,
    ERROR,
    F32,
    INFINITE,
    LEAST,
    NAN,
    blame_contributions,
    blame_inputs,
    keep_moments,
    largest_magnitude,
    sum_inputs,
)
from byteps_py.codecs.elements import (
    dequantized,
    float_of,
    load,
    load_code,
    load_word,
    quantized,
    rounded,
    store,
    store_code,
)
from byteps_py.tensor_codec import SCALED_BLOCK, CodecKind
from byteps_py.tensors import DType

#: The largest number of each 8-bit type.
LARGEST = {CodecKind.INT8: 127.0, CodecKind.FLOAT8_E4M3: 448.0, CodecKind.FLOAT8_E5M2: 57344.0}
_BLOCK = SCALED_BLOCK
_ITEM = 4 + _BLOCK


def encode(kind: CodecKind, dtype: DType) -> Callable[..., Any]:
    """(table, inputs, elements): sum inputs, momentum and error, and code the sum; the error becomes what the code
    lacks, but keeps its values, like the momentum, in a block with NaN or infinity."""
    code, of, top = int(kind), int(dtype), np.float32(LARGEST[kind])

    def kernel(table: int, inputs: int, count: int) -> None:
        values, moments = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
        output, error = load_word(table, ADDRESSES + inputs), load_word(table, ERROR)
        for start in range(0, count, _BLOCK):
            n = min(_BLOCK, count - start)
            sum_inputs(of, table, inputs, start, n, values, moments)
            for i in range(n, _BLOCK):
                values[i] = 0.0
            largest = largest_magnitude(values, _BLOCK)
            item = output + start // _BLOCK * _ITEM
            if largest >= INFINITE or largest < LEAST:
                store(F32, item, 0, float_of(np.int32(NAN if largest >= INFINITE else 0)))
                for i in range(_BLOCK):
                    store_code(item + 4, i, np.int8(0))
                if largest >= INFINITE:
                    blame_inputs(of, table, inputs, start, n)
                    continue
                if error:
                    for i in range(n):
                        store(F32, error + start * 4, i, values[i])
                keep_moments(table, start, n, moments)
                continue
            scale = float_of(largest) / top
            inverse = np.float32(1.0) / scale
            store(F32, item, 0, scale)
            for i in range(_BLOCK):
                store_code(item + 4, i, quantized(code, values[i] * inverse))
            keep_moments(table, start, n, moments)
            if error:
                for i in range(n):
                    sent = dequantized(code, load_code(item + 4, i)) * scale
                    store(F32, error + start * 4, i, values[i] - sent)

    return kernel


def decode(kind: CodecKind, dtype: DType) -> Callable[..., Any]:
    """(source, table, outputs, elements, divisor): write decoded elements to each output, rounded; divided, and rounded
    again, if the divisor is above 1."""
    code, of, size = int(kind), int(dtype), dtype.itemsize

    def kernel(source: int, table: int, outputs: int, count: int, divisor: int) -> None:
        by = np.float32(divisor)
        for start in range(0, count, _BLOCK):
            n = min(_BLOCK, count - start)
            item = source + start // _BLOCK * _ITEM
            scale = load(F32, item, 0)
            for k in range(outputs):
                output = load_word(table, ADDRESSES + k) + start * size
                if divisor > 1:
                    for i in range(n):
                        value = rounded(of, dequantized(code, load_code(item + 4, i)) * scale)
                        store(of, output, i, value / by)
                else:
                    for i in range(n):
                        store(of, output, i, dequantized(code, load_code(item + 4, i)) * scale)

    return kernel


def add(kind: CodecKind) -> Callable[..., Any]:
    """(table, inputs, outputs, bytes of each): decode, sum first to last in float32, code the sum."""
    code, top = int(kind), np.float32(LARGEST[kind])

    def kernel(table: int, inputs: int, outputs: int, nbytes: int) -> None:
        values = np.empty(_BLOCK, np.float32)
        for start in range(0, nbytes, _ITEM):
            item = load_word(table, ADDRESSES) + start
            scale = load(F32, item, 0)
            for i in range(_BLOCK):
                values[i] = dequantized(code, load_code(item + 4, i)) * scale
            for k in range(1, inputs):
                item = load_word(table, ADDRESSES + k) + start
                scale = load(F32, item, 0)
                for i in range(_BLOCK):
                    values[i] += dequantized(code, load_code(item + 4, i)) * scale
            largest = largest_magnitude(values, _BLOCK)
            if largest >= INFINITE:
                blame_contributions(table, inputs, outputs, start, 1)
            is_plain = LEAST <= largest < INFINITE
            scale = float_of(largest) / top
            inverse = np.float32(1.0) / scale
            if not is_plain:
                scale = float_of(np.int32(NAN if largest >= INFINITE else 0))
            for k in range(outputs):
                item = load_word(table, ADDRESSES + inputs + k) + start
                store(F32, item, 0, scale)
                if is_plain:
                    for i in range(_BLOCK):
                        store_code(item + 4, i, quantized(code, values[i] * inverse))
                else:
                    for i in range(_BLOCK):
                        store_code(item + 4, i, np.int8(0))

    return kernel
