"""One communication buffer of constant size, however large the model is (ZeRO-R's constant-size buffers, Rajbhandari et
al., 2020, section 6.2).

Tensors are sent in chunks, each copied together from as many tensors as fit. A second chunk is filled while the first
one is under way. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from byteps_py.errors import UsageError

#: Halves of the buffer: one is filled while the other is under way.
_HALVES = 2


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Elements ``start`` to ``stop`` of tensor number ``tensor``, at ``offset`` in a chunk."""

    tensor: int
    start: int
    stop: int
    offset: int


def cut_chunks(sizes: Sequence[int], capacity: int) -> Iterator[list[ChunkPart]]:
    """Chunks of at most ``capacity`` elements that hold tensors of these sizes, one behind the other. Pure.

    >>> [[(part.tensor, part.start, part.stop) for part in chunk] for chunk in cut_chunks([3, 4], 5)]
    [[(0, 0, 3), (1, 0, 2)], [(1, 2, 4)]]
    """
    chunk: list[ChunkPart] = []
    held = 0
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + capacity - held)
            chunk.append(ChunkPart(tensor, start, stop, held))
            held += stop - start
            start = stop
            if held == capacity:
                yield chunk
                chunk, held = [], 0
    if chunk:
        yield chunk


@dataclass(slots=True)
class _ChunkUnderWay:
    work: dist.Work | None
    finish: Callable[[], None]


class FusedBuffer:
    """``nbytes`` of memory on ``device`` through which tensors of any size go. Raises UsageError if it is too small for
    one element of each half.

        buffer.send(gradients, lambda chunk: dist.reduce(chunk, owner, async_op=True), receive)
        buffer.wait()
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        half = nbytes // _HALVES // 16 * 16
        if half < 16:
            raise UsageError(f"a communication buffer of {nbytes} bytes is too small: use at least {16 * _HALVES}")
        self.nbytes = half * _HALVES
        self._halves = [torch.empty(half, dtype=torch.uint8, device=device) for _ in range(_HALVES)]
        self._under_way: list[_ChunkUnderWay | None] = [None] * _HALVES
        self._next = 0

    def send(
        self,
        tensors: Sequence[torch.Tensor | None],
        sizes: Sequence[int],
        dtype: torch.dtype,
        start: Callable[[torch.Tensor], dist.Work | None],
        receive: Callable[[torch.Tensor, Sequence[ChunkPart]], None],
    ) -> None:
        """Copy ``tensors`` (None: zeros) of ``sizes`` elements into chunks and ``start`` each. ``receive`` gets a chunk
        and what is in it, when its work is done: in a later call, or in ``wait``."""
        capacity = self._halves[0].numel() // dtype.itemsize
        for parts in cut_chunks(sizes, capacity):
            place = self._next
            self._next = (place + 1) % _HALVES
            self._finish(place)
            chunk = self._halves[place].view(dtype)[: parts[-1].offset + parts[-1].stop - parts[-1].start]
            for part in parts:
                into = chunk[part.offset : part.offset + part.stop - part.start]
                tensor = tensors[part.tensor]
                if tensor is None:
                    into.zero_()
                else:
                    into.copy_(tensor.reshape(-1)[part.start : part.stop])
            self._under_way[place] = _ChunkUnderWay(start(chunk), _Receipt(receive, chunk, parts))

    def wait(self) -> None:
        """Receive all chunks that are under way, the oldest first."""
        for step in range(_HALVES):
            self._finish((self._next + step) % _HALVES)

    def forget(self) -> None:
        """Drop what is under way, after an error."""
        self._under_way = [None] * _HALVES

    def _finish(self, place: int) -> None:
        one = self._under_way[place]
        if one is not None:
            self._under_way[place] = None
            if one.work is not None:
                one.work.wait()
            one.finish()


@dataclass(frozen=True, slots=True)
class _Receipt:
    receive: Callable[[torch.Tensor, Sequence[ChunkPart]], None]
    chunk: torch.Tensor
    parts: Sequence[ChunkPart]

    def __call__(self) -> None:
        self.receive(self.chunk, self.parts)
