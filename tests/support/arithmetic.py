"""What reduce() must compute, in numpy and torch, and memory to compute it in. Any thread."""

from __future__ import annotations

import numpy as np
import torch

from byteps_py.kernels import reduce
from byteps_py.tensors import DType, Op

NUMPY = {
    DType.FLOAT32: np.float32,
    DType.FLOAT64: np.float64,
    DType.FLOAT16: np.float16,
    DType.BFLOAT16: np.uint16,  # its bits: numpy has no such type
    DType.INT8: np.int8,
    DType.INT16: np.int16,
    DType.INT32: np.int32,
    DType.INT64: np.int64,
    DType.UINT8: np.uint8,
}


def bits(array):
    return array.view(f"u{array.itemsize}")


def bfloat16(array):
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def widen(dtype, array):
    if dtype is DType.BFLOAT16:
        return bfloat16(array).float().numpy()
    return array.astype(np.float32) if dtype is DType.FLOAT16 else array


def narrow(dtype, array):
    if dtype is DType.BFLOAT16:
        return torch.from_numpy(array).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return array.astype(NUMPY[dtype])


def combine(op, a, b):
    if op is Op.SUM:
        return a + b
    if op is Op.PRODUCT:
        return a * b
    result = np.minimum(a, b) if op is Op.MIN else np.maximum(a, b)
    if result.dtype.kind == "f":  # numpy leaves open which zero it takes
        negative = np.logical_or if op is Op.MIN else np.logical_and
        tie = np.copysign(result, np.where(negative(np.signbit(a), np.signbit(b)), -1, 1)).astype(result.dtype)
        result = np.where(a == b, tie, result)
    return result


def reference(op, dtype, inputs, divisor=1):
    with np.errstate(all="ignore"):
        total = widen(dtype, inputs[0])
        for array in inputs[1:]:
            total = combine(op, total, widen(dtype, array))
        result = narrow(dtype, total)
        if divisor > 1 and dtype.is_floating:
            wide = widen(dtype, result)
            result = narrow(dtype, wide / wide.dtype.type(divisor))
        elif divisor > 1:
            result = np.floor_divide(result.astype(np.int64), divisor).astype(result.dtype)
        return result


def assert_same(dtype, got, expected):
    """The same bits, except that one NaN is as good as another."""
    if dtype.is_floating:
        got_nan, expected_nan = np.isnan(widen(dtype, got)), np.isnan(widen(dtype, expected))
        np.testing.assert_array_equal(got_nan, expected_nan)
        got, expected = got[~got_nan], expected[~expected_nan]
    np.testing.assert_array_equal(bits(got), bits(expected))


def random_values(rng, dtype, count):
    """All bit patterns alike: NaN, infinities and subnormal numbers included."""
    return np.frombuffer(rng.bytes(count * dtype.itemsize), NUMPY[dtype]).copy()


def moderate_values(rng, dtype, count):
    """Numbers near each other, so that sums cancel, round and tie."""
    if dtype.is_floating:
        return narrow(dtype, rng.normal(size=count).astype(np.float64 if dtype is DType.FLOAT64 else np.float32))
    return rng.integers(-9 if dtype is not DType.UINT8 else 0, 10, count).astype(NUMPY[dtype])


class Memory:
    """Elements at a chosen byte offset from a page's worth of alignment, with guards on both sides."""

    GUARD = 256

    def __init__(self, dtype, values, shift):
        nbytes = values.nbytes
        self.raw = np.full(nbytes + 2 * self.GUARD + 128, 0xA5, np.uint8)
        start = self.GUARD + (-self.raw.ctypes.data) % 64 + shift
        self.address = self.raw.ctypes.data + start
        self.values = self.raw[start : start + nbytes].view(NUMPY[dtype])
        self.values[:] = values
        self._guards = (self.raw[:start], self.raw[start + nbytes :])

    def intact(self):
        return all((guard == 0xA5).all() for guard in self._guards)


def run(op, dtype, arrays, divisor=1, outputs=1, shift=0):
    """reduce() into fresh memory; checks that inputs and surroundings are untouched and outputs equal."""
    inputs = [Memory(dtype, array, shift + i * dtype.itemsize) for i, array in enumerate(arrays)]
    results = [Memory(dtype, np.zeros_like(arrays[0]), shift + 3 * i) for i in range(outputs)]
    reduce(op, dtype, [m.address for m in inputs], [m.address for m in results], len(arrays[0]), divisor)
    for memory, array in zip(inputs, arrays, strict=True):
        np.testing.assert_array_equal(bits(memory.values.copy()), bits(array))
    assert all(memory.intact() for memory in inputs + results)
    for memory in results[1:]:
        np.testing.assert_array_equal(bits(memory.values.copy()), bits(results[0].values.copy()))
    return results[0].values.copy()
