"""A compiled function that computes checksums of many pieces of memory. The import loads LLVM: import it late.

The checksum is that of result_checks.py: a change within one word always changes it. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from byteps_py.kernels.jit import llvm
from byteps_py.kernels.jit.result_checks import MULTIPLIER, SHIFT

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_LANES = ir.VectorType(_I64, 32)  # a product has a long latency: many at a time
_CHUNK = 8 * _LANES.count


def compile_checksums() -> Callable[[int, int, int, int], None]:
    """The function. Arguments: address of the memory, address of a table with offset and length of each piece, number
    of pieces, address of the checksums."""
    function = ir.Function(llvm.new_module("byteps_checksums"), ir.FunctionType(ir.VoidType(), [_I64] * 4), "checksums")
    base, table, count, found = function.args
    entry, pieces, body, after = (function.append_basic_block() for _ in range(4))
    builder = ir.IRBuilder(entry)
    builder.branch(pieces)
    builder.position_at_end(pieces)
    index = builder.phi(_I64)
    index.add_incoming(_I64(0), entry)
    builder.cbranch(builder.icmp_unsigned("<", index, count), body, after)
    builder.position_at_end(body)
    row = builder.add(table, builder.shl(index, _I64(4)))
    start = builder.add(base, _load(builder, row, _I64))
    nbytes = _load(builder, builder.add(row, _I64(8)), _I64)
    end = builder.add(start, nbytes)
    middle = builder.add(start, builder.and_(nbytes, _I64(-_CHUNK)))
    lanes = _sweep(builder, start, middle, _LANES, ir.Constant(_LANES, [0] * _LANES.count))
    words = builder.add(middle, builder.and_(builder.sub(end, middle), _I64(-8)))
    total = _sweep(builder, middle, words, _I64, _step(builder, _I64(0), nbytes))
    total = _sweep(builder, words, end, _I8, total)
    for lane in range(_LANES.count):
        total = _step(builder, total, builder.extract_element(lanes, ir.IntType(32)(lane)))
    total = builder.xor(total, builder.lshr(total, _I64(SHIFT)))
    place = builder.add(found, builder.shl(index, _I64(3)))
    builder.store(total, builder.inttoptr(place, _I64.as_pointer()), align=8)
    index.add_incoming(builder.add(index, _I64(1)), builder.block)
    builder.branch(pieces)
    builder.position_at_end(after)
    builder.ret_void()
    return llvm.compile_function(function)


def _sweep(builder: ir.IRBuilder, start: ir.Value, end: ir.Value, kind: ir.Type, first: ir.Value) -> ir.Value:
    """The checksum ``first``, extended by every value of ``kind`` between two addresses."""
    before, head, loop, after = builder.block, *(builder.function.append_basic_block() for _ in range(3))
    width = _CHUNK if isinstance(kind, ir.VectorType) else kind.width // 8
    builder.branch(head)
    builder.position_at_end(head)
    address, state = builder.phi(_I64), builder.phi(first.type)
    address.add_incoming(start, before)
    state.add_incoming(first, before)
    builder.cbranch(builder.icmp_unsigned("<", address, end), loop, after)
    builder.position_at_end(loop)
    value = _load(builder, address, kind)
    if kind is _I8:
        value = builder.zext(value, _I64)
    state.add_incoming(_step(builder, state, value), loop)
    address.add_incoming(builder.add(address, _I64(width)), loop)
    builder.branch(head)
    builder.position_at_end(after)
    return state


def _load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1, typ=kind)


def _step(builder: ir.IRBuilder, lane: ir.Value, word: ir.Value) -> ir.Value:
    kind = lane.type

    def constant(value: int) -> ir.Constant:
        return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)

    mixed = builder.xor(lane, builder.lshr(lane, constant(SHIFT)))
    return builder.mul(builder.add(mixed, word), constant(MULTIPLIER))
