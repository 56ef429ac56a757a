"""Shared memory between the ranks of one machine: the memory that a rank writes for its peers, and its mappings of
theirs.

Segments are sealed memfds whose descriptors go from rank to rank. No other process can open them, and they are freed
with the last process that maps them. Not locked: PeerTransport calls with its lock held.
"""

from __future__ import annotations

import os

from byteps_py.errors import ProtocolError
from byteps_py.system.shm import PAGE, Arena, Block, Segment

#: A free block is used for a payload that needs at least 1 / _LEAST_PART of it.
_LEAST_PART = 4
#: Free blocks beyond this keep their addresses, but give their pages back.
_IDLE_BYTES = 256 << 20


class OutgoingMemory:
    """Blocks for payloads. A freed block is reused as soon as possible, the latest first, as its memory is in the
    caches."""

    def __init__(self, idle_bytes: int = _IDLE_BYTES) -> None:
        self._arena = Arena()
        self._idle_bytes = idle_bytes
        self._free: dict[int, list[Block]] = {}  # by size
        self._warm: dict[int, Block] = {}  # by address: free blocks with pages, the oldest first
        self._warm_bytes = 0

    @property
    def segments(self) -> list[Segment]:
        """All segments so far. A segment must be announced to a peer before a block in it is."""
        return self._arena.segments

    def allocate(self, nbytes: int) -> tuple[Block, Segment]:
        """A block of at least ``nbytes`` bytes, and its segment, to which the caller keeps a reference while it
        writes."""
        block = self._find(nbytes)
        return block, self._arena.segments[block.segment]

    def allocate_alone(self, nbytes: int) -> tuple[Block, Segment]:
        """A block of whole pages in a segment of its own, which is never used for payloads. No page of it is touched
        yet."""
        block = self._arena.allocate_alone(nbytes)
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
        """Reuse ``block`` from now on."""
        self._free.setdefault(block.nbytes, []).append(block)
        self._warm[block.address] = block
        self._warm_bytes += block.nbytes
        while self._warm_bytes > self._idle_bytes:
            coldest = self._warm.pop(next(iter(self._warm)))
            self._warm_bytes -= coldest.nbytes
            self._arena.segments[coldest.segment].forget(coldest.offset, coldest.nbytes)

    def close(self) -> None:
        """Unmap all segments. Peers that have mapped them keep them."""
        for segment in self._arena.segments:
            segment.close_descriptor()
        self._arena.segments.clear()
        self._free.clear()
        self._warm.clear()


class IncomingMemory:
    """The mapped segments of this rank's peers."""

    def __init__(self) -> None:
        self._segments: dict[tuple[int, int], Segment] = {}  # by owner and number

    def add(self, source: int, number: int, fd: int, nbytes: int) -> None:
        """Map segment ``number`` of ``source``. Takes ownership of ``fd`` in any case. Raises ProtocolError for a
        descriptor that is not sealed at ``nbytes`` bytes."""
        try:
            if number and (source, number - 1) not in self._segments:
                raise ProtocolError(f"rank {source} announced segment {number} before earlier ones")
            segment = Segment(fd, nbytes)
        except (ProtocolError, OSError, ValueError, OverflowError) as error:
            os.close(fd)
            raise ProtocolError(
                f"rank {source} announced a segment of {nbytes} bytes that can't be mapped: {error}"
            ) from error
        segment.close_descriptor()  # the mapping stays
        self._segments[source, number] = segment

    def find(self, source: int, number: int, end: int) -> Segment:
        """The segment, to which the caller keeps a reference while it reads. Raises ProtocolError if it is not mapped
        up to ``end`` bytes."""
        segment = self._segments.get((source, number))
        if segment is None or end > segment.nbytes:
            raise ProtocolError(f"rank {source} sent a payload outside of its memory: segment {number}")
        return segment

    def close(self) -> None:
        """Unmap all segments."""
        self._segments.clear()


def size_class(nbytes: int) -> int:
    """``nbytes`` rounded up, by at most a quarter, so that tensors of similar sizes share blocks.

    >>> [size_class(n) for n in (1, 5000, 1 << 20, (1 << 20) + 1)]
    [4096, 8192, 1048576, 1310720]
    """
    step = max(PAGE, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return -(-nbytes // step) * step
