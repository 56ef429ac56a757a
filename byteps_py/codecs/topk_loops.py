"""The kernels of TOPK: of each block, the elements of the largest magnitude, with their positions.

Of equal magnitudes those at lower positions are sent. NaN counts as larger than infinity, and infinity as larger than
all else, so both are sent first. A machine adds what it did not send to its next contribution, and so it does with what
it sent and the answer lacks: a server keeps nothing. Importing this module loads numba, so it is imported late. Any
thread. Tables are those of scaled_loops.py.

A position in a block that is sent may come from another machine: each is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from byteps_py.codecs.elements import (
    load,
    load_position,
    load_word,
    magnitude,
    rounded,
    store,
    store_position,
    store_word,
)
from byteps_py.tensor_codec import TOPK_BLOCK
from byteps_py.tensors import DType

_BLOCK = TOPK_BLOCK
_NOWHERE = 0xFFFF  # the position of an entry that stands for nothing
_F32 = int(DType.FLOAT32)
_INFINITE = 0x7F800000


@register_jitable(inline="always")
def _select(values: Any, n: int, entries: int, item: int, bins: Any, near: Any) -> None:
    """Write the entries of the first ``n`` of ``values`` to a coded block. ``bins``, ``near``: 2,048 and 4,096 numbers
    to work with.

    The magnitude of the last entry is found digit by digit, in 11, 10 and 10 bits: how many are larger is counted. Few
    elements have its first digit, or a greater one; only those are looked at again."""
    count, least, ties = 0, 0, n
    first, missing = 0, entries
    if n > entries:
        for i in range(2048):
            bins[i] = 0
        for i in range(n):
            bins[magnitude(values[i]) >> 20] += 1
        first = 2047
        while bins[first] < missing:
            missing -= bins[first]
            first -= 1
        least = first
    for i in range(n):
        near[count] = i
        count += magnitude(values[i]) >> 20 >= first
    if n > entries:
        for shift in (10, 0):
            for i in range(1024):
                bins[i] = 0
            for c in range(count):
                bits = magnitude(values[near[c]])
                if bits >> (shift + 10) == least:
                    bins[(bits >> shift) & 1023] += 1
            digit = 1023
            while bins[digit] < missing:
                missing -= bins[digit]
                digit -= 1
            least = least << 10 | digit
        ties = missing
    written = 0
    positions = item + 4 * entries
    for c in range(count):
        i = near[c]
        bits = magnitude(values[i])
        if bits > least or (bits == least and ties > 0):
            if bits == least:
                ties -= 1
            store(_F32, item, written, values[i])
            store_position(positions, written, i)
            written += 1
    for i in range(written, entries):
        store(_F32, item, i, np.float32(0.0))
        store_position(positions, i, _NOWHERE)
    if entries % 2:
        store_position(positions, entries, 0)


def encode(dtype: DType) -> Callable[..., Any]:
    """(table, inputs, elements, entries): as in scaled_loops. The error becomes all that is not sent."""
    of, size = int(dtype), dtype.itemsize

    def kernel(table: int, inputs: int, count: int, entries: int) -> None:
        values = np.empty(_BLOCK, np.float32)
        bins, near = np.empty(2048, np.int32), np.empty(_BLOCK + 1, np.int32)
        output, error = load_word(table, inputs), load_word(table, inputs + 1)
        item_bytes = (6 * entries + 3) // 4 * 4
        for start in range(0, count, _BLOCK):
            n = min(_BLOCK, count - start)
            source = load_word(table, 0) + start * size
            for i in range(n):
                values[i] = load(of, source, i)
            for k in range(1, inputs):
                source = load_word(table, k) + start * size
                for i in range(n):
                    values[i] += load(of, source, i)
            kept = error + start * 4
            if error:
                for i in range(n):
                    values[i] += load(_F32, kept, i)
            item = output + start // _BLOCK * item_bytes
            _select(values, n, entries, item, bins, near)
            largest = np.int32(0)
            for i in range(n):
                largest = max(largest, magnitude(values[i]))
            if largest >= _INFINITE:
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
            elif error:
                for i in range(n):
                    store(_F32, kept, i, values[i])
                for e in range(entries):
                    at = load_position(item + 4 * entries, e)
                    if at < n:
                        store(_F32, kept, at, np.float32(0.0))

    return kernel


def decode(dtype: DType) -> Callable[..., Any]:
    """(source, table, outputs, elements, divisor, entries): as in scaled_loops. Behind the outputs, the table has the
    addresses of this machine's contribution and of its error (0: none), which gets back what the answer lacks."""
    of, size = int(dtype), dtype.itemsize

    def kernel(source: int, table: int, outputs: int, count: int, divisor: int, entries: int) -> None:
        by = np.float32(divisor)
        is_answered = np.zeros(_BLOCK, np.int8)
        given, error = load_word(table, outputs), load_word(table, outputs + 1)
        item_bytes = (6 * entries + 3) // 4 * 4
        for start in range(0, count, _BLOCK):
            n = min(_BLOCK, count - start)
            item = source + start // _BLOCK * item_bytes
            positions = item + 4 * entries
            for k in range(outputs):
                output = load_word(table, k) + start * size
                for i in range(n):
                    store(of, output, i, np.float32(0.0))
                for e in range(entries):
                    at = load_position(positions, e)
                    if at < n:
                        value = rounded(of, load(_F32, item, e))
                        store(of, output, at, value / by if divisor > 1 else value)
            if error:
                for e in range(entries):
                    at = load_position(positions, e)
                    if at < n:
                        is_answered[at] = 1
                mine = given + start // _BLOCK * item_bytes
                is_finite = True
                for e in range(entries):
                    is_finite = is_finite and magnitude(load(_F32, mine, e)) < _INFINITE
                for e in range(entries):
                    at = load_position(mine + 4 * entries, e)
                    if is_finite and at < n and not is_answered[at]:
                        store(_F32, error + start * 4, at, load(_F32, mine, e))
                for e in range(entries):
                    at = load_position(positions, e)
                    if at < n:
                        is_answered[at] = 0

    return kernel


def add() -> Callable[..., Any]:
    """(table, inputs, outputs, bytes of each, entries): as in scaled_loops."""

    def kernel(table: int, inputs: int, outputs: int, nbytes: int, entries: int) -> None:
        values = np.empty(_BLOCK, np.float32)
        bins, near = np.empty(2048, np.int32), np.empty(_BLOCK + 1, np.int32)
        item_bytes = (6 * entries + 3) // 4 * 4
        for start in range(0, nbytes, item_bytes):
            for i in range(_BLOCK):
                values[i] = 0.0
            is_finite = True
            for k in range(inputs):
                item = load_word(table, k) + start
                for e in range(entries):
                    at = load_position(item + 4 * entries, e)
                    if at < _BLOCK:
                        values[at] += load(_F32, item, e)
                        is_finite = is_finite and magnitude(values[at]) < _INFINITE
            if not is_finite:  # before an output overwrites an input
                is_explained = False
                for k in range(inputs):
                    item = load_word(table, k) + start
                    for e in range(entries):
                        if magnitude(load(_F32, item, e)) >= _INFINITE:
                            store_word(table, inputs + outputs + 1 + k, 1)
                            is_explained = True
                if not is_explained:
                    store_word(table, 2 * inputs + outputs + 1, 1)
            for k in range(outputs):
                _select(values, _BLOCK, entries, load_word(table, inputs + k) + start, bins, near)

    return kernel
