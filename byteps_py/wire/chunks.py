"""Chunks of a large tensor: they are written, and the chunks of its result are taken, one by one, so that nobody waits
for the whole tensor. Pure.

TensorChunks say in which order a rank writes. A reduction begins at the front, and goes on as the front moves. One that
scatters has a front for each owner, and chunks of all owners take turns: no machine has to wait until the pieces of
those before it are written.

Arriving tracks which chunks of a result, now simply one after the other, have arrived: in any order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterator

from byteps_py.tensors import TensorSpec

#: Copied in less than a millisecond; telling of it takes about 15 µs.
CHUNK_BYTES = 2 << 20


class TensorChunks:
    """The chunks of a tensor of this ``spec``, in a job of ``size`` ranks; none longer than ``chunk_bytes``.

    >>> from byteps_py.tensors import DType
    >>> spec = TensorSpec("g", DType.FLOAT32, (6 << 18,), scatters=True)
    >>> [(offset >> 20, length >> 20) for offset, length in TensorChunks(spec, 2)]
    [(0, 2), (3, 2), (2, 1), (5, 1)]
    """

    def __init__(self, spec: TensorSpec, size: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        if spec.scatters:
            members = len(spec.members(size))
            itemsize = spec.dtype.itemsize
            counts = [spec.piece(position, members) for position in range(members)]
            self._pieces = [(first * itemsize, count * itemsize) for first, count in counts]
        else:
            self._pieces = [(0, spec.nbytes)]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(offset, length) in bytes, in order."""
        for begin in range(0, max(length for _, length in self._pieces), self._chunk_bytes):
            for first, length in self._pieces:
                if begin < length:
                    yield first + begin, min(self._chunk_bytes, length - begin)

    def written(self, position: int, nbytes: int) -> int:
        """Bytes of the tensor that are there once the first ``nbytes`` of the piece at ``position`` are."""
        begin = max(0, nbytes - 1) // self._chunk_bytes * self._chunk_bytes
        rows_before = sum(min(length, begin) for _, length in self._pieces)
        in_this_row = sum(min(max(0, length - begin), self._chunk_bytes) for _, length in self._pieces[:position])
        return rows_before + in_this_row + nbytes - begin


class Arriving:
    """A result of ``nbytes`` bytes, as its ranges arrive.

    >>> result = Arriving(5 << 20)
    >>> result.add(1 << 20, 2 << 20), result.add(0, 1 << 20), result.add(4 << 20, 1 << 20)
    ([], [0], [2])
    """

    def __init__(self, nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._nbytes = nbytes
        self._chunk_bytes = chunk_bytes
        self._left: list[int] = []
        self.begin()

    def begin(self) -> None:
        """Another round: nothing is there."""
        self._left = [
            chunk_at(chunk, self._nbytes, self._chunk_bytes)[1]
            for chunk in range(-(-self._nbytes // self._chunk_bytes))
        ]

    def add(self, offset: int, nbytes: int) -> list[int]:
        """A range is there, for the first time in this round. Returns the chunks that it completes."""
        complete: list[int] = []
        if not nbytes:
            return complete
        end = offset + nbytes
        for chunk in range(offset // self._chunk_bytes, -(-end // self._chunk_bytes)):
            first, length = chunk_at(chunk, self._nbytes, self._chunk_bytes)
            self._left[chunk] -= min(end, first + length) - max(offset, first)
            if not self._left[chunk]:
                complete.append(chunk)
        return complete


def chunk_at(chunk: int, nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> tuple[int, int]:
    """(offset, length) in bytes of a chunk of a result of ``nbytes`` bytes."""
    offset = chunk * chunk_bytes
    return offset, min(chunk_bytes, nbytes - offset)
