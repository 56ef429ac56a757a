"""The kernels of RANDOMK: of each block, elements at positions that all machines draw alike, so only values are sent.

A server adds these values as they are (``kernels.reduce``): it needs no positions, and its answer is not coded again.
Importing this module loads numba, so it is imported late. Any thread. Tables are those of block_loops.py.
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
    blame_inputs,
    deliver,
    for_kernels,
    keep_moments,
    largest_magnitude,
    salt_of,
    sum_inputs,
)
from byteps_py.codecs.elements import load, load_word, store
from byteps_py.tensor_codec import TOPK_BLOCK
from byteps_py.tensors import DType

_BLOCK = TOPK_BLOCK
_LAST = TOPK_BLOCK - 1


@for_kernels
def _position(salt: int, entry: int) -> Any:
    """The position of entry ``entry`` of a block. For each salt this is a permutation of the 4,096 positions: sums,
    products with odd numbers and shifted differences can all be taken back."""
    x = (entry * (salt & _LAST | 1) + (salt >> 12 & _LAST)) & _LAST
    x ^= x >> 6
    x = (x * (salt >> 24 & _LAST | 1) + (salt >> 36 & _LAST)) & _LAST
    x ^= x >> 5
    return (x * 1597 + (salt >> 48 & _LAST)) & _LAST


def encode(dtype: DType) -> Callable[..., Any]:
    """(table, inputs, elements): sum inputs, momentum and error, and take what is drawn of the sum; the error becomes
    the rest, but keeps its values, like the momentum, in a block with NaN or infinity. Such a block sends NaN."""
    of = int(dtype)

    def kernel(table: int, inputs: int, count: int) -> None:
        values, moments = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
        output, error = load_word(table, ADDRESSES + inputs), load_word(table, ERROR)
        entries = load_word(table, ENTRIES)
        for start in range(0, count, _BLOCK):
            n = min(_BLOCK, count - start)
            sum_inputs(of, table, inputs, start, n, values, moments)
            block = start // _BLOCK
            item, salt = output + block * 4 * entries, salt_of(table, block)
            is_finite = largest_magnitude(values, n) < INFINITE
            if is_finite:
                keep_moments(table, start, n, moments)
            else:
                blame_inputs(of, table, inputs, start, n)
            for e in range(entries):
                at = _position(salt, e)
                if not is_finite:
                    store(F32, item, e, np.float32(np.nan))
                elif at < n:
                    store(F32, item, e, values[at])
                    values[at] = 0.0
                else:
                    store(F32, item, e, np.float32(0.0))
            if error and is_finite:
                for i in range(n):
                    store(F32, error + start * 4, i, values[i])

    return kernel


def decode(dtype: DType) -> Callable[..., Any]:
    """(source, table, outputs, elements, divisor): write what was drawn to each output, rounded; divided, and rounded
    again, if the divisor is above 1; and zeros elsewhere."""
    of = int(dtype)

    def kernel(source: int, table: int, outputs: int, count: int, divisor: int) -> None:
        values = np.empty(_BLOCK, np.float32)
        entries = load_word(table, ENTRIES)
        for start in range(0, count, _BLOCK):
            block = start // _BLOCK
            item, salt = source + block * 4 * entries, salt_of(table, block)
            for i in range(_BLOCK):
                values[i] = 0.0
            for e in range(entries):
                values[_position(salt, e)] = load(F32, item, e)
            deliver(of, table, outputs, start, min(_BLOCK, count - start), divisor, values)

    return kernel
