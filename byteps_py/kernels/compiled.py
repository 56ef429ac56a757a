"""A kernel for one operation and dtype: loops.py's instructions, compiled by numba and cached on disk.

Owns numba's set-up. Compiling takes numba's global lock; compiled kernels hold no lock and no GIL. Import loads
numba: import late.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from byteps_py.kernels import checks, halves, intrinsics, loops, vector
from byteps_py.log import logger
from byteps_py.tensors import Checks, DType, Op

#: (address of a table, see loops.py; inputs, outputs, bytes of each, divisor)
Kernel = Callable[[int, int, int, int, int], None]

_SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64, types.int64)


def _reduction(
    typingctx: Any, op: Any, dtype: Any, wanted: Any, table: Any, inputs: Any, outputs: Any, end: Any, divisor: Any
) -> Any:
    """The whole of a kernel. The first three are constants.

    Emitted into the kernel itself and never as a function of its own: numba would number that, other processes
    would give the same number to other functions, and loaded from the cache together they would be taken for one.
    """
    constants = (Op(op.literal_value), DType(dtype.literal_value), Checks(wanted.literal_value))

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        loops.Loops(builder, *constants, args[3:]).emit()
        return context.get_dummy_value()

    return types.void(op, dtype, wanted, *[types.int64] * 5), emit


reduction: Any = intrinsic(prefer_literal=True)(_reduction)


def build(op: Op, dtype: DType, wanted: Checks = Checks.NONE) -> Kernel:
    """Compile the kernel of ``op`` and ``dtype``, or load it from the cache.

    Inputs are combined first to last in the widened type and rounded once; the rounded value is divided.
    """
    # Constants of the kernel, and, as numba hashes them, of its cache key: nothing but plain integers.
    op_code, dtype_code, checks_code = int(op), int(dtype), int(wanted)

    def kernel(table: int, inputs: int, outputs: int, end: int, divisor: int) -> None:
        reduction(op_code, dtype_code, checks_code, table, inputs, outputs, end, divisor)

    kernel.__qualname__ = _unique_name(op, dtype, wanted)
    try:
        return njit(_SIGNATURE, nogil=True, cache=True, error_model="numpy")(kernel)
    except (RuntimeError, OSError) as error:
        if isinstance(error, RuntimeError) and "cannot cache" not in str(error):
            raise
        # Read-only code and no writable home, or a full disk: correct all the same, but every process compiles anew.
        logger.info("compiled kernels can't be kept (set NUMBA_CACHE_DIR to a writable directory): %s", error)
        return njit(_SIGNATURE, nogil=True, error_model="numpy")(kernel)


def kept_in(kernel: Kernel) -> str:
    """The folder in which other processes find it; empty if each has to compile its own."""
    dispatcher: Any = kernel
    return dispatcher.stats.cache_path or ""


def _unique_name(op: Op, dtype: DType, wanted: Checks) -> str:
    """Names the kernel's symbol and its cache file: the same name must mean the same code, in all processes.

    If several kernels shared a file, numba would let processes that start together store different kernels under
    one number, and one would later load a product for a sum. It looks for changes in this source file only.
    """
    processor = repr(cpu_target.target_context.codegen().magic_tuple())
    sources = "".join(map(inspect.getsource, (loops, checks, vector, halves, intrinsics)))
    version = hashlib.blake2b((sources + processor).encode(), digest_size=6).hexdigest()
    return f"{op.name}_{dtype.name}_{wanted:d}_{version}".lower()
