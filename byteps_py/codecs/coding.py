"""``encode``, ``add`` and ``decode``: the arithmetic of codecs, on memory, by address.

Knows addresses, codecs and dtypes; must not know tensors' names, ranks or sockets. Any thread; the GIL is released
while a kernel runs. The caller guarantees that the addresses stay valid and that nobody writes there meanwhile.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from byteps_py.kernels import Report
from byteps_py.tensor_codec import Codec, CodecKind
from byteps_py.tensors import DType

_kernels: dict[tuple[str, CodecKind, DType], Callable[..., None]] = {}
_build_lock = threading.Lock()
_NOTHING = Report((), False, 0)


@dataclass(frozen=True, slots=True)
class Coding:
    """How ``count`` elements of ``dtype`` are coded. ``error``: address of as many float32 numbers that this machine
    has not sent yet; 0 without error feedback."""

    codec: Codec
    dtype: DType
    count: int
    error: int = 0


def encode(coding: Coding, inputs: Sequence[int], output: int) -> Report:
    """Sum the local ranks' tensors at ``inputs`` in float32, first to last, add the error, and code the sum to
    ``output``. The error becomes what the code lacks. Reports what is not finite.

    A block whose sum has NaN or infinity is coded so that its result has, too, and leaves the error as it is.
    """
    table = array("Q", (*inputs, output, coding.error, *[0] * (len(inputs) + 1)))
    arguments = (table.buffer_info()[0], len(inputs), coding.count)
    _kernel("encode", coding.codec, coding.dtype)(*arguments, *_entries(coding.codec))
    return _report(table, len(inputs) + 2)


def add(codec: Codec, inputs: Sequence[int], outputs: Sequence[int], nbytes: int) -> Report:
    """Decode the contributions at ``inputs``, of ``nbytes`` each, sum them in float32, first to last, and code the sum
    to each of ``outputs``, which may be one of the inputs. One contribution is copied as it is."""
    if len(inputs) == 1:
        for output in outputs:
            if output != inputs[0]:
                ctypes.memmove(output, inputs[0], nbytes)
        return _NOTHING if _is_finite(codec, inputs[0], nbytes) else Report((0,), False, 0)
    table = array("Q", (*inputs, *outputs, 0, *[0] * (len(inputs) + 1)))
    _kernel("add", codec, DType.FLOAT32)(table.buffer_info()[0], len(inputs), len(outputs), nbytes, *_entries(codec))
    return _report(table, len(inputs) + len(outputs) + 1)


def decode(coding: Coding, source: int, outputs: Sequence[int], divisor: int, given: int) -> None:
    """Write the answer at ``source`` to each of ``outputs``, rounded to the dtype; divided, and rounded again, if the
    divisor is above 1. ``given``: address of this machine's contribution, of which what a TOPK's answer lacks goes back
    to the error."""
    table = array("Q", (*outputs, given, coding.error))
    arguments = (source, table.buffer_info()[0], len(outputs), coding.count, divisor)
    _kernel("decode", coding.codec, coding.dtype)(*arguments, *_entries(coding.codec))


def prepare(codec: Codec, dtype: DType) -> None:
    """Compile or load the kernels of a codec, so that no round waits for a compiler. Any thread."""
    for what, of in (("encode", dtype), ("add", DType.FLOAT32), ("decode", dtype)):
        _kernel(what, codec, of)


def _is_finite(codec: Codec, address: int, nbytes: int) -> bool:
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    numbers = 4 * (codec.entries or 1)  # the values of TOPK, or the scale
    return bool(np.isfinite(memory.reshape(-1, codec.item_bytes)[:, :numbers].copy().view(np.float32)).all())


def _entries(codec: Codec) -> tuple[int, ...]:
    return (codec.entries,) if codec.kind is CodecKind.TOPK else ()


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

    from byteps_py.codecs import elements, scaled_loops, topk_loops
    from byteps_py.kernels.jit.numba_kernels import compiled, version_of

    with _build_lock:
        if (kernel := _kernels.get((what, kind, dtype))) is not None:
            return kernel
        made: Any
        if kind is CodecKind.TOPK:
            made = topk_loops.add() if what == "add" else getattr(topk_loops, what)(dtype)
        else:
            made = scaled_loops.add(kind) if what == "add" else getattr(scaled_loops, what)(kind, dtype)
        count = made.__code__.co_argcount
        made.__qualname__ = f"{what}_{kind.name}_{dtype.name}_{version_of(elements, scaled_loops, topk_loops)}".lower()
        built: Callable[..., None] = compiled(made, types.void(*[types.int64] * count))
        _kernels[what, kind, dtype] = built
        return built
