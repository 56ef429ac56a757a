"""``reduce``: combine contributions that lie in memory, in one pass. The one place where tensors are added.

Knows addresses, operation and dtype; nothing of tensors' names, ranks or sockets. Any thread; the GIL is released
while memory is read. The caller guarantees that the addresses stay valid and that nobody writes there meanwhile.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from byteps_py.errors import UsageError
from byteps_py.tensors import DType, Op

if TYPE_CHECKING:
    from byteps_py.kernels.compiled import Kernel

_kernels: dict[tuple[Op, DType], Kernel] = {}
_build_lock = threading.Lock()


def reduce(op: Op, dtype: DType, inputs: Sequence[int], outputs: Sequence[int], count: int, divisor: int = 1) -> None:
    """Combine ``count`` elements at each address of ``inputs`` and write the result to each of ``outputs``.

    Elementwise and strictly first to last: float16, bfloat16 and float32 in float32, float64 in float64, integers
    in their own type, wrapping around. The result is rounded once to ``dtype``. If ``divisor`` is above 1 the
    rounded value is then divided by it: floats truly (float32, or float64 for float64) and rounded again, integers
    to the floor. MIN and MAX give NaN where any input has one, and take -0.0 for less than 0.0.

    BROADCAST copies its one input, bit for bit, and has no divisor. An output may be exactly one of the inputs;
    otherwise outputs overlap nothing. Addresses need no alignment. The first use of a pair (op, dtype) compiles its
    kernel or loads it from disk: see ``prepare``.

    Raises ``UsageError`` if there is no input, or if a BROADCAST has several or a divisor.
    """
    if len(inputs) == 1 and divisor <= 1:
        _copy(inputs[0], outputs, count * dtype.itemsize)
        return
    if not inputs or op is Op.BROADCAST:
        raise UsageError(
            f"can't {op.name.lower()} {len(inputs)} contributions with divisor {divisor}: "
            "a reduction needs at least one, a broadcast exactly one and no divisor"
        )
    kernel = _kernels.get((op, dtype)) or _build(op, dtype)
    table = array("Q", (*inputs, *outputs))  # alive until the kernel returns
    kernel(table.buffer_info()[0], len(inputs), len(outputs), count, divisor)


def prepare(pairs: Iterable[tuple[Op, DType]]) -> None:
    """Make the kernels of these (op, dtype) ready, so that no reduction waits for a compiler. Any thread.

    About 0.2 s for each that no process on this machine has compiled yet, else milliseconds, and half a second for
    loading the compiler itself.
    """
    for op, dtype in pairs:
        if op is not Op.BROADCAST and (op, dtype) not in _kernels:
            _build(op, dtype)


def _build(op: Op, dtype: DType) -> Kernel:
    # Here, not above: whoever only imports this package should not pay for a compiler.
    from byteps_py.kernels import compiled

    with _build_lock:
        kernel = _kernels.get((op, dtype))
        if kernel is None:
            kernel = _kernels[op, dtype] = compiled.build(op, dtype)
        return kernel


def _copy(source: int, outputs: Sequence[int], nbytes: int) -> None:
    for output in outputs:
        if output != source:
            ctypes.memmove(output, source, nbytes)  # releases the GIL, as every foreign function of ctypes
