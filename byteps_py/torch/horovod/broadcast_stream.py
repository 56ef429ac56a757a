"""Broadcast of any number of bytes through a few fixed slots, for data sent once: objects and optimizer states.

If each such tensor had a name, each would keep a slot of shared memory for the rest of the job. All ranks must know the
sizes, and call in the same order. One thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.slot_view import PieceView, TensorRequest

#: A chunk has the smallest of these sizes that holds the remaining bytes, or the largest.
CHUNK_BYTES = (4 << 10, 64 << 10, 1 << 20, 4 << 20)
#: The most chunks in flight at once.
WINDOW = 4

Piece = tuple[int, int, int]  # (buffer, start, length)


def cut(lengths: Sequence[int]) -> Iterator[tuple[int, list[Piece]]]:
    """Split buffers of ``lengths`` bytes, laid end to end, into chunks: (chunk size, its pieces).

    >>> list(cut([5000, 100]))
    [(65536, [(0, 0, 5000), (1, 0, 100)])]
    >>> list(cut([]))
    []
    """
    left = sum(lengths)
    buffer = start = 0
    while left:
        size = next((size for size in CHUNK_BYTES if size >= left), CHUNK_BYTES[-1])
        pieces: list[Piece] = []
        room = min(size, left)
        left -= room
        while room:
            length = min(room, lengths[buffer] - start)
            if length:
                pieces.append((buffer, start, length))
            start += length
            room -= length
            if start == lengths[buffer]:
                buffer, start = buffer + 1, 0
        yield size, pieces


def broadcast_stream(
    context: Context, buffers: Sequence[torch.Tensor], root: int, label: str, group: tuple[int, ...] = ()
) -> None:
    """Copy the root's flat uint8 ``buffers`` (host memory) to the ranks of ``group`` (empty: all), in place.

    label: differs between kinds of streams and between groups. Raises as Session.wait does.
    """
    is_root = context.session.rank == root
    in_flight: deque[tuple[PieceView, list[Piece]]] = deque()

    def receive() -> None:
        slot_view, pieces = in_flight.popleft()
        slot_view.wait()
        if not is_root:
            offset = 0
            for buffer, start, length in pieces:
                buffers[buffer][start : start + length].copy_(slot_view.results[0][offset : offset + length])
                offset += length

    for number, (size, pieces) in enumerate(cut([b.numel() for b in buffers])):
        if len(in_flight) == WINDOW:
            receive()
        name = f"{label}.{root}.{size}.{number % WINDOW}"
        spec = TensorSpec(name, DType.UINT8, (size,), Op.BROADCAST, root=root, group=group)
        (slot_view,) = context.slot_views([TensorRequest(spec, torch.uint8, ((size,),), torch.device("cpu"))])
        if is_root:
            offset = 0
            for buffer, start, length in pieces:
                slot_view.inputs[0][offset : offset + length].copy_(buffers[buffer][start : start + length])
                offset += length
        slot_view.contribute_input()  # the data are in the slot already
        in_flight.append((slot_view, pieces))
    while in_flight:
        receive()
