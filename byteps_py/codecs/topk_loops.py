"""The kernels of TOPK and TOPK_2BIT: of each block, the elements of the largest magnitude, with their positions.

Of equal magnitudes those at lower positions are sent. NaN counts as larger than infinity, and infinity as larger than
all else, so both are sent first. TOPK_2BIT sends signs, and whether a magnitude is at least the mean of those that are
sent: then it stands for the mean of these, else for that of the others. It sends no zeros.

A machine adds what its code lacks to its next contribution, and so it does with what it sent at positions that the
answer lacks: a server keeps nothing. Importing this module loads numba, so it is imported late. Any thread. Tables are
those of block_loops.py.

A position in a block that is sent may come from another machine: each is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from byteps_py.codecs.block_loops import (
    ADDRESSES,
    ENTRIES,
    ERROR,
    F32,
    GIVEN,
    INFINITE,
    blame_contributions,
    blame_inputs,
    for_kernels,
    keep_moments,
    largest_magnitude,
    sum_inputs,
)
from byteps_py.codecs.elements import (
    load,
    load_code,
    load_position,
    load_word,
    magnitude,
    rounded,
    store,
    store_code,
    store_position,
)
from byteps_py.tensor_codec import TOPK_BLOCK, CodecKind
from byteps_py.tensors import DType

_BLOCK = TOPK_BLOCK
_FULL = int(CodecKind.TOPK)  # values as they are
_NOWHERE = 0xFFFF  # the position of an entry that stands for nothing


@register_jitable(inline="always")
def _select(values: Any, n: int, entries: int, bins: Any, near: Any) -> int:
    """Write the positions of the largest of the first ``n`` of ``values`` to ``near``, ascending; returns how many they
    are. ``bins``: 2,048 numbers to work with; ``near``: 4,097.

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
    chosen = 0
    for c in range(count):
        i = near[c]
        bits = magnitude(values[i])
        if bits > least or (bits == least and ties > 0):
            if bits == least:
                ties -= 1
            near[chosen] = i
            chosen += 1
    return chosen


@for_kernels
def _size(kind: int, entries: int) -> int:
    """Bytes of a coded block: those of ``Codec.item_bytes``."""
    if kind == _FULL:
        return (6 * entries + 3) // 4 * 4
    return 8 + (14 * entries + 31) // 32 * 4


@for_kernels
def _write(kind: int, item: int, entries: int, values: Any, near: Any, chosen: int) -> None:
    """Code the ``chosen`` elements of ``values`` whose positions ``near`` has."""
    if kind == _FULL:
        positions = item + 4 * entries
        for e in range(chosen):
            store(F32, item, e, values[near[e]])
            store_position(positions, e, near[e])
        for e in range(chosen, entries):
            store(F32, item, e, np.float32(0.0))
            store_position(positions, e, _NOWHERE)
        if entries % 2:
            store_position(positions, entries, 0)
        return
    total, count, worst, bad = 0.0, 0, 0, np.float32(0.0)
    for e in range(chosen):
        value = values[near[e]]
        bits = magnitude(value)
        if bits >= INFINITE:
            bad = bad if bits <= worst else np.abs(value)
            worst = max(worst, bits)
        elif bits:
            total += abs(np.float64(value))
            count += 1
    least = magnitude(np.float32(total / max(count, 1))) if worst == 0 else INFINITE
    high, highs, low, lows = 0.0, 0, 0.0, 0
    for e in range(chosen):
        bits = magnitude(values[near[e]])
        if bits >= least and bits < INFINITE:
            high += abs(np.float64(values[near[e]]))
            highs += 1
        elif bits < INFINITE and bits:
            low += abs(np.float64(values[near[e]]))
            lows += 1
    for word in range(2, _size(kind, entries) // 4):
        store(F32, item, word, np.float32(0.0))
    store(F32, item, 0, np.float32(low / max(lows, 1)))
    store(F32, item, 1, bad if worst else np.float32(high / max(highs, 1)))
    written, signs = 0, item + 8 + (3 * entries + 1) // 2
    for e in range(chosen):
        at, bits = near[e], magnitude(values[near[e]])
        if bits:
            byte = item + 8 + 3 * written // 2
            if written % 2:
                store_code(byte, 0, np.int8(load_code(byte, 0) & 15 | (at & 15) << 4))
                store_code(byte, 1, np.int8(at >> 4))
            else:
                store_code(byte, 0, np.int8(at & 255))
                store_code(byte, 1, np.int8(at >> 8))
            code = (values[near[e]] < 0) | (bits >= least) << 1
            byte = signs + written // 4
            store_code(byte, 0, np.int8(load_code(byte, 0) | code << 2 * (written % 4)))
            written += 1


@for_kernels
def _read(kind: int, item: int, entries: int, n: int, near: Any, found: Any) -> int:
    """Write positions, all below ``n``, and values of a coded block to ``near`` and ``found``; returns how many they
    are."""
    count = 0
    if kind == _FULL:
        for e in range(entries):
            at = load_position(item + 4 * entries, e)
            if at < n:
                near[count] = at
                found[count] = load(F32, item, e)
                count += 1
        return count
    low, high = load(F32, item, 0), load(F32, item, 1)
    if magnitude(high) == 0:
        return 0
    last, signs = -1, item + 8 + (3 * entries + 1) // 2
    for e in range(entries):
        byte = item + 8 + 3 * e // 2
        first, second = load_code(byte, 0) & 255, load_code(byte, 1) & 255
        at = first >> 4 | second << 4 if e % 2 else first | (second & 15) << 8
        if at > last and at < n:  # others stand for nothing
            code = load_code(signs + e // 4, 0) >> 2 * (e % 4)
            value = high if code & 2 else low
            near[count] = at
            found[count] = -value if code & 1 else value
            count += 1
            last = at
    return count


def encode(dtype: DType, kind: CodecKind) -> Callable[..., Any]:
    """(table, inputs, elements): sum inputs, momentum and error, and take the largest of the sum; the error becomes all
    that the code lacks, but keeps its values, like the momentum, in a block with NaN or infinity."""
    of, form = int(dtype), int(kind)

    def kernel(table: int, inputs: int, count: int) -> None:
        values, moments = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
        bins, near, sent = np.empty(2048, np.int32), np.empty(_BLOCK + 1, np.int32), np.empty(_BLOCK, np.float32)
        output, error = load_word(table, ADDRESSES + inputs), load_word(table, ERROR)
        entries = load_word(table, ENTRIES)
        item_bytes = _size(form, entries)
        for start in range(0, count, _BLOCK):
            n = min(_BLOCK, count - start)
            sum_inputs(of, table, inputs, start, n, values, moments)
            item = output + start // _BLOCK * item_bytes
            _write(form, item, entries, values, near, _select(values, n, entries, bins, near))
            if largest_magnitude(values, n) >= INFINITE:
                blame_inputs(of, table, inputs, start, n)
                continue
            keep_moments(table, start, n, moments)
            if error:
                for i in range(n):
                    store(F32, error + start * 4, i, values[i])
                for e in range(_read(form, item, entries, n, near, sent)):
                    store(F32, error + start * 4, near[e], values[near[e]] - sent[e])

    return kernel


def decode(dtype: DType, kind: CodecKind) -> Callable[..., Any]:
    """(source, table, outputs, elements, divisor): as in scaled_loops. The error (0: none) gets back what this machine
    has sent at positions that the answer lacks."""
    of, size, form = int(dtype), dtype.itemsize, int(kind)

    def kernel(source: int, table: int, outputs: int, count: int, divisor: int) -> None:
        by, entries = np.float32(divisor), load_word(table, ENTRIES)
        is_answered = np.zeros(_BLOCK, np.int8)
        near, found = np.empty(_BLOCK, np.int32), np.empty(_BLOCK, np.float32)
        given, error = load_word(table, GIVEN), load_word(table, ERROR)
        item_bytes = _size(form, entries)
        for start in range(0, count, _BLOCK):
            n = min(_BLOCK, count - start)
            answered = _read(form, source + start // _BLOCK * item_bytes, entries, n, near, found)
            for k in range(outputs):
                output = load_word(table, ADDRESSES + k) + start * size
                for i in range(n):
                    store(of, output, i, np.float32(0.0))
                for e in range(answered):
                    value = rounded(of, found[e])
                    store(of, output, near[e], value / by if divisor > 1 else value)
            if error:
                for i in range(n):
                    is_answered[i] = 0
                for e in range(answered):
                    is_answered[near[e]] = 1
                mine = given + start // _BLOCK * item_bytes
                sent = _read(form, mine, entries, n, near, found)
                is_finite = True
                for e in range(sent):
                    is_finite = is_finite and magnitude(found[e]) < INFINITE
                for e in range(sent):
                    at = near[e]
                    if is_finite and not is_answered[at]:
                        store(F32, error + start * 4, at, load(F32, error + start * 4, at) + found[e])

    return kernel


def add(kind: CodecKind) -> Callable[..., Any]:
    """(table, inputs, outputs, bytes of each): as in scaled_loops."""
    form = int(kind)

    def kernel(table: int, inputs: int, outputs: int, nbytes: int) -> None:
        entries = load_word(table, ENTRIES)
        values, found = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
        bins, near = np.empty(2048, np.int32), np.empty(_BLOCK + 1, np.int32)
        item_bytes = _size(form, entries)
        for start in range(0, nbytes, item_bytes):
            for i in range(_BLOCK):
                values[i] = 0.0
            is_finite = True
            for k in range(inputs):
                item = load_word(table, ADDRESSES + k) + start
                for e in range(_read(form, item, entries, _BLOCK, near, found)):
                    values[near[e]] += found[e]
                    is_finite = is_finite and magnitude(values[near[e]]) < INFINITE
            if not is_finite:
                blame_contributions(table, inputs, outputs, start, entries if form == _FULL else 2)
            chosen = _select(values, _BLOCK, entries, bins, near)
            for k in range(outputs):
                _write(form, load_word(table, ADDRESSES + inputs + k) + start, entries, values, near, chosen)

    return kernel
