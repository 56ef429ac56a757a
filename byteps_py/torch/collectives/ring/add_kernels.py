"""The sum of a share, as LLVM instructions: one pass that reads every row and writes the result twice.

The elements are added by the service's own instructions (byteps_py/kernels/jit/vector.py). Any thread. The import loads
LLVM: import this module late.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from byteps_py.kernels.jit import llvm, vector
from byteps_py.tensors import DType, Op

_I64 = ir.IntType(64)
_ELEMENTS = 64  # per iteration: as many float32 elements as fit into registers


def compile_sum(dtype: DType, rows: int, average: bool, past_caches: bool) -> Callable[[int, int], None]:
    """A function of (address of a table, bytes of each row). The table holds the addresses of ``rows`` inputs, of the
    result and of its copy. ``average``: divide by ``rows``. ``past_caches``: write the copy with non-temporal stores;
    it must be aligned to 64 bytes, and its reader has other caches."""
    function = ir.Function(llvm.new_module("byteps_sum"), ir.FunctionType(ir.VoidType(), [_I64, _I64]), "sum")
    builder = ir.IRBuilder(function.append_basic_block())
    table, end = function.args
    entries = [builder.add(table, _I64(8 * i)) for i in range(rows + 2)]
    addresses = [builder.load(builder.inttoptr(entry, _I64.as_pointer()), typ=_I64) for entry in entries]

    def fold(offset: ir.Value, width: int) -> None:
        *sources, target, copy = [builder.add(address, offset) for address in addresses]
        total = vector.load(builder, dtype, width, sources[0])
        for source in sources[1:]:
            total = vector.combine(builder, Op.SUM, dtype, total, vector.load(builder, dtype, width, source))
        result = vector.rounded(builder, dtype, total)
        if average:
            result = vector.divided(builder, dtype, result, _I64(rows))
        vector.store(builder, target, result)
        if past_caches and width > 1:
            llvm.store_past_caches(builder, result, copy)
        else:
            vector.store(builder, copy, result)

    def sweep(start: ir.Value, end: ir.Value, width: int) -> None:
        before, loop, after = builder.block, function.append_basic_block(), function.append_basic_block()
        builder.cbranch(builder.icmp_unsigned("<", start, end), loop, after)
        builder.position_at_end(loop)
        offset = builder.phi(_I64)
        fold(offset, width)
        following = builder.add(offset, _I64(width * dtype.itemsize))
        offset.add_incoming(start, before)
        offset.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_unsigned("<", following, end), loop, after)
        builder.position_at_end(after)

    middle = builder.and_(end, _I64(-_ELEMENTS * dtype.itemsize))
    sweep(_I64(0), middle, _ELEMENTS)
    sweep(middle, end, 1)
    if past_caches:
        llvm.end_of_stores(builder)
    builder.ret_void()
    return llvm.compile_function(function)
