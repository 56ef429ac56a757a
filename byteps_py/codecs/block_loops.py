"""The work of all codecs' kernels on a block, beside coding it: sum what goes in, say what is not finite, deliver.

A kernel has a table of 64-bit numbers: what stands below, the addresses of inputs, those of outputs, and room for
findings: for each input whether it is not finite where the result is not, and whether a result is not finite although
all inputs are. Importing this module loads numba, so it is imported late. Any thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import overload

from byteps_py.codecs.elements import float_of, load, load_word, magnitude, mixed, rounded, store, store_word
from byteps_py.tensors import DType

#: Places in the table: addresses of the error and of the momentum (0: none), the momentum's factor as the bits of a
#: float32, a codec's entries or levels, the number from which what is drawn follows, the number of the first block in
#: its tensor, addresses of this machine's contribution and of what machines have agreed on (0: none). Others follow.
ERROR, MOMENTS, MU, ENTRIES, STREAM, FIRST, GIVEN, AGREED, ADDRESSES = range(9)

#: Bits of 2**-100, of infinity, and of a NaN.
LEAST, INFINITE, NAN = 27 << 23, 0x7F800000, 0x7FC00000
F32 = int(DType.FLOAT32)
#: Sums of many numbers are taken in so many lanes, of which halves are added at the end: the same for all processors.
LANES = 16


def for_kernels(function: Any) -> Any:
    """``function``, for kernels to call. Numbers that instructions depend on, such as dtypes, can be its arguments: as
    closures of kernels they would keep numba from finding the kernels in its cache."""

    @overload(function, jit_options={"error_model": "numpy"}, prefer_literal=True, strict=False)
    def implementation(*_: Any) -> Any:
        return function

    return function


@for_kernels
def itemsize(of: int) -> int:
    """Of a dtype that codecs take."""
    return 4 if of == F32 else 2


@for_kernels
def sum_inputs(of: int, table: int, inputs: int, start: int, n: int, values: Any, moments: Any) -> None:
    """Sum ``n`` elements from ``start`` of the inputs, of dtype ``of``, first to last in float32, to ``values``; add
    momentum and the error. ``moments`` become the next momentum, for ``keep_moments``."""
    size = itemsize(of)
    source = load_word(table, ADDRESSES) + start * size
    for i in range(n):
        values[i] = load(of, source, i)
    for k in range(1, inputs):
        source = load_word(table, ADDRESSES + k) + start * size
        for i in range(n):
            values[i] += load(of, source, i)
    kept = load_word(table, MOMENTS)
    if kept:
        kept += start * 4
        mu = float_of(np.int32(load_word(table, MU)))
        for i in range(n):
            moments[i] = load(F32, kept, i) * mu + values[i]
            values[i] += moments[i] * mu
    kept = load_word(table, ERROR)
    if kept:
        kept += start * 4
        for i in range(n):
            values[i] += load(F32, kept, i)


@for_kernels
def keep_moments(table: int, start: int, n: int, moments: Any) -> None:
    """The momentum becomes what ``sum_inputs`` has found."""
    kept = load_word(table, MOMENTS)
    if kept:
        for i in range(n):
            store(F32, kept + start * 4, i, moments[i])


@for_kernels
def blame_inputs(of: int, table: int, inputs: int, start: int, n: int) -> None:
    """Note which inputs, of dtype ``of``, of a contribution that is not finite are not."""
    size = itemsize(of)
    findings = ADDRESSES + inputs + 1
    is_explained = False
    for k in range(inputs):
        source = load_word(table, ADDRESSES + k) + start * size
        for i in range(n):
            if magnitude(load(of, source, i)) >= INFINITE:
                store_word(table, findings + k, 1)
                is_explained = True
                break
    if not is_explained:
        store_word(table, findings + inputs, 1)


@for_kernels
def blame_contributions(table: int, inputs: int, outputs: int, start: int, numbers: int) -> None:
    """Note which contributions to a sum that is not finite are not: each begins with so many float32 numbers. Before an
    output overwrites an input."""
    findings = ADDRESSES + inputs + outputs
    is_explained = False
    for k in range(inputs):
        item = load_word(table, ADDRESSES + k) + start
        for e in range(numbers):
            if magnitude(load(F32, item, e)) >= INFINITE:
                store_word(table, findings + k, 1)
                is_explained = True
    if not is_explained:
        store_word(table, findings + inputs, 1)


@for_kernels
def deliver(of: int, table: int, outputs: int, start: int, n: int, divisor: int, values: Any) -> None:
    """Write ``values`` to each output, rounded to dtype ``of``; divided, and rounded again, if the divisor is above
    1."""
    size = itemsize(of)
    by = np.float32(divisor)
    for k in range(outputs):
        output = load_word(table, ADDRESSES + k) + start * size
        if divisor > 1:
            for i in range(n):
                store(of, output, i, rounded(of, values[i]) / by)
        else:
            for i in range(n):
                store(of, output, i, values[i])


@for_kernels
def largest_magnitude(values: Any, n: int) -> Any:
    """The bits of the largest magnitude of ``n`` values; those of NaN count as larger than all."""
    largest = np.int32(0)
    for i in range(n):
        largest = max(largest, magnitude(values[i]))
    return largest


@for_kernels
def sum_of_lanes(lanes: Any) -> Any:
    """The sum of LANES numbers, halves first."""
    half = LANES // 2
    while half:
        for i in range(half):
            lanes[i] += lanes[i + half]
        half //= 2
    return lanes[0]


@for_kernels
def salt_of(table: int, block: int) -> Any:
    """The seed of the draws of a partition's block."""
    return mixed(load_word(table, STREAM) + mixed(load_word(table, FIRST) + block))
