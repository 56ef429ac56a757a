"""Codes of tensors that travel in another form: of int8 the arithmetic in plain numpy, and the kernels that use it.
Other codecs have the real kernels, whose arithmetic tests/codecs checks: here it matters when they run, and on what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from byteps_py import codecs
from byteps_py.codecs import Coding, Draw
from byteps_py.kernels import Report
from byteps_py.tensor_codec import SCALED_BLOCK, Codec, CodecKind
from byteps_py.tensors import DType

if TYPE_CHECKING:
    from .memory import Memory

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
_SCALE_BYTES = 4
INT8 = Codec(CodecKind.INT8)


def coded(parts: Sequence[Floats]) -> Bytes:
    """The code of a sum of float32 numbers, first to last. Of each block a scale, and a byte for each element."""
    total = np.zeros(len(parts[0]), np.float32)
    total += parts[0]
    for part in parts[1:]:
        total += part
    blocks = -(-len(total) // SCALED_BLOCK)
    values = np.zeros((blocks, SCALED_BLOCK), np.float32)
    values.reshape(-1)[: len(total)] = total
    scale = (np.abs(values).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float32)
    numbers = np.divide(values, scale, out=np.zeros_like(values), where=scale > 0)
    codes = np.rint(numbers).astype(np.int8)
    rows: Any = np.concatenate([scale.view(np.uint8).reshape(blocks, _SCALE_BYTES), codes.view(np.uint8)], axis=1)
    return np.ascontiguousarray(rows).reshape(-1)


def decoded(data: Bytes) -> Floats:
    """What a code says, up to the end of its last block."""
    rows = data.reshape(-1, _SCALE_BYTES + SCALED_BLOCK)
    scale = np.ascontiguousarray(rows[:, :_SCALE_BYTES]).view(np.float32)
    codes = np.ascontiguousarray(rows[:, _SCALE_BYTES:]).view(np.int8).astype(np.float32)
    result: Floats = (codes * scale).reshape(-1)
    return result


def to_floats(dtype: DType, data: Bytes) -> Floats:
    """Elements of ``dtype`` as float32."""
    return data.view(dtype.name.lower()).astype(np.float32)


def from_floats(dtype: DType, values: Floats, divisor: int = 1) -> Bytes:
    """Rounded to ``dtype``; then divided, and rounded again."""
    kind: np.dtype[Any] = np.dtype(dtype.name.lower())
    with np.errstate(all="ignore"):
        result = values.astype(kind)
        if divisor > 1:
            result = (result.astype(np.float32) / np.float32(divisor)).astype(kind)
    return result.view(np.uint8)


class Codecs:
    """Stands for the module byteps_py.codecs. ``is_lenient``: see ThreadPool."""

    def __init__(self, memory: Memory, is_lenient: bool = False) -> None:
        self._memory = memory
        self._read = memory.find if is_lenient else memory.at

    def prepare(self, codec: Codec, dtype: DType) -> None: ...

    def encode(self, coding: Coding, inputs: Sequence[int], output: int) -> Report:
        nbytes = coding.count * coding.dtype.itemsize
        if coding.codec != INT8:
            given = [self._read(address, nbytes) for address in inputs]
            result = self._memory.at(output, coding.codec.coded_nbytes(coding.count))
            return codecs.encode(coding, [each.ctypes.data for each in given], result.ctypes.data)
        sources = [to_floats(coding.dtype, self._read(address, nbytes)) for address in inputs]
        data = coded(sources)
        self._memory.at(output, len(data))[:] = data
        return Report((), False, 0)

    def add(self, codec: Codec, inputs: Sequence[int], outputs: Sequence[int], nbytes: int, draw: Draw) -> Report:
        sources = [self._read(address, nbytes) for address in inputs]
        if codec != INT8:
            results = [self._memory.at(output, nbytes) for output in outputs]
            places = [[each.ctypes.data for each in those] for those in (sources, results)]
            return codecs.add(codec, places[0], places[1], nbytes, draw)
        data = coded([decoded(each) for each in sources]) if len(sources) > 1 else sources[0].copy()
        for output in outputs:
            self._memory.at(output, nbytes)[:] = data
        return Report((), False, 0)

    def decode(self, coding: Coding, source: int, outputs: Sequence[int], divisor: int, given: int) -> None:
        answer = self._read(source, coding.codec.coded_nbytes(coding.count))
        if coding.codec != INT8:
            results = [self._memory.at(output, coding.count * coding.dtype.itemsize) for output in outputs]
            mine = self._read(given, len(answer)).ctypes.data
            codecs.decode(coding, answer.ctypes.data, [each.ctypes.data for each in results], divisor, mine)
            return
        result = from_floats(coding.dtype, decoded(answer)[: coding.count], divisor)
        for output in outputs:
            self._memory.at(output, coding.count * coding.dtype.itemsize)[:] = result

    def add_up(self, coding: Coding, sources: Sequence[int], outputs: Sequence[int], divisor: int) -> None:
        codes = [self._read(source, coding.codec.coded_nbytes(coding.count)) for source in sources]
        results = [self._memory.at(output, coding.count * coding.dtype.itemsize) for output in outputs]
        if coding.codec != INT8:
            places = [[each.ctypes.data for each in those] for those in (codes, results)]
            codecs.add_up(coding, places[0], places[1], divisor)
            return
        total = decoded(codes[0])[: coding.count]
        for each in codes[1:]:
            total = total + decoded(each)[: coding.count]
        for result in results:
            result[:] = from_floats(coding.dtype, total, divisor)

    def encode_change(self, coding: Coding, source: int, results: Sequence[int], output: int) -> None:
        change, kept = self._floats(source, coding), self._floats(results[0], coding)
        data = coded([change - kept])
        self._memory.at(output, len(data))[:] = data
        self.decode_change(coding, output, results)

    def decode_change(self, coding: Coding, source: int, results: Sequence[int]) -> None:
        change = decoded(self._read(source, coding.codec.coded_nbytes(coding.count)))[: coding.count]
        for result in results:
            kept = self._floats(result, coding)
            kept += change.astype(np.float32)

    def _floats(self, address: int, coding: Coding) -> Any:
        return self._memory.at(address, 4 * coding.count).view(np.float32)
