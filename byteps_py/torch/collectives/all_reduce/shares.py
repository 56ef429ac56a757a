"""The share of a tensor that each member of a group adds, chunk by chunk, and the addition of contributions.

``Chunks``: in shared memory, chunk ``c`` of every share is *given* in step ``c`` (each member writes, for each other
member, the part which that member adds), *added* in step ``c + 1``, and all members *take* the sums in step ``c + 2``:

    step     0        1        2        3      …
    give     chunk 0  chunk 1  chunk 2  chunk 3
    add               chunk 0  chunk 1  chunk 2
    take                       chunk 0  chunk 1

The last step publishes nothing. If members need their own shares only, they take nothing. All counts are in elements of
the tensor; positions are those of members in their group.

Contributions are added first to last, half precision in float32 and rounded once, before the division of an average.
These are the additions of the service's kernels, so the bits are the same. ``add_to_both`` is for results that others
wait for: one pass writes the sum to its place and to where others read it (kernels/jit/all_reduce_kernels.py). Any
thread.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence

import torch

from byteps_py.kernels.jit import streaming
from byteps_py.kernels.jit.background import Compiled
from byteps_py.tensors import DType
from byteps_py.torch.collectives.dtypes import WIRE

#: Called with (address of a table that holds the addresses of rows, result and copy; bytes of each).
Kernel = Callable[[int, int], None]

_HALF = (torch.float16, torch.bfloat16)
_LINE = 64  # bytes: no two members write to one cache line


class Chunks:
    """The chunks of ``count`` elements of ``itemsize`` bytes among ``members``, which use ``slot_bytes`` of their
    slots. ``scatters``: each member needs its own share only, and all shares have the same size if that is possible.
    Otherwise shares begin at a cache line.

    >>> chunks = Chunks(1000, 4, 2, 1024)
    >>> chunks.chunk_elements, chunks.count, chunks.steps
    (128, 4, 5)
    >>> [chunks.of(1, c) for c in range(4)]
    [(512, 128), (640, 128), (768, 128), (896, 104)]
    """

    def __init__(self, count: int, itemsize: int, members: int, slot_bytes: int, scatters: bool = False) -> None:
        line = _LINE // itemsize
        #: Elements of a chunk: a slot holds one chunk for each member.
        self.chunk_elements = slot_bytes // members // _LINE * line
        self._elements = count
        #: Elements that a member adds; the last members may add fewer.
        self.share = count // members if scatters and count % members == 0 else -(-count // members // line) * line
        #: Chunks of each share.
        self.count = -(-self.share // self.chunk_elements)
        #: Steps that a member publishes.
        self.steps = self.count + 1

    def share_of(self, position: int) -> tuple[int, int]:
        """(first element, number of elements) of the share that the member at ``position`` adds."""
        first, end = (min(number * self.share, self._elements) for number in (position, position + 1))
        return first, end - first

    def of(self, position: int, chunk: int) -> tuple[int, int]:
        """(first element, number of elements) of a chunk of the share that the member at ``position`` adds. The last
        shares may be shorter, or empty."""
        first = min(position * self.share + chunk * self.chunk_elements, self._elements)
        end = min((position + 1) * self.share, first + self.chunk_elements, self._elements)
        return first, max(0, end - first)


def add_up(rows: Sequence[torch.Tensor], total: torch.Tensor, average: bool, contributions: int = 0) -> None:
    """Add the flat ``rows``, all of one dtype and length, into ``total``: a tensor of its own, or one of the first two
    rows. ``average``: divide by the number of ``contributions`` (0: each row is one)."""
    if len(rows) > 2 and total.dtype in _HALF:
        wide = rows[0].float()
        for row in rows[1:]:
            wide += row
        total.copy_(wide)
    else:
        torch.add(rows[0], rows[1], out=total)
        for row in rows[2:]:
            total += row
    if average:
        total.div_(contributions or len(rows))


def add_by_machine(
    rows: Sequence[torch.Tensor], machines: Sequence[Sequence[int]], total: torch.Tensor, average: bool
) -> None:
    """``add_up`` of members on several machines: first the members of each machine, then the machines' sums, as the
    services do. ``machines``: the positions of the rows on each; empty: all are on one."""
    if 1 < len(machines) < len(rows):
        add_up([_sum_of([rows[position] for position in some]) for some in machines], total, average, len(rows))
    else:
        add_up(rows, total, average)


def _sum_of(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(rows) == 1:
        return rows[0]
    total = torch.empty_like(rows[0])
    add_up(rows, total, average=False)
    return total


def add_to_both(
    dtype: torch.dtype, count: int, rows: Sequence[int], total: int | None, copy: int, average: bool
) -> None:
    """Add ``count`` elements of ``dtype`` at each address of ``rows``; write the sum to the addresses ``total`` and
    ``copy``. ``total`` may be one of ``rows``; if ``total`` is None, ``copy`` may be one of them."""
    nbytes = count * dtype.itemsize
    compiled = kernels(WIRE[dtype], len(rows), average)
    if compiled.ready is not None:
        past_caches = total is not None and copy % _LINE == 0 and streaming.goes_past_caches(nbytes)
        table = array("Q", (*rows, copy if total is None else total, copy))
        compiled.ready[past_caches](table.buffer_info()[0], nbytes)
        return
    if nbytes >= streaming.LEAST_BYTES:
        compiled.prepare()
    tensors = [_tensor(dtype, count, address) for address in rows]
    # A row after the first two must not be overwritten before it is added.
    is_direct = total is not None and total not in rows[2:]
    result = _tensor(dtype, count, total) if total is not None and is_direct else torch.empty_like(tensors[0])
    add_up(tensors, result, average)
    streaming.copy(copy, result.data_ptr(), nbytes)
    if total is not None and not is_direct:
        ctypes.memmove(total, result.data_ptr(), nbytes)


def _tensor(dtype: torch.dtype, count: int, address: int) -> torch.Tensor:
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count)


@functools.cache
def kernels(dtype: DType, rows: int, average: bool) -> Compiled[tuple[Kernel, Kernel]]:
    """The compiled sums, with the copy written (through the caches, past them)."""
    name = f"sum of {rows} in {dtype.name.lower()}"

    def build() -> tuple[Kernel, Kernel]:
        from byteps_py.kernels.jit.all_reduce_kernels import compile_sum

        return compile_sum(dtype, rows, average, past_caches=False), compile_sum(dtype, rows, average, past_caches=True)

    return Compiled(name, build, "added and copied one after the other")
