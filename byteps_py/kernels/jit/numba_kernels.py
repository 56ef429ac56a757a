"""Kernels that numba compiles and caches on disk: for one operation and dtype, the instructions of ``reduction_loops``;
for one update rule and two dtypes, those of ``step_loops``.

Owns numba's set-up. Any thread. Compiling takes numba's global lock; a compiled kernel holds no lock and no GIL while
it runs. Importing this module loads numba, so it is imported late.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from byteps_py.kernels import update_rules
from byteps_py.kernels.jit import llvm, reduction_loops, result_checks, step_loops, vector
from byteps_py.kernels.update_rules import StepKind
from byteps_py.system.log import logger
from byteps_py.tensors import Checks, DType, Op

#: (address of a table, number of inputs, number of outputs, bytes of each, divisor); ``Loops`` describes the table.
Kernel = Callable[[int, int, int, int, int], None]

_SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64, types.int64)


def _reduction(
    typingctx: Any, op: Any, dtype: Any, wanted: Any, table: Any, inputs: Any, outputs: Any, end: Any, divisor: Any
) -> Any:
    """The whole body of a kernel. The first three arguments are constants.

    The instructions are emitted into the kernel itself, never as a function of its own. numba would give that function
    a number, and another process the same number to another function. Loaded from the cache together, one would be
    taken for the other.
    """
    constants = (Op(op.literal_value), DType(dtype.literal_value), Checks(wanted.literal_value))

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        reduction_loops.Loops(builder, *constants, args[3:]).emit()
        return context.get_dummy_value()

    return types.void(op, dtype, wanted, *[types.int64] * 5), emit


reduction: Any = intrinsic(prefer_literal=True)(_reduction)


def build(op: Op, dtype: DType, wanted: Checks = Checks.NONE) -> Kernel:
    """Compile the kernel of ``op`` and ``dtype`` with the checks ``wanted``, or load it from the cache.

    The kernel combines inputs first to last in the widened type and rounds once; it divides the rounded value.
    """
    # numba hashes the kernel's constants into its cache key, so they are plain integers.
    op_code, dtype_code, checks_code = int(op), int(dtype), int(wanted)

    def kernel(table: int, inputs: int, outputs: int, end: int, divisor: int) -> None:
        reduction(op_code, dtype_code, checks_code, table, inputs, outputs, end, divisor)

    version = version_of(reduction_loops, result_checks, vector, llvm)
    kernel.__qualname__ = f"{op.name}_{dtype.name}_{wanted:d}_{version}".lower()
    found: Kernel = compiled(kernel, _SIGNATURE)
    return found


def compiled(kernel: Callable[..., None], signature: Any) -> Any:
    """``kernel`` compiled for ``signature``, or loaded from the cache."""
    try:
        return njit(signature, nogil=True, cache=True, error_model="numpy")(kernel)
    except (RuntimeError, OSError) as error:
        if isinstance(error, RuntimeError) and "cannot cache" not in str(error):
            raise
        # Read-only code and no writable home, or a full disk: the kernel works, but every process compiles its own.
        logger.info("compiled kernels can't be kept (set NUMBA_CACHE_DIR to a writable directory): %s", error)
        return njit(signature, nogil=True, error_model="numpy")(kernel)


def kept_in(kernel: Kernel) -> str:
    """The folder of the kernel's cache file; empty if every process has to compile its own."""
    dispatcher: Any = kernel
    return dispatcher.stats.cache_path or ""


def version_of(*emitters: ModuleType) -> str:
    """A part of the name of a kernel's symbol and of its cache file. The same name must mean the same code in all
    processes.

    If several kernels shared a file, processes that start together could store different kernels under one number, and
    one would later load a product for a sum. numba looks for changes in a kernel's own source file only, so its name
    contains a hash of the sources that emit instructions, and of the processor.
    """
    processor = repr(cpu_target.target_context.codegen().magic_tuple())
    sources = "".join(map(inspect.getsource, emitters))
    return hashlib.blake2b((sources + processor).encode(), digest_size=6).hexdigest()


#: (address of a table, number of inputs, number of outputs, first element, end, divisor); see ``StepLoops``.
StepKernel = Callable[[int, int, int, int, int, int], None]

_STEP_SIGNATURE = types.void(*[types.int64] * 6)


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


def build_step(kind: StepKind) -> StepKernel:
    """Compile the kernel, or load it from the cache."""
    code = kind.code  # numba hashes the kernel's constants into its cache key, so it is a plain integer

    def kernel(table: int, inputs: int, outputs: int, begin: int, end: int, divisor: int) -> None:
        optimizer_step(code, table, inputs, outputs, begin, end, divisor)

    version = version_of(step_loops, update_rules, vector, llvm)
    kernel.__qualname__ = f"step_{code}_{version}"
    found: StepKernel = compiled(kernel, _STEP_SIGNATURE)
    return found
