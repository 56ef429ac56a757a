"""The kernels of TOPK and TOPK_2BIT: of each block, the elements of the largest magnitude, with their positions.

Of equal magnitudes those at lower positions are sent. NaN counts as larger than infinity, and infinity as larger than
all else, so both are sent first. TOPK_2BIT sends signs, and whether a magnitude is at least the mean of those that are
sent: then it stands for the mean of these, else for that of the others. It sends no zeros.

A machine adds what its code lacks to its next contribution, and so it does with what it sent at positions that the
answer lacks: a server keeps nothing. Importing this module loads numba, so it is imported late. Any thread. Tables are
those of block_loops.py.

Positions are ascending, so their high parts grow slowly: a code has how much each is above the one before, in unary (as
Elias and Fano wrote it, 1974). Of 123 of 4,096 elements:

    position 0000010 01101: high part 2, low part 13    high parts 0, 2, 2, …: 1 001 1 …    low parts: 5 bits each

So a position takes 7 bits instead of 12, and a block has the same size whatever is in it. Positions may come from
another machine: each is checked before it is used.
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
    load_word,
    magnitude,
    rounded,
    store,
    store_code,
)
from byteps_py.tensor_codec import POSITION_BITS, TOPK_BLOCK, CodecKind
from byteps_py.tensors import DType

_BLOCK = TOPK_BLOCK
_POSITION_BITS = POSITION_BITS
_FULL = int(CodecKind.TOPK)  # values as they are


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
def _low_bits(entries: int) -> int:
    """How many bits of a position are its low part: as in tensor_codec.py."""
    low = _POSITION_BITS
    while 1 << (_POSITION_BITS - low) < entries:
        low -= 1
    return low


@for_kernels
def _size(kind: int, entries: int) -> int:
    """Bytes of a coded block: those of ``Codec.item_bytes``."""
    low: int = _low_bits(entries)
    bits = entries * (low + (1 if kind == _FULL else 3)) + (_BLOCK >> low)
    return (4 * entries if kind == _FULL else 8) + (bits + 31) // 32 * 4


@for_kernels
def _put(base: int, at: int, bits: int) -> None:
    """Write at most 8 bits, ``at`` bits behind ``base``, where zeros are."""
    byte, bits = base + at // 8, bits << at % 8
    store_code(byte, 0, np.int8(load_code(byte, 0) | bits & 255))
    if bits > 255:
        store_code(byte, 1, np.int8(load_code(byte, 1) | bits >> 8))


@for_kernels
def _write_positions(base: int, entries: int, near: Any, count: int) -> None:
    low_bits = _low_bits(entries)
    at = entries + (_BLOCK >> low_bits)
    for e in range(count):
        position = np.int64(near[e])
        _put(base, (position >> low_bits) + e, 1)
        low = position & (1 << low_bits) - 1
        _put(base, at, low & 255)
        if low > 255:
            _put(base, at + 8, low >> 8)
        at += low_bits


@for_kernels
def _read_positions(base: int, entries: int, near: Any) -> int:
    """Write the positions of a block's entries to ``near``; returns how many they are."""
    low_bits, count = _low_bits(entries), 0
    highs = entries + (_BLOCK >> low_bits)
    byte, waiting = highs // 8, 8 - highs % 8  # of the low parts
    bits = (load_code(base, byte) & 255) >> highs % 8 if low_bits else 0
    for start in range(0, highs, 8):
        ones = load_code(base, start // 8) & 255
        if highs - start < 8:
            ones &= (1 << highs - start) - 1
        at = start
        while ones and count < entries:
            if ones & 1:
                while waiting < low_bits:
                    byte += 1
                    bits |= (load_code(base, byte) & 255) << waiting
                    waiting += 8
                near[count] = (at - count) << low_bits | bits & (1 << low_bits) - 1
                bits >>= low_bits
                waiting -= low_bits
                count += 1
            ones >>= 1
            at += 1
    return count


@for_kernels
def _sent(kind: int, values: Any, near: Any, chosen: int) -> int:
    """Leave the positions in ``near`` that a code has; returns how many they are. TOPK_2BIT sends no zeros."""
    count = 0
    for e in range(chosen):
        near[count] = near[e]
        count += int(kind == _FULL or magnitude(values[near[e]]) != 0)
    return count


@for_kernels
def _write(kind: int, item: int, entries: int, values: Any, near: Any, count: int) -> None:
    """Code the ``count`` elements of ``values`` whose positions ``near`` has."""
    for word in range(_size(kind, entries) // 4):
        store(F32, item, word, np.float32(0.0))
    if kind == _FULL:
        for e in range(count):
            store(F32, item, e, values[near[e]])
        _write_positions(item + 4 * entries, entries, near, count)
        return
    _write_positions(item + 8, entries, near, count)
    total, finite, worst, bad = 0.0, 0, 0, np.float32(0.0)
    for e in range(count):
        value = values[near[e]]
        bits = magnitude(value)
        if bits >= INFINITE:
            bad = bad if bits <= worst else np.abs(value)
            worst = max(worst, bits)
        else:
            total += abs(np.float64(value))
            finite += 1
    least = magnitude(np.float32(total / max(finite, 1))) if worst == 0 else INFINITE
    large, larges, small, smalls = 0.0, 0, 0.0, 0
    signs = _sign_bit(entries)
    for e in range(count):
        value = values[near[e]]
        bits = magnitude(value)
        if bits >= least and bits < INFINITE:
            large += abs(np.float64(value))
            larges += 1
        elif bits < INFINITE:
            small += abs(np.float64(value))
            smalls += 1
        _put(item + 8, signs + 2 * e, np.int64(value < 0) | np.int64(bits >= least) << 1)
    store(F32, item, 0, np.float32(small / max(smalls, 1)))
    store(F32, item, 1, bad if worst else np.float32(large / max(larges, 1)))


@for_kernels
def _sign_bit(entries: int) -> int:
    """The place of the first sign of TOPK_2BIT behind the magnitudes, in bits."""
    low_bits: int = _low_bits(entries)
    return entries * (low_bits + 1) + (_BLOCK >> low_bits)


@for_kernels
def _read(kind: int, item: int, entries: int, n: int, near: Any, found: Any) -> int:
    """Write positions, all below ``n``, and values of a coded block to ``near`` and ``found``; returns how many they
    are."""
    small, large = np.float32(0.0), np.float32(0.0)
    if kind != _FULL:
        small, large = load(F32, item, 0), load(F32, item, 1)
        if magnitude(large) == 0:
            return 0
    signs, count, last = _sign_bit(entries), 0, -1
    for e in range(_read_positions(item + (4 * entries if kind == _FULL else 8), entries, near)):
        at = near[e]
        if at > last and at < n:  # others stand for nothing
            if kind == _FULL:
                value = load(F32, item, e)
            else:
                place = signs + 2 * e
                low = load_code(item + 8, place // 8) >> place % 8 & 1
                high = load_code(item + 8, (place + 1) // 8) >> (place + 1) % 8 & 1
                value = large if high else small
                value = -value if low else value
            near[count] = at
            found[count] = value
            count += 1
            last = at
    return count


def encode(dtype: DType, kind: CodecKind) -> Callable[..., Any]:
    """(table, inputs, elements): sum inputs, momentum and error, and take the largest of the sum; the error becomes all
    that the code lacks, but keeps its values, like the momentum, in a block with NaN or infinity."""
    of, form = int(dtype), int(kind)

    def kernel(table: int, inputs: int, count: int) -> None:
        values, moments = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
        bins, near, coded = np.empty(2048, np.int32), np.empty(_BLOCK + 1, np.int32), np.empty(_BLOCK, np.float32)
        output, error = load_word(table, ADDRESSES + inputs), load_word(table, ERROR)
        entries = load_word(table, ENTRIES)
        item_bytes = _size(form, entries)
        for start in range(0, count, _BLOCK):
            n = min(_BLOCK, count - start)
            sum_inputs(of, table, inputs, start, n, values, moments)
            item = output + start // _BLOCK * item_bytes
            sent = _sent(form, values, near, _select(values, n, entries, bins, near))
            _write(form, item, entries, values, near, sent)
            if largest_magnitude(values, n) >= INFINITE:
                blame_inputs(of, table, inputs, start, n)
                continue
            keep_moments(table, start, n, moments)
            if error:
                for i in range(n):
                    store(F32, error + start * 4, i, values[i])
                for e in range(_read(form, item, entries, n, near, coded)):
                    store(F32, error + start * 4, near[e], values[near[e]] - coded[e])

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
            sent = _sent(form, values, near, _select(values, _BLOCK, entries, bins, near))
            for k in range(outputs):
                _write(form, load_word(table, ADDRESSES + inputs + k) + start, entries, values, near, sent)

    return kernel
