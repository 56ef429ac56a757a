"""``reduce``: combine contributions that lie in memory, in one pass. The one place where tensors are added.

Knows addresses, operation and dtype; must not know tensors' names, ranks or sockets. Any thread; the GIL is released
while a kernel runs. The caller guarantees that the addresses stay valid and that nobody writes there meanwhile.

``square_sum``: the sum of the squares of averaged contributions, for norms. The average is rounded as
``make_step`` rounds it, so a norm is of what a step uses. Squares are added in float64, block by block, which can't
overflow for contributions of 32 bits or fewer.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from byteps_py.errors import UsageError
from byteps_py.kernels.jit import streaming
from byteps_py.tensors import Checks, DType, Op
from byteps_py.wording import count_text

if TYPE_CHECKING:
    from byteps_py.kernels.jit.numba_kernels import Kernel


_kernels: dict[tuple[Op, DType, Checks], Kernel] = {}
_build_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of a reduction with checks. A field that was not asked for is empty, False or 0.

    Attributes:
        poisoned: indices of the inputs that hold NaN or infinity where the result does. For sums and products these
            are all inputs that hold any.
        overflowed: the result is NaN or infinite somewhere although no input is there.
        checksum: of the result's bytes.
    """

    poisoned: tuple[int, ...]
    overflowed: bool
    checksum: int

    @property
    def is_finite(self) -> bool:
        """True if the result holds neither NaN nor infinity."""
        return not self.poisoned and not self.overflowed


_NOTHING = Report((), False, 0)  # shared: making one takes as long as a sum of 8 KB


def reduce(op: Op, dtype: DType, inputs: Sequence[int], outputs: Sequence[int], count: int, divisor: int = 1) -> None:
    """Combine ``count`` elements at each address of ``inputs`` and write the result to each of ``outputs``.

    Elements are combined strictly first to last: float16, bfloat16 and float32 in float32, float64 in float64, integers
    in their own type, wrapping around. The result is rounded once to ``dtype``. If ``divisor`` is above 1, the rounded
    value is then divided by it: true division for floats (in float32, or float64 for float64), rounded again; floor
    division for integers, whose divisor must be below 2**40. MIN and MAX give NaN where any input has one, and order
    -0.0 below 0.0.

    BROADCAST copies its one input bit for bit, and takes no divisor. An output may be exactly one of the inputs;
    otherwise outputs must not overlap anything. Addresses need no alignment. The first use of a pair (op, dtype)
    compiles its kernel or loads it from disk; see ``prepare``.

    Raises:
        UsageError: there is no input or no output, or a BROADCAST has several inputs or a divisor.

    >>> a, b, total = array("f", [1.0, 2.0]), array("f", [10.0, 20.0]), array("f", [0.0, 0.0])
    >>> addresses = [values.buffer_info()[0] for values in (a, b, total)]
    >>> reduce(Op.SUM, DType.FLOAT32, addresses[:2], addresses[2:], count=2)
    >>> list(total)
    [11.0, 22.0]
    """
    bind(op, dtype, inputs, outputs, count, divisor)()


def bind(
    op: Op,
    dtype: DType,
    inputs: Sequence[int],
    outputs: Sequence[int],
    count: int,
    divisor: int = 1,
    past_caches: bool = False,
) -> Callable[[], None]:
    """``reduce`` with these arguments as a function, for repeated calls. Raises what ``reduce`` raises.

    For a small sum, three quarters of the time of ``reduce`` is what ``bind`` does once. ``past_caches``: a plain copy
    goes to memory that no cache holds. Stores that bypass the caches need not read it first, which halves the time.
    """
    nbytes, num_inputs, num_outputs = count * dtype.itemsize, len(inputs), len(outputs)
    if num_inputs == 1 and divisor <= 1:
        return functools.partial(_copy_past_caches if past_caches else _copy, inputs[0], outputs, nbytes)
    _refuse_contradictions(op, inputs, outputs, divisor)
    kernel = _kernels.get((op, dtype, Checks.NONE)) or _build(op, dtype, Checks.NONE)
    table = array("Q", (*inputs, *outputs))

    def run() -> None:
        kernel(table.buffer_info()[0], num_inputs, num_outputs, nbytes, divisor)

    return run


def reduce_checked(
    checks: Checks,
    op: Op,
    dtype: DType,
    inputs: Sequence[int],
    outputs: Sequence[int],
    count: int,
    divisor: int = 1,
) -> Report:
    """``reduce`` that also runs ``checks`` on the result in the same pass. It writes the same bits.

    A kernel with checks is compiled apart from the one without.
    """
    _refuse_contradictions(op, inputs, outputs, divisor)
    kernel = _kernels.get((op, dtype, checks)) or _build(op, dtype, checks)
    # Behind the addresses, room for: which inputs are poisoned, is it an overflow, the checksum.
    found = len(inputs) + len(outputs)
    table = array("Q", (*inputs, *outputs, *[0] * (len(inputs) + 2)))
    kernel(table.buffer_info()[0], len(inputs), len(outputs), count * dtype.itemsize, divisor)
    report = table[found:]
    if not any(report):
        return _NOTHING
    *flags, overflowed, checksum = report
    return Report(tuple(i for i, flag in enumerate(flags) if flag), bool(overflowed), checksum)


def prepare(pairs: Iterable[tuple[Op, DType]], checks: Checks = Checks.NONE) -> None:
    """Compile or load the kernels of these (op, dtype), so that no reduction waits for a compiler. Any thread.

    A kernel that no process on this machine has compiled takes about 0.2 s, any other milliseconds. Loading the
    compiler itself takes half a second.
    """
    for op, dtype in pairs:
        # Without checks a broadcast is a plain copy.
        if (op is not Op.BROADCAST or checks) and (op, dtype, checks) not in _kernels:
            _build(op, dtype, checks)


def prepare_all() -> list[Kernel]:
    """Compile or load every kernel that a service may need, and return them.

    These are each reduction of each dtype, and those of floats a second time, with the check that BYTEPS_NONFINITE
    needs.
    """
    reductions = [op for op in Op if op.is_reduction]
    prepare((op, dtype) for op in reductions for dtype in DType)
    prepare(((op, dtype) for op in reductions for dtype in DType if dtype.is_floating), Checks.FINITE)
    return list(_kernels.values())


def _refuse_contradictions(op: Op, inputs: Sequence[int], outputs: Sequence[int], divisor: int) -> None:
    if not inputs or not outputs or (op is Op.BROADCAST and (len(inputs) > 1 or divisor > 1)):
        what = f"{count_text(len(inputs), 'contribution')} into {count_text(len(outputs), 'place')}"
        raise UsageError(
            f"can't {op.name.lower()} {what} with divisor {divisor}: "
            "a reduction needs at least one of each, a broadcast exactly one contribution and no divisor"
        )


def _build(op: Op, dtype: DType, checks: Checks) -> Kernel:
    # Imported here, so that importing this package does not load a compiler.
    from byteps_py.kernels.jit import numba_kernels

    with _build_lock:
        kernel = _kernels.get((op, dtype, checks))
        if kernel is None:
            kernel = _kernels[op, dtype, checks] = numba_kernels.build(op, dtype, checks)
        return kernel


def _copy(source: int, outputs: Sequence[int], nbytes: int) -> None:
    for output in outputs:
        if output != source:
            ctypes.memmove(output, source, nbytes)  # releases the GIL, as every foreign function of ctypes


def _copy_past_caches(source: int, outputs: Sequence[int], nbytes: int) -> None:
    if not streaming.is_there():
        streaming.prepare()
        _copy(source, outputs, nbytes)
        return
    for output in outputs:
        if output != source:
            streaming.copy_past_caches(output, source, nbytes)


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
