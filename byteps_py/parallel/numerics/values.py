"""Values of tensors without torch: bits, distances in units of the last place, sums in rank order. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from byteps_py.errors import UsageError

Array = npt.NDArray[Any]

_FLOATS = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.uint32, "float64": np.uint64}
_OTHERS = {
    "bool": np.uint8,
    "uint8": np.uint8,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
}


def bits_of(data: bytes, dtype: str, shape: Sequence[int]) -> Array:
    """A tensor's bits: unsigned integers for floats, else its values. Raises UsageError if the dtype is unknown, or
    the bytes are too few or too many.

    >>> bits_of(bytes([0x80, 0x3F]), "bfloat16", [1]).tolist()
    [16256]
    """
    kind = _FLOATS.get(dtype, _OTHERS.get(dtype))
    if kind is None:
        raise UsageError(f"dtype {dtype} can't be compared element by element: {', '.join((*_FLOATS, *_OTHERS))} can")
    try:
        return np.frombuffer(data, kind).reshape(tuple(shape))
    except ValueError as error:
        raise UsageError(f"{len(data)} bytes for shape {list(shape)} of {dtype}: record the run again") from error


def numbers_of(bits: Array, dtype: str) -> npt.NDArray[np.float64]:
    """The values in float64.

    >>> numbers_of(np.array([0x3F80], np.uint16), "bfloat16").tolist()
    [1.0]
    """
    return _exact(bits, dtype).astype(np.float64)


def _exact(bits: Array, dtype: str) -> Array:
    """The values in float32 or, of larger types, their own."""
    bits = np.ascontiguousarray(bits)
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return bits.view(dtype) if dtype in _FLOATS else bits


def ulps_between(one: Array, other: Array, dtype: str) -> Array | None:
    """The number of representable values from one tensor's elements to the other's; None for other dtypes than
    floats. +0 and -0 are 1 apart.

    >>> ulps_between(np.array([0x3F80], np.uint16), np.array([0x3F82], np.uint16), "bfloat16").tolist()
    [2]
    """
    if dtype not in _FLOATS:
        return None
    ordered = [_ordered(bits) for bits in (one, other)]
    return np.where(ordered[0] > ordered[1], ordered[0] - ordered[1], ordered[1] - ordered[0])


def _ordered(bits: Array) -> Array:
    """Unsigned integers in the order of the floats."""
    sign = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def sum_in_order(parts: Sequence[Array], dtype: str) -> Array:
    """The bits of the sum of several tensors, from the first to the last, as a machine's sum
    (docs/internals/protocol.md): in float32 (float64 for float64), rounded once."""
    total = _exact(parts[0], dtype).copy()
    for part in parts[1:]:
        total += _exact(part, dtype)
    if dtype == "bfloat16":
        return _rounded_to_bfloat16(total)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return total.astype(np.float16).view(np.uint16)
    return total.view(_FLOATS[dtype]) if dtype in _FLOATS else total


def _rounded_to_bfloat16(values: npt.NDArray[np.float32]) -> Array:
    """To the nearest, halves to even."""
    bits = values.view(np.uint32)
    halfway = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits.astype(np.uint64) + halfway) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
