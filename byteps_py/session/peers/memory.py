"""Memory between the ranks of one machine: what a rank lays down for its peers, and what it maps of theirs.

Segments are sealed memfds that go from rank to rank as descriptors; nobody else can open them, and they are gone with
the last process that maps them. Not locked: see Neighbours.
"""

from __future__ import annotations

import os

from byteps_py.errors import ProtocolError
from byteps_py.shm import PAGE, Arena, Block, Segment

#: A free block serves what needs at least this part of it.
_LEAST_PART = 4
#: Free blocks beyond this keep their addresses, but not their pages.
_IDLE_BYTES = 256 << 20


class Outgoing:
    """Blocks for parcels, used again as soon as they are free: the one that was freed last first, whose memory is the
    warmest."""

    def __init__(self, idle_bytes: int = _IDLE_BYTES) -> None:
        self._arena = Arena()
        self._idle_bytes = idle_bytes
        self._free: dict[int, list[Block]] = {}  # by size
        self._warm: dict[int, Block] = {}  # by address: free ones with pages, the one that was freed first first
        self._warm_bytes = 0

    @property
    def segments(self) -> list[Segment]:
        """All there are so far; peers must know a segment before they are told of a block in it."""
        return self._arena.segments

    def allocate(self, nbytes: int) -> tuple[Block, Segment]:
        """A block of at least ``nbytes``, and what is to be held while it is written."""
        block = self._find(nbytes)
        return block, self._arena.segments[block.segment]

    def _find(self, nbytes: int) -> Block:
        size = size_class(nbytes)
        blocks = self._free.get(size)
        if not blocks and self._free:
            fitting = [s for s, some in self._free.items() if some and size < s <= _LEAST_PART * size]
            blocks = self._free[min(fitting)] if fitting else None
        if not blocks:
            return self._arena.allocate(size)
        block = blocks.pop()
        if self._warm.pop(block.address, None) is not None:
            self._warm_bytes -= block.nbytes
        return block

    def free(self, block: Block) -> None:
        self._free.setdefault(block.nbytes, []).append(block)
        self._warm[block.address] = block
        self._warm_bytes += block.nbytes
        while self._warm_bytes > self._idle_bytes:
            coldest = self._warm.pop(next(iter(self._warm)))
            self._warm_bytes -= coldest.nbytes
            self._arena.segments[coldest.segment].forget(coldest.offset, coldest.nbytes)

    def close(self) -> None:
        for segment in self._arena.segments:
            segment.let_go()
        self._arena.segments.clear()
        self._free.clear()
        self._warm.clear()


class Incoming:
    """The segments of this rank's peers."""

    def __init__(self) -> None:
        self._segments: dict[tuple[int, int], Segment] = {}  # by owner and number

    def add(self, source: int, number: int, fd: int, nbytes: int) -> None:
        """Takes the descriptor, in any case. Raises ProtocolError for one that can't hold as much for good."""
        try:
            if number and (source, number - 1) not in self._segments:
                raise ProtocolError(f"local rank {source} has told of segment {number} before those that come first")
            segment = Segment(fd, nbytes)
        except (ProtocolError, OSError, ValueError, OverflowError) as error:
            os.close(fd)
            raise ProtocolError(f"local rank {source} has told of {nbytes} bytes that can't be had: {error}") from error
        segment.let_go()  # it is mapped
        self._segments[source, number] = segment

    def find(self, source: int, number: int, end: int) -> Segment:
        """To be held while it is read. Raises ProtocolError if there is no such memory up to ``end``."""
        segment = self._segments.get((source, number))
        if segment is None or end > segment.nbytes:
            raise ProtocolError(f"local rank {source} has laid a parcel where there is no memory: segment {number}")
        return segment

    def close(self) -> None:
        self._segments.clear()


def size_class(nbytes: int) -> int:
    """At least ``nbytes``, in steps of up to a quarter of it, so that tensors of about a size share blocks.

    >>> [size_class(n) for n in (1, 5000, 1 << 20, (1 << 20) + 1)]
    [4096, 8192, 1048576, 1310720]
    """
    step = max(PAGE, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return -(-nbytes // step) * step
