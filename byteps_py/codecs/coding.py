"""``encode``, ``add``, ``decode`` and ``add_up``: the arithmetic of codecs, on memory, by address.

Knows addresses, codecs and dtypes; must not know tensors' names, ranks or sockets. Any thread; the GIL is released
while a kernel runs. The caller guarantees that the addresses stay valid and that nobody writes there meanwhile.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import struct
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from byteps_py import kernels
from byteps_py.kernels import Report
from byteps_py.tensor_codec import Codec, CodecKind
from byteps_py.tensors import Checks, DType, Op

#: ``giver`` of what a server codes.
SERVER = (1 << 32) - 1

_kernels: dict[tuple[str, CodecKind, DType], Callable[..., None]] = {}
_build_lock = threading.Lock()
_NOTHING = Report((), False, 0)
#: Decoded at a time of each contribution: so they lie in the processor's caches when they are added.
_ADD_UP_ELEMENTS = 1 << 16
#: The kernel of ``add_up`` sees numbers, and is the same for all codecs.
_ANY = Codec(CodecKind.INT8)


@dataclass(frozen=True, slots=True)
class Draw:
    """From what, beside a codec's seed, its pseudo-random numbers follow: from nothing that a fault changes.

    key: of the tensor. round: of the tensor, counted from its first declaration. block: the partition's first block in
    the tensor. giver: first rank of the machine that codes, or SERVER: they round independently of each other.
    """

    key: int = 0
    round: int = 0
    block: int = 0
    giver: int = SERVER

    def stream(self, codec: Codec) -> int:
        """The number from which kernels derive all others. All machines draw the same elements of a RANDOMK."""
        giver = SERVER if codec.kind is CodecKind.RANDOMK else self.giver
        data = struct.pack("<IQQI", codec.seed, self.key, self.round, giver)
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


_NO_DRAW = Draw()


@dataclass(frozen=True, slots=True)
class Coding:
    """How ``count`` elements of ``dtype`` are coded. ``error``: address of as many float32 numbers that this machine
    has not sent yet; 0 without error feedback. ``moments``: of as many of its momentum; 0 without. ``draw``: of a codec
    that draws. ``agreed``: of a THC, address of a float32 number for each block, zeros at first. ``machines``: how many
    may contribute."""

    codec: Codec
    dtype: DType
    count: int
    error: int = 0
    moments: int = 0
    draw: Draw = _NO_DRAW
    agreed: int = 0
    machines: int = 1


def encode(coding: Coding, inputs: Sequence[int], output: int) -> Report:
    """Sum the local ranks' tensors at ``inputs`` in float32, first to last; with momentum ``mu``, it becomes mu times
    itself plus the sum, and mu times that is added to the sum; add the error, and code the result to ``output``. The
    error becomes what the code lacks. Reports what is not finite.

    A block whose sum has NaN or infinity is coded so that its result has, too, and leaves error and momentum as they
    are.
    """
    table = _table(coding, (*inputs, output))
    found = len(table)
    table.extend([0] * (len(inputs) + 1))
    _kernel("encode", coding.codec, coding.dtype)(table.buffer_info()[0], len(inputs), coding.count)
    return _report(table, found)


def add(codec: Codec, inputs: Sequence[int], outputs: Sequence[int], nbytes: int, draw: Draw = _NO_DRAW) -> Report:
    """Decode the contributions at ``inputs``, of ``nbytes`` each, sum them in float32, first to last, and code the sum
    to each of ``outputs``, which may be one of the inputs. One contribution is copied as it is."""
    if len(inputs) == 1:
        for output in outputs:
            if output != inputs[0]:
                ctypes.memmove(output, inputs[0], nbytes)
        return _NOTHING if _is_finite(codec, inputs[0], nbytes) else Report((0,), False, 0)
    if codec.kind is CodecKind.RANDOMK:  # values at the same places
        return kernels.reduce_checked(Checks.FINITE, Op.SUM, DType.FLOAT32, inputs, outputs, nbytes // 4)
    table = _table(Coding(codec, DType.FLOAT32, 0, draw=draw), (*inputs, *outputs))
    found = len(table)
    table.extend([0] * (len(inputs) + 1))
    _kernel("add", codec, DType.FLOAT32)(table.buffer_info()[0], len(inputs), len(outputs), nbytes)
    return _report(table, found)


def decode(coding: Coding, source: int, outputs: Sequence[int], divisor: int, given: int) -> None:
    """Write the answer at ``source`` to each of ``outputs``, rounded to the dtype; divided, and rounded again, if the
    divisor is above 1. ``given``: address of this machine's contribution, of which what a TOPK's answer lacks goes back
    to the error."""
    table = _table(coding, outputs, given)
    arguments = (source, table.buffer_info()[0], len(outputs), coding.count, divisor)
    _kernel("decode", coding.codec, coding.dtype)(*arguments)


def add_up(coding: Coding, sources: Sequence[int], outputs: Sequence[int], divisor: int) -> None:
    """Decode what machines have sent of a piece, at ``sources``, and sum it in float32, first to last. Write the sum to
    each of ``outputs``, rounded to the dtype; divided, and rounded again, if the divisor is above 1."""
    codec = coding.codec
    step = max(1, _ADD_UP_ELEMENTS // codec.block) * codec.block
    parts = np.empty((len(sources), min(step, max(1, coding.count))), np.float32)
    places = [int(part.ctypes.data) for part in parts]
    for start in range(0, coding.count, step):
        block, count = start // codec.block, min(step, coding.count - start)
        draw = replace(coding.draw, block=coding.draw.block + block)
        for source, place in zip(sources, places, strict=True):
            decode(Coding(codec, DType.FLOAT32, count, draw=draw), source + block * codec.item_bytes, (place,), 1, 0)
        given = _table(Coding(codec, DType.FLOAT32, count), places)
        taken = _table(coding, [output + start * coding.dtype.itemsize for output in outputs])
        arguments = (given.buffer_info()[0], len(places), taken.buffer_info()[0], len(outputs), count, divisor)
        _kernel("add_up", _ANY, coding.dtype)(*arguments)


def encode_change(coding: Coding, source: int, results: Sequence[int], output: int) -> None:
    """Code what the float32 numbers at ``source`` differ by from those at ``results``, which are all alike, to
    ``output``; add what the code decodes to to the results. ``source`` is overwritten."""
    change = _floats(source, coding.count)
    np.subtract(change, _floats(results[0], coding.count), out=change)
    encode(coding, (source,), output)
    decode_change(coding, output, results)


def decode_change(coding: Coding, source: int, results: Sequence[int]) -> None:
    """Add what the code at ``source`` decodes to to the float32 numbers at each of ``results``."""
    change = np.empty(coding.count, np.float32)
    decode(coding, source, (change.ctypes.data,), 1, 0)
    for result in results:
        kept = _floats(result, coding.count)
        np.add(kept, change, out=kept)


def _floats(address: int, count: int) -> npt.NDArray[np.float32]:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def prepare(codec: Codec, dtype: DType) -> None:
    """Compile or load the kernels of a codec, so that no round waits for a compiler. Any thread."""
    for what, of in (("encode", dtype), ("decode", dtype), ("decode", DType.FLOAT32)):
        _kernel(what, codec, of)
    _kernel("add_up", _ANY, dtype)
    if codec.kind is CodecKind.RANDOMK:
        kernels.prepare([(Op.SUM, DType.FLOAT32)], Checks.FINITE)
    else:
        _kernel("add", codec, DType.FLOAT32)


def _table(coding: Coding, addresses: Sequence[int], given: int = 0) -> array[int]:
    """See block_loops.py."""
    codec, draw = coding.codec, coding.draw
    mu = int.from_bytes(struct.pack("<f", codec.momentum), "little")
    entries = codec.levels(coding.machines) if codec.is_thc else codec.entries
    stream, block = (draw.stream(codec), draw.block) if codec.draws else (0, 0)
    return array("Q", (coding.error, coding.moments, mu, entries, stream, block, given, coding.agreed, *addresses))


def _is_finite(codec: Codec, address: int, nbytes: int) -> bool:
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    is_values = codec.kind in (CodecKind.TOPK, CodecKind.RANDOMK)
    numbers = 4 * (codec.entries if is_values else 2 if codec.kind is CodecKind.TOPK_2BIT else 1)  # or the scales
    return bool(np.isfinite(memory.reshape(-1, codec.item_bytes)[:, :numbers].copy().view(np.float32)).all())


def _report(table: array[int], found: int) -> Report:
    *flags, overflowed = table[found:]
    if not any(flags) and not overflowed:
        return _NOTHING
    return Report(tuple(i for i, flag in enumerate(flags) if flag), bool(overflowed), 0)


def _kernel(what: str, codec: Codec, dtype: DType) -> Callable[..., None]:
    key = what, codec.kind, dtype
    return _kernels.get(key) or _build(*key)


def _build(what: str, kind: CodecKind, dtype: DType) -> Callable[..., None]:
    # Imported here, so that importing this package does not load a compiler.
    from numba.core import types

    from byteps_py.codecs import (
        block_loops,
        decoded_loops,
        dithering_loops,
        elements,
        onebit_loops,
        randomk_loops,
        scaled_loops,
        thc_loops,
        topk_loops,
    )
    from byteps_py.kernels.jit.numba_kernels import compiled, version_of

    with _build_lock:
        if (kernel := _kernels.get((what, kind, dtype))) is not None:
            return kernel
        loops: Any = scaled_loops
        if what == "add_up":
            loops = decoded_loops
        elif kind in (CodecKind.TOPK, CodecKind.TOPK_2BIT):
            loops = topk_loops
        elif kind is CodecKind.RANDOMK:
            loops = randomk_loops
        elif kind in (CodecKind.ONEBIT, CodecKind.ONEBIT_SCALED):
            loops = onebit_loops
        elif kind in (CodecKind.THC, CodecKind.THC_WIDE):
            loops = thc_loops
        elif kind >= CodecKind.DITHERING_LINEAR:
            loops = dithering_loops
        facts: dict[str, Any] = {"kind": kind, "dtype": dtype}
        wanted = inspect.signature(getattr(loops, what)).parameters
        made = getattr(loops, what)(**{name: facts[name] for name in wanted})
        count = made.__code__.co_argcount
        sources = version_of(elements, block_loops, loops)
        made.__qualname__ = f"{what}_{kind.name}_{dtype.name}_{sources}".lower()
        built: Callable[..., None] = compiled(made, types.void(*[types.int64] * count))
        _kernels[what, kind, dtype] = built
        return built
