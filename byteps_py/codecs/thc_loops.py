"""The kernels of THC and THC_WIDE: integers that a server adds without decoding them (tensor homomorphic compression).

Of each block a machine sends the length of a step, the largest magnitude that it has, and multiples of the step in
lanes of 8 or 16 bits. All machines take the step from the largest magnitude of the last round, which they know from its
answer, so their multiples can be added: there are no more than ``levels``, so few that the lanes hold the sum of all
machines. Larger values are cut off, and the error keeps what cutting and rounding take away. In a first round, or where
a block was zeros, machines take steps of their own. Then a server finds different steps, decodes, adds, and codes.

A block with NaN or infinity gets the step NaN, so that all of it decodes to NaN, and leaves what was agreed as it is.
Importing this module loads numba, so it is imported late. Any thread. Tables are those of block_loops.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from byteps_py.codecs.block_loops import (
    ADDRESSES,
    AGREED,
    ENTRIES,
    ERROR,
    F32,
    INFINITE,
    LEAST,
    NAN,
    blame_contributions,
    blame_inputs,
    deliver,
    for_kernels,
    keep_moments,
    largest_magnitude,
    sum_inputs,
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
from byteps_py.tensor_codec import SCALED_BLOCK, CodecKind
from byteps_py.tensors import DType

_BLOCK = SCALED_BLOCK
#: Bits of 2**112: the sum of lanes times a smaller step is finite.
_LONG = 239 << 23
#: Added to a number and taken away again, it leaves no room for a fraction.
_ROUND = np.float32(12582912.0)


@for_kernels
def _item_bytes(is_wide: bool) -> int:
    return 8 + (2 * _BLOCK if is_wide else _BLOCK)


@for_kernels
def _read(is_wide: bool, item: int, lanes: Any) -> None:
    if is_wide:
        for i in range(_BLOCK):
            lanes[i] = np.int16(load_position(item + 8, i))
    else:
        for i in range(_BLOCK):
            lanes[i] = load_code(item + 8, i)


@for_kernels
def _add(is_wide: bool, item: int, lanes: Any) -> None:
    if is_wide:
        for i in range(_BLOCK):
            lanes[i] += np.int16(load_position(item + 8, i))
    else:
        for i in range(_BLOCK):
            lanes[i] += np.int16(load_code(item + 8, i))


@for_kernels
def _write(is_wide: bool, item: int, step: Any, largest: Any, lanes: Any) -> None:
    store(F32, item, 0, step)
    store(F32, item, 1, largest)
    if is_wide:
        for i in range(_BLOCK):
            store_position(item + 8, i, np.int64(lanes[i]))
    else:
        for i in range(_BLOCK):
            store_code(item + 8, i, np.int8(lanes[i]))


@for_kernels
def _quantize(values: Any, step: Any, levels: int, lanes: Any) -> None:
    """To the nearest multiple, but to no more than ``levels``. A step of 0 or NaN: zeros."""
    inverse, most = np.float32(1.0) / step, np.float32(levels)
    if not 0 < magnitude(step) < INFINITE:
        for i in range(_BLOCK):
            lanes[i] = 0
        return
    for i in range(_BLOCK):
        number = min(max(values[i] * inverse, -most), most)
        lanes[i] = np.int16(np.int32((number + _ROUND) - _ROUND))


def encode(kind: CodecKind, dtype: DType) -> Callable[..., Any]:
    """(table, inputs, elements): sum inputs, momentum and error, and code the sum; the error becomes what the code
    lacks, but keeps its values, like the momentum, in a block with NaN or infinity."""
    is_wide, of = kind is CodecKind.THC_WIDE, int(dtype)

    def kernel(table: int, inputs: int, count: int) -> None:
        values, moments = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
        lanes, levels = np.empty(_BLOCK, np.int16), load_word(table, ENTRIES)
        output, error, agreed = load_word(table, ADDRESSES + inputs), load_word(table, ERROR), load_word(table, AGREED)
        for start in range(0, count, _BLOCK):
            n, block = min(_BLOCK, count - start), start // _BLOCK
            sum_inputs(of, table, inputs, start, n, values, moments)
            for i in range(n, _BLOCK):
                values[i] = 0.0
            largest = largest_magnitude(values, _BLOCK)
            known = magnitude(load(F32, agreed, block)) if agreed else np.int32(0)
            reach = known if known >= LEAST else largest
            step = float_of(reach) / np.float32(levels) if reach >= LEAST else np.float32(0.0)
            if largest >= INFINITE:
                step = float_of(np.int32(NAN))
            _quantize(values, step, levels, lanes)
            _write(is_wide, output + block * _item_bytes(is_wide), step, float_of(largest), lanes)
            if largest >= INFINITE:
                blame_inputs(of, table, inputs, start, n)
                continue
            keep_moments(table, start, n, moments)
            if error:
                for i in range(n):
                    store(F32, error + start * 4, i, values[i] - np.float32(lanes[i]) * step)

    return kernel


def decode(kind: CodecKind, dtype: DType) -> Callable[..., Any]:
    """(source, table, outputs, elements, divisor): write decoded elements to each output, rounded; divided, and rounded
    again, if the divisor is above 1. The answer's largest magnitudes are what is agreed for the next round."""
    is_wide, of = kind is CodecKind.THC_WIDE, int(dtype)

    def kernel(source: int, table: int, outputs: int, count: int, divisor: int) -> None:
        values, lanes = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.int16)
        agreed = load_word(table, AGREED)
        for start in range(0, count, _BLOCK):
            block = start // _BLOCK
            item = source + block * _item_bytes(is_wide)
            step, largest = load(F32, item, 0), load(F32, item, 1)
            _read(is_wide, item, lanes)
            for i in range(_BLOCK):
                values[i] = np.float32(lanes[i]) * step
            deliver(of, table, outputs, start, min(_BLOCK, count - start), divisor, values)
            if agreed and magnitude(largest) < INFINITE:
                store(F32, agreed, block, largest)

    return kernel


def add(kind: CodecKind) -> Callable[..., Any]:
    """(table, inputs, outputs, bytes of each): add lanes; where steps differ decode, sum first to last in float32, and
    code the sum."""
    is_wide = kind is CodecKind.THC_WIDE
    most = 32767 if is_wide else 127

    def kernel(table: int, inputs: int, outputs: int, nbytes: int) -> None:
        values, lanes = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.int16)
        for start in range(0, nbytes, _item_bytes(is_wide)):
            first = load_word(table, ADDRESSES) + start
            step, largest = load(F32, first, 0), magnitude(load(F32, first, 1))
            is_agreed = magnitude(step) < _LONG
            for k in range(1, inputs):
                item = load_word(table, ADDRESSES + k) + start
                is_agreed = is_agreed and load(F32, item, 0) == step
                largest = max(largest, magnitude(load(F32, item, 1)))
            _read(is_wide, first, lanes)
            if is_agreed:
                for k in range(1, inputs):
                    _add(is_wide, load_word(table, ADDRESSES + k) + start, lanes)
            else:
                for i in range(_BLOCK):
                    values[i] = np.float32(lanes[i]) * step
                for k in range(1, inputs):
                    item = load_word(table, ADDRESSES + k) + start
                    step = load(F32, item, 0)
                    _read(is_wide, item, lanes)
                    for i in range(_BLOCK):
                        values[i] += np.float32(lanes[i]) * step
                reach = largest_magnitude(values, _BLOCK)
                step = float_of(reach) / np.float32(most) if reach >= LEAST else np.float32(0.0)
                if reach >= INFINITE:
                    step = float_of(np.int32(NAN))
                    blame_contributions(table, inputs, outputs, start, 1)
                _quantize(values, step, most, lanes)
            for k in range(outputs):
                item = load_word(table, ADDRESSES + inputs + k) + start
                _write(is_wide, item, step, float_of(largest), lanes)

    return kernel
