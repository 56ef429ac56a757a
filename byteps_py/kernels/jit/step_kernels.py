"""A kernel for one update rule and two dtypes: the instructions of ``step_loops``, compiled by numba, cached on disk.

Any thread. Importing this module loads numba, so it is imported late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from byteps_py.kernels import update_rules
from byteps_py.kernels.jit import half_precision, llvm, step_loops, vector
from byteps_py.kernels.jit.numba_kernels import compiled, version_of
from byteps_py.kernels.update_rules import StepKind

#: (address of a table, number of inputs, number of outputs, first element, end, divisor); see ``StepLoops``.
StepKernel = Callable[[int, int, int, int, int, int], None]

_SIGNATURE = types.void(*[types.int64] * 6)


def _optimizer_step(
    typingctx: Any, kind: Any, table: Any, inputs: Any, outputs: Any, begin: Any, end: Any, divisor: Any
) -> Any:
    """The whole body of a kernel, as in ``numba_kernels``. ``kind`` is a constant: the code of a StepKind."""
    constant = StepKind.from_code(kind.literal_value)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        step_loops.StepLoops(builder, constant, args[1:]).emit()
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 6), emit


optimizer_step: Any = intrinsic(prefer_literal=True)(_optimizer_step)


def build(kind: StepKind) -> StepKernel:
    """Compile the kernel, or load it from the cache."""
    code = kind.code  # numba hashes the kernel's constants into its cache key, so it is a plain integer

    def kernel(table: int, inputs: int, outputs: int, begin: int, end: int, divisor: int) -> None:
        optimizer_step(code, table, inputs, outputs, begin, end, divisor)

    version = version_of(step_loops, update_rules, vector, half_precision, llvm)
    kernel.__qualname__ = f"step_{code}_{version}"
    found: StepKernel = compiled(kernel, _SIGNATURE)
    return found
