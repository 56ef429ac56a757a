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
from byteps_py.kernels.update_rules import UpdateRule
from byteps_py.tensors import DType

#: (address of a table, number of inputs, number of outputs, first element, end, divisor); see ``StepLoops``.
StepKernel = Callable[[int, int, int, int, int, int], None]

_SIGNATURE = types.void(*[types.int64] * 6)


def _step(
    typingctx: Any, rule: Any, gradient: Any, parameter: Any, table: Any, inputs: Any, outputs: Any, begin: Any,
    end: Any, divisor: Any,
) -> Any:  # fmt: skip
    """The whole body of a kernel, as in ``numba_kernels``. The first three arguments are constants."""
    constants = (
        UpdateRule.from_code(rule.literal_value),
        DType(gradient.literal_value),
        DType(parameter.literal_value),
    )

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        step_loops.StepLoops(builder, *constants, args[3:]).emit()
        return context.get_dummy_value()

    return types.void(rule, gradient, parameter, *[types.int64] * 6), emit


one_step: Any = intrinsic(prefer_literal=True)(_step)


def build(rule: UpdateRule, gradient: DType, parameter: DType) -> StepKernel:
    """Compile the kernel, or load it from the cache."""
    # numba hashes the kernel's constants into its cache key, so they are plain integers.
    rule_code, gradient_code, parameter_code = rule.code, int(gradient), int(parameter)

    def kernel(table: int, inputs: int, outputs: int, begin: int, end: int, divisor: int) -> None:
        one_step(rule_code, gradient_code, parameter_code, table, inputs, outputs, begin, end, divisor)

    version = version_of(step_loops, update_rules, vector, half_precision, llvm)
    kernel.__qualname__ = f"step_{rule_code}_{gradient.name}_{parameter.name}_{version}".lower()
    found: StepKernel = compiled(kernel, _SIGNATURE)
    return found
