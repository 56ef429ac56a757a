"""In which order a rank writes a large tensor into its slot, so that others can begin before all is there. Pure.

A reduction begins at the front, and goes on as the front moves. One that scatters has a front for each owner, and
strips of all owners take turns: no machine has to wait until the pieces of those before it are written.
"""

from __future__ import annotations

from collections.abc import Iterator

from byteps_py.tensors import TensorSpec

#: Copied in less than a millisecond; telling of it takes about 15 µs.
STRIP_BYTES = 2 << 20


class Strips:
    """Of a tensor of this ``spec``, in a job of ``size`` ranks.

    >>> from byteps_py.tensors import DType
    >>> spec = TensorSpec("g", DType.FLOAT32, (6 << 18,), scatters=True)
    >>> [(offset >> 20, length >> 20) for offset, length in Strips(spec, 2)]
    [(0, 2), (3, 2), (2, 1), (5, 1)]
    """

    def __init__(self, spec: TensorSpec, size: int) -> None:
        if spec.scatters:
            members = len(spec.members(size))
            itemsize = spec.dtype.itemsize
            counts = [spec.piece(position, members) for position in range(members)]
            self._pieces = [(first * itemsize, count * itemsize) for first, count in counts]
        else:
            self._pieces = [(0, spec.nbytes)]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(offset, length) in bytes, in order."""
        for begin in range(0, max(length for _, length in self._pieces), STRIP_BYTES):
            for first, length in self._pieces:
                if begin < length:
                    yield first + begin, min(STRIP_BYTES, length - begin)

    def written(self, position: int, nbytes: int) -> int:
        """Bytes of the tensor that are there once the first ``nbytes`` of the piece at ``position`` are."""
        begin = max(0, nbytes - 1) // STRIP_BYTES * STRIP_BYTES
        rows_before = sum(min(length, begin) for _, length in self._pieces)
        in_this_row = sum(min(max(0, length - begin), STRIP_BYTES) for _, length in self._pieces[:position])
        return rows_before + in_this_row + nbytes - begin
