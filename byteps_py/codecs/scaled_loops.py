"""The kernels of INT8 and the FLOAT8s: blocks of bytes with a common scale.

A block's largest magnitude becomes the largest number of the 8-bit type, so nothing saturates. A block whose largest
magnitude is below 2**-100 becomes zeros. A block with NaN or infinity gets the scale NaN, so that all of it decodes to
NaN. Importing this module loads numba, so it is imported late. Any thread.

    table: the addresses of inputs, of outputs, of the error (0: none), then room for findings: for each input whether
    it is not finite where the result is not, and whether a result is not finite although all inputs are
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from byteps_py.codecs.elements import (
    dequantized,
    float_of,
    load,
    load_code,
    load_word,
    magnitude,
    quantized,
    rounded,
    store,
    store_code,
    store_word,
)
from byteps_py.tensor_codec import SCALED_BLOCK, CodecKind
from byteps_py.tensors import DType

#: The largest number of each 8-bit type.
LARGEST = {CodecKind.INT8: 127.0, CodecKind.FLOAT8_E4M3: 448.0, CodecKind.FLOAT8_E5M2: 57344.0}
_BLOCK = SCALED_BLOCK
_ITEM = 4 + _BLOCK
_F32 = int(DType.FLOAT32)
#: Bits of 2**-100, of infinity, and of a NaN.
_LEAST, _INFINITE, _NAN = 27 << 23, 0x7F800000, 0x7FC00000


def encode(kind: CodecKind, dtype: DType) -> Callable[..., Any]:
    """(table, inputs, elements): sum inputs first to last in float32, add the error, and code the sum; the error
    becomes what the code lacks, but keeps its values in a block with NaN or infinity."""
    code, of, size, top = int(kind), int(dtype), dtype.itemsize, np.float32(LARGEST[kind])

    def kernel(table: int, inputs: int, count: int) -> None:
        values = np.empty(_BLOCK, np.float32)
        output, error = load_word(table, inputs), load_word(table, inputs + 1)
        for start in range(0, count, _BLOCK):
            n = min(_BLOCK, count - start)
            source = load_word(table, 0) + start * size
            for i in range(n):
                values[i] = load(of, source, i)
            for i in range(n, _BLOCK):
                values[i] = 0.0
            for k in range(1, inputs):
                source = load_word(table, k) + start * size
                for i in range(n):
                    values[i] += load(of, source, i)
            if error:
                for i in range(n):
                    values[i] += load(_F32, error + start * 4, i)
            largest = np.int32(0)
            for i in range(_BLOCK):
                largest = max(largest, magnitude(values[i]))
            item = output + start // _BLOCK * _ITEM
            if largest >= _INFINITE or largest < _LEAST:
                store(_F32, item, 0, float_of(np.int32(_NAN if largest >= _INFINITE else 0)))
                for i in range(_BLOCK):
                    store_code(item + 4, i, np.int8(0))
                if largest < _LEAST:
                    if error:
                        for i in range(n):
                            store(_F32, error + start * 4, i, values[i])
                    continue
                is_explained = False
                for k in range(inputs):
                    source = load_word(table, k) + start * size
                    for i in range(n):
                        if magnitude(load(of, source, i)) >= _INFINITE:
                            store_word(table, inputs + 2 + k, 1)
                            is_explained = True
                            break
                if not is_explained:
                    store_word(table, 2 * inputs + 2, 1)
                continue
            scale = float_of(largest) / top
            inverse = np.float32(1.0) / scale
            store(_F32, item, 0, scale)
            for i in range(_BLOCK):
                store_code(item + 4, i, quantized(code, values[i] * inverse))
            if error:
                for i in range(n):
                    sent = dequantized(code, load_code(item + 4, i)) * scale
                    store(_F32, error + start * 4, i, values[i] - sent)

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
            scale = load(_F32, item, 0)
            for k in range(outputs):
                output = load_word(table, k) + start * size
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
            item = load_word(table, 0) + start
            scale = load(_F32, item, 0)
            for i in range(_BLOCK):
                values[i] = dequantized(code, load_code(item + 4, i)) * scale
            for k in range(1, inputs):
                item = load_word(table, k) + start
                scale = load(_F32, item, 0)
                for i in range(_BLOCK):
                    values[i] += dequantized(code, load_code(item + 4, i)) * scale
            largest = np.int32(0)
            for i in range(_BLOCK):
                largest = max(largest, magnitude(values[i]))
            if largest >= _INFINITE:  # before an output overwrites an input
                is_explained = False
                for k in range(inputs):
                    if magnitude(load(_F32, load_word(table, k) + start, 0)) >= _INFINITE:
                        store_word(table, inputs + outputs + 1 + k, 1)
                        is_explained = True
                if not is_explained:
                    store_word(table, 2 * inputs + outputs + 1, 1)
            is_plain = _LEAST <= largest < _INFINITE
            scale = float_of(largest) / top
            inverse = np.float32(1.0) / scale
            if not is_plain:
                scale = float_of(np.int32(_NAN if largest >= _INFINITE else 0))
            for k in range(outputs):
                item = load_word(table, inputs + k) + start
                store(_F32, item, 0, scale)
                if is_plain:
                    for i in range(_BLOCK):
                        store_code(item + 4, i, quantized(code, values[i] * inverse))
                else:
                    for i in range(_BLOCK):
                        store_code(item + 4, i, np.int8(0))

    return kernel
