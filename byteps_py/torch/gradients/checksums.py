"""Checksums of gradients that were handed over: a change in between is noticed, however it was made.

PyTorch counts changes in ``Tensor._version``, but not those of its own unscaling kernel, of ``grad.data.mul_()`` or of
``grad.numpy()[…]``. Knows memory only. Any thread. What computes them is compiled in a thread
(kernels/jit/background.py); until it is ready, zlib's does.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from array import array
from collections.abc import Callable, Sequence

from byteps_py.kernels.jit.background import Compiled

#: (address of the memory, of a table of offset and length of each piece, number of pieces, address for the checksums)
Kernel = Callable[[int, int, int, int], None]


class Pieces:
    """Where the pieces of some memory lie, one after the other."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._table = array("Q")
        offset = 0
        for nbytes in lengths:
            self._table.extend((offset, nbytes))
            offset += nbytes
        self._count = len(lengths)
        self._found = array("Q", bytes(8 * self._count)), array("Q", bytes(8 * self._count))
        self._kernel: Kernel | None = None

    def note(self, address: int) -> None:
        """Take the checksums of what lies at ``address`` now."""
        self._kernel = kernel().ready or _by_zlib
        self._compute(address, 0)

    def changed(self, address: int) -> int | None:
        """The first piece that is another at ``address`` than it was where ``note`` has looked, if there is one."""
        self._compute(address, 1)
        before, after = self._found
        if before == after:
            return None
        return next(i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)

    def _compute(self, address: int, which: int) -> None:
        if self._kernel is not None:
            self._kernel(address, self._table.buffer_info()[0], self._count, self._found[which].buffer_info()[0])


def _by_zlib(address: int, table: int, count: int, found: int) -> None:
    places = (ctypes.c_uint64 * (2 * count)).from_address(table)
    results = (ctypes.c_uint64 * count).from_address(found)
    for i in range(count):
        offset, nbytes = places[2 * i], places[2 * i + 1]
        results[i] = zlib.crc32((ctypes.c_char * nbytes).from_address(address + offset)) if nbytes else 0


@functools.cache
def kernel() -> Compiled[Kernel]:
    """The one of this process."""

    def build() -> Kernel:
        from byteps_py.torch.gradients.checksum_kernel import compile_checksums

        return compile_checksums()

    return Compiled("checksums", build, "computed by zlib")
