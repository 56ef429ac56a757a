"""The kernel that sums what contributions decode to, for a machine that keeps the sum: see ``coding.add_up``.

Importing this module loads numba, so it is imported late. Any thread. Tables are those of block_loops.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from byteps_py.codecs.block_loops import F32, deliver, sum_inputs
from byteps_py.tensors import DType

_BLOCK = 4096


def add_up(dtype: DType) -> Callable[..., Any]:
    """(table of inputs, inputs, table of outputs, outputs, elements, divisor): sum float32 numbers, first to last, and
    write the sum to each output, rounded; divided, and rounded again, if the divisor is above 1."""
    of = int(dtype)

    def kernel(given: int, inputs: int, taken: int, outputs: int, count: int, divisor: int) -> None:
        values, nothing = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
        for start in range(0, count, _BLOCK):
            n = min(_BLOCK, count - start)
            sum_inputs(F32, given, inputs, start, n, values, nothing)
            deliver(of, taken, outputs, start, n, divisor, values)

    return kernel
