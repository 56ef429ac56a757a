"""``reduce``: combine contributions that lie in memory, in one pass. The one place where tensors are added.

Knows addresses, operation and dtype; nothing of tensors' names, ranks or sockets. Any thread; the GIL is released
while memory is read. The caller guarantees that the addresses stay valid and that nobody writes there meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from byteps_py.errors import UsageError
from byteps_py.tensors import Checks, DType, Op
from byteps_py.wording import count_text

if TYPE_CHECKING:
    from byteps_py.kernels.compiled import Kernel

_kernels: dict[tuple[Op, DType, Checks], Kernel] = {}
_build_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Report:
    """What a reduction with checks has found. ``poisoned``: which of the inputs hold NaN or infinity where the result
    does, so for sums and products all that hold any. ``overflowed``: the result does somewhere although no input does
    there. ``checksum``: of the result's bytes. What was not asked for is empty, False, 0."""

    poisoned: tuple[int, ...]
    overflowed: bool
    checksum: int

    @property
    def is_finite(self) -> bool:
        return not self.poisoned and not self.overflowed


_NOTHING = Report((), False, 0)  # to make one takes as long as a sum of 8 KB


def reduce(op: Op, dtype: DType, inputs: Sequence[int], outputs: Sequence[int], count: int, divisor: int = 1) -> None:
    """Combine ``count`` elements at each address of ``inputs`` and write the result to each of ``outputs``.

    Elementwise and strictly first to last: float16, bfloat16 and float32 in float32, float64 in float64, integers
    in their own type, wrapping around. The result is rounded once to ``dtype``. If ``divisor`` is above 1 the
    rounded value is then divided by it: floats truly (float32, or float64 for float64) and rounded again, integers
    to the floor, by less than 2**40. MIN and MAX give NaN where any input has one, and take -0.0 for less than 0.0.

    BROADCAST copies its one input, bit for bit, and has no divisor. An output may be exactly one of the inputs;
    otherwise outputs overlap nothing. Addresses need no alignment. The first use of a pair (op, dtype) compiles its
    kernel or loads it from disk: see ``prepare``.

    Raises ``UsageError`` if there is no input or no output, or if a BROADCAST has several inputs or a divisor.
    """
    bind(op, dtype, inputs, outputs, count, divisor)()


def bind(
    op: Op, dtype: DType, inputs: Sequence[int], outputs: Sequence[int], count: int, divisor: int = 1
) -> Callable[[], None]:
    """``reduce`` with these arguments, for who calls it again and again: of a small sum, three quarters is what is done
    here once. Raises as ``reduce`` does."""
    nbytes, num_inputs, num_outputs = count * dtype.itemsize, len(inputs), len(outputs)
    if num_inputs == 1 and divisor <= 1:
        return functools.partial(_copy, inputs[0], outputs, nbytes)
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
    """``reduce``, and in the same pass ``checks`` of the result: the same bits are written, and reported on.

    A kernel with checks is another kernel than the one without.
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
    """Make the kernels of these (op, dtype) ready, so that no reduction waits for a compiler. Any thread.

    About 0.2 s for each that no process on this machine has compiled yet, else milliseconds, and half a second for
    loading the compiler itself.
    """
    for op, dtype in pairs:
        # Without checks a broadcast is a plain copy.
        if (op is not Op.BROADCAST or checks) and (op, dtype, checks) not in _kernels:
            _build(op, dtype, checks)


def prepare_all() -> list[Kernel]:
    """Make every kernel ready that a service may need, and return them: each reduction of each dtype, and those of
    floats a second time, as BYTEPS_NONFINITE needs them."""
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
    # Here, not above: whoever only imports this package should not pay for a compiler.
    from byteps_py.kernels import compiled

    with _build_lock:
        kernel = _kernels.get((op, dtype, checks))
        if kernel is None:
            kernel = _kernels[op, dtype, checks] = compiled.build(op, dtype, checks)
        return kernel


def _copy(source: int, outputs: Sequence[int], nbytes: int) -> None:
    for output in outputs:
        if output != source:
            ctypes.memmove(output, source, nbytes)  # releases the GIL, as every foreign function of ctypes
