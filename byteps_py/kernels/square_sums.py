"""``square_sum``: the sum of the squares of averaged contributions, for norms. Any thread.

The average is rounded as ``make_step`` rounds it, so a norm is of what a step uses. Squares are added in float64, block
by block, which can't overflow for contributions of 32 bits or fewer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from byteps_py.kernels.reduction import reduce
from byteps_py.tensors import DType, Op

#: Elements at a time: they stay in the processor's caches.
_BLOCK = 1 << 14


def square_sum(dtype: DType, inputs: Sequence[int], elements: range, divisor: int = 1) -> float:
    """Of ``elements`` of the sum of ``inputs``, addresses of contributions of a floating dtype, divided by ``divisor``.

    >>> values = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    >>> square_sum(DType.FLOAT32, [values.ctypes.data] * 2, range(1, 3), divisor=2)
    13.0
    """
    average = np.empty(_BLOCK * dtype.itemsize, np.uint8)
    wide = np.empty(_BLOCK, np.float64)
    total = 0.0
    for start in range(elements.start, elements.stop, _BLOCK):
        count = min(_BLOCK, elements.stop - start)
        addresses = [address + start * dtype.itemsize for address in inputs]
        if len(inputs) == 1 and divisor == 1:
            memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(addresses[0])
            found = np.ctypeslib.as_array(memory)
        else:
            reduce(Op.SUM, dtype, addresses, [average.ctypes.data], count, divisor)
            found = average[: count * dtype.itemsize]
        values = wide[:count]
        values[:] = _numbers(dtype, found)
        total += float(values @ values)
    return total


def _numbers(dtype: DType, memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.generic]:
    if dtype is DType.BFLOAT16:
        return (memory.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    kinds = {DType.FLOAT16: np.float16, DType.FLOAT32: np.float32, DType.FLOAT64: np.float64}
    return memory.view(kinds[dtype])
