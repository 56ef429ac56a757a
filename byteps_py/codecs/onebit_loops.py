"""The kernels of ONEBIT and ONEBIT_SCALED: signs, times 1 or the mean magnitude of their block.

Zeros count as positive. A block with NaN or infinity gets the scale NaN, so that all of it decodes to NaN. Importing
this module loads numba, so it is imported late. Any thread. Tables are those of block_loops.py.

Bit j of byte b stands for element 256 · j + b: so a processor handles many bytes at once.
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
    LANES,
    NAN,
    blame_contributions,
    blame_inputs,
    deliver,
    for_kernels,
    keep_moments,
    largest_magnitude,
    sum_inputs,
    sum_of_lanes,
)
from byteps_py.codecs.elements import (
    float_of,
    load,
    load_code,
    load_position,
    load_word,
    magnitude,
    store,
    store_code,
    store_position,
)
from byteps_py.tensor_codec import ONEBIT_BLOCK, CodecKind
from byteps_py.tensors import DType

_BLOCK = ONEBIT_BLOCK
_BYTES = ONEBIT_BLOCK // 8
_ITEM = 8 + _BYTES
_PART = np.float32(1 / ONEBIT_BLOCK)


@for_kernels
def _scale(values: Any, n: int, is_scaled: bool, lanes: Any) -> Any:
    """The factor of the block's signs, of ``n`` values and zeros behind them. NaN if they are not finite."""
    if largest_magnitude(values, _BLOCK) >= INFINITE:
        return float_of(np.int32(NAN))
    if not is_scaled:
        return np.float32(1.0)
    for j in range(LANES):
        lanes[j] = 0.0
    for row in range(0, _BLOCK, LANES):
        for j in range(LANES):
            lanes[j] += abs(values[row + j]) * _PART  # so that no sum is infinite
    return sum_of_lanes(lanes) / (np.float32(max(n, 1)) * _PART)


@for_kernels
def _pack(values: Any, n: int, scale: Any, signs: Any, item: int) -> None:
    for b in range(_BYTES):
        signs[b] = 0
    for j in range(8):
        for b in range(_BYTES):
            signs[b] |= np.int8(values[_BYTES * j + b] < 0) << j
    store(F32, item, 0, scale)
    store_position(item + 4, 0, n)
    store_position(item + 4, 1, 0)
    for b in range(_BYTES):
        store_code(item + 8, b, signs[b])


@for_kernels
def _unpack(item: int, values: Any) -> None:
    scale = load(F32, item, 0)
    for j in range(8):
        for b in range(_BYTES):
            values[_BYTES * j + b] = -scale if load_code(item + 8, b) >> j & 1 else scale


def encode(kind: CodecKind, dtype: DType) -> Callable[..., Any]:
    """(table, inputs, elements): sum inputs, momentum and error, and code the sum; the error becomes what the code
    lacks, but keeps its values, like the momentum, in a block with NaN or infinity."""
    is_scaled, of = kind is CodecKind.ONEBIT_SCALED, int(dtype)

    def kernel(table: int, inputs: int, count: int) -> None:
        values, moments = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
        sent, signs, lanes = np.empty(_BLOCK, np.float32), np.empty(_BYTES, np.int8), np.empty(LANES, np.float32)
        output, error = load_word(table, ADDRESSES + inputs), load_word(table, ERROR)
        for start in range(0, count, _BLOCK):
            n = min(_BLOCK, count - start)
            sum_inputs(of, table, inputs, start, n, values, moments)
            for i in range(n, _BLOCK):
                values[i] = 0.0
            item = output + start // _BLOCK * _ITEM
            scale = _scale(values, n, is_scaled, lanes)
            _pack(values, n, scale, signs, item)
            if magnitude(scale) >= INFINITE:
                blame_inputs(of, table, inputs, start, n)
                continue
            keep_moments(table, start, n, moments)
            if error:
                _unpack(item, sent)
                for i in range(n):
                    store(F32, error + start * 4, i, values[i] - sent[i])

    return kernel


def decode(dtype: DType) -> Callable[..., Any]:
    """(source, table, outputs, elements, divisor): write decoded elements to each output, rounded; divided, and rounded
    again, if the divisor is above 1."""
    of = int(dtype)

    def kernel(source: int, table: int, outputs: int, count: int, divisor: int) -> None:
        values = np.empty(_BLOCK, np.float32)
        for start in range(0, count, _BLOCK):
            _unpack(source + start // _BLOCK * _ITEM, values)
            deliver(of, table, outputs, start, min(_BLOCK, count - start), divisor, values)

    return kernel


def add(kind: CodecKind) -> Callable[..., Any]:
    """(table, inputs, outputs, bytes of each): decode, sum first to last in float32, code the sum."""
    is_scaled = kind is CodecKind.ONEBIT_SCALED

    def kernel(table: int, inputs: int, outputs: int, nbytes: int) -> None:
        values, part = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
        signs, lanes = np.empty(_BYTES, np.int8), np.empty(LANES, np.float32)
        for start in range(0, nbytes, _ITEM):
            first = load_word(table, ADDRESSES) + start
            n = min(_BLOCK, load_position(first + 4, 0))
            _unpack(first, values)
            for k in range(1, inputs):
                _unpack(load_word(table, ADDRESSES + k) + start, part)
                for i in range(_BLOCK):
                    values[i] += part[i]
            for i in range(n, _BLOCK):
                values[i] = 0.0
            scale = _scale(values, n, is_scaled, lanes)
            if magnitude(scale) >= INFINITE:
                blame_contributions(table, inputs, outputs, start, 1)
            for k in range(outputs):
                _pack(values, n, scale, signs, load_word(table, ADDRESSES + inputs + k) + start)

    return kernel
