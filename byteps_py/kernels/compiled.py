"""The loop of a reduction, compiled for one operation and dtype and cached on disk.

Owns the order in which memory is read and written, and numba's set-up. What happens to elements is vector.py's.
Compiling takes numba's global lock; compiled kernels hold no lock and no GIL. Import loads numba: import late.

    for each chunk:   in[0] ──load──► total
                      in[1] ──load──► combine ─► total       totals live in registers
                        …
                      round once ─► divide ─► out[0], out[1], …
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from byteps_py.kernels import halves, vector
from byteps_py.log import logger
from byteps_py.tensors import DType, Op

#: (address of a table of the inputs' and outputs' addresses, inputs, outputs, elements, divisor)
Kernel = Callable[[int, int, int, int, int], None]

_SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64, types.int64)
_I64 = ir.IntType(64)
# Enough to hide the latency of an addition; little enough to stay in 16 registers of 256 bits.
_CHUNK_BYTES = 256
# Processors lose track of several inputs read in turns: without a hint, four inputs of float16 come from memory at
# half the speed. 2 KiB ahead was best, or near it, for 2 to 8 inputs in memory and costs nothing in caches.
_AHEAD_BYTES = 2048


def _fold(
    typingctx: Any, op: Any, dtype: Any, width: Any, table: Any, inputs: Any, outputs: Any, offset: Any, divisor: Any
) -> Any:
    """Reduce ``width`` elements that lie ``offset`` bytes into every input. The first three are constants.

    Emitted into the kernel itself and never as a function of its own: numba would number that, other processes
    would give the same number to other functions, and loaded from the cache together they would be taken for one.
    """
    op_, dtype_, width_ = Op(op.literal_value), DType(dtype.literal_value), width.literal_value

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        _emit_fold(builder, op_, dtype_, width_, *args[3:])
        return context.get_dummy_value()

    return types.void(op, dtype, width, *[types.int64] * 5), emit


fold: Any = intrinsic(prefer_literal=True)(_fold)


def _emit_fold(
    builder: ir.IRBuilder,
    op: Op,
    dtype: DType,
    width: int,
    table: ir.Value,
    inputs: ir.Value,
    outputs: ir.Value,
    offset: ir.Value,
    divisor: ir.Value,
) -> None:
    def address(index: ir.Value) -> ir.Value:
        entry = builder.add(table, builder.mul(index, _I64(8)))
        return builder.add(builder.load(builder.inttoptr(entry, _I64.as_pointer())), offset)

    def load(index: ir.Value) -> ir.Value:
        start = address(index)
        vector.prefetch(builder, dtype, width, builder.add(start, _I64(_AHEAD_BYTES)))
        return vector.load(builder, dtype, width, start)

    with builder.goto_entry_block():  # LLVM turns both into registers
        total = builder.alloca(vector.widened_type(dtype, width))
        result = builder.alloca(vector.stored_type(dtype, width))

    builder.store(load(_I64(0)), total)
    with cgutils.for_range_slice(builder, _I64(1), inputs, _I64(1)) as (i, _):
        builder.store(vector.combine(builder, op, dtype, builder.load(total), load(i)), total)
    builder.store(vector.rounded(builder, dtype, builder.load(total)), result)
    with builder.if_then(builder.icmp_signed(">", divisor, _I64(1)), likely=False):
        builder.store(vector.divided(builder, dtype, builder.load(result), divisor), result)
    with cgutils.for_range_slice(builder, inputs, builder.add(inputs, outputs), _I64(1)) as (i, _):
        vector.store(builder, address(i), builder.load(result))


def build(op: Op, dtype: DType) -> Kernel:
    """Compile the kernel of ``op`` and ``dtype``, or load it from the cache.

    Inputs are combined first to last in the widened type and rounded once; the rounded value is divided.
    """
    # Constants of the kernel, and, as numba hashes them, of its cache key: nothing but plain integers.
    op_code, dtype_code, size = int(op), int(dtype), dtype.itemsize
    width = _CHUNK_BYTES // max(size, 4)

    def kernel(table: int, inputs: int, outputs: int, count: int, divisor: int) -> None:
        end = count * size
        wide_end = end - end % (width * size)
        for offset in range(0, wide_end, width * size):
            fold(op_code, dtype_code, width, table, inputs, outputs, offset, divisor)
        for offset in range(wide_end, end, size):
            fold(op_code, dtype_code, 1, table, inputs, outputs, offset, divisor)

    kernel.__qualname__ = _unique_name(op, dtype)
    try:
        return njit(_SIGNATURE, nogil=True, cache=True, error_model="numpy")(kernel)
    except (RuntimeError, OSError) as error:
        if isinstance(error, RuntimeError) and "cannot cache" not in str(error):
            raise
        # Read-only code and no writable home, or a full disk: correct all the same, but every process compiles anew.
        logger.info("compiled kernels can't be kept (set NUMBA_CACHE_DIR to a writable directory): %s", error)
        return njit(_SIGNATURE, nogil=True, error_model="numpy")(kernel)


def _unique_name(op: Op, dtype: DType) -> str:
    """Names the kernel's symbol and its cache file: the same name must mean the same code, in all processes.

    If several kernels shared a file, numba would let processes that start together store different kernels under
    one number, and one would later load a product for a sum. It looks for changes in this source file only.
    """
    processor = repr(cpu_target.target_context.codegen().magic_tuple())
    sources = inspect.getsource(vector) + inspect.getsource(halves)
    version = hashlib.blake2b((sources + processor).encode(), digest_size=6).hexdigest()
    return f"{op.name}_{dtype.name}_{version}".lower()
