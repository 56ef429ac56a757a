"""Shared memory that can't leak: memfd segments, passed as descriptors, and an allocator of blocks in them.

A segment has no name in any file system. It is gone when the last process that maps it is gone, even if that was
killed, and only processes that were given its descriptor can open it. One process allocates, others map. Not
thread-safe: one thread owns an Arena.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

from byteps_py.errors import ProtocolError

PAGE = 4096
LINE = 64
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_libc = ctypes.CDLL(None)  # its calls release the GIL; mmap.madvise would hold it
_MADV_REMOVE = 9
_MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels answer EINVAL and fault page by page instead
_AT_ONCE_BYTES = 1 << 20
_POPULATE_BYTES = 64 << 20  # takes tens of milliseconds, during which nothing can stop the thread


def _check(fd: int, nbytes: int) -> None:
    """Raise ProtocolError unless ``fd`` is a memfd of at least ``nbytes`` that can't shrink.

    An access to pages that do not exist, or that a peer removes later, would raise SIGBUS.
    """
    size = os.fstat(fd).st_size
    if size < nbytes:
        raise ProtocolError(f"a shared segment has {size} bytes, its sender claims {nbytes}")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise ProtocolError("a shared segment must be a memfd") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError("a shared segment must be sealed against shrinking")


class Segment:
    """One mapped memfd. ``address`` is its address in this process, ``view`` its bytes.

    The segment owns ``fd``. Raises ProtocolError if ``fd`` is not a memfd of at least ``nbytes`` that can't shrink.

    >>> segment = Segment.create(100)
    >>> segment.nbytes, bytes(segment.view[:2])
    (4096, b'\\x00\\x00')
    >>> segment.close()
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        _check(fd, nbytes)
        self.fd = fd
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """A new segment of ``nbytes``, rounded up to whole pages. A page uses no memory until it is touched.

        Raises OSError if the system can't provide that many.
        """
        nbytes = -(-nbytes // PAGE) * PAGE
        fd = os.memfd_create("byteps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            return cls(fd, nbytes)
        except OSError:
            os.close(fd)
            raise

    def populate(self, offset: int, nbytes: int) -> None:
        """Fault the pages of this range in now, so that the first use does not have to (a new page takes 20 times as
        long as one that is there). Any thread; the GIL is released. Pages that are not available now come later."""
        start, end = offset // PAGE * PAGE, offset + nbytes
        while start < end and self.fd >= 0:  # stops after close(): a process must not exit gigabytes of pages late
            step = min(_POPULATE_BYTES, end - start)
            _libc.madvise(ctypes.c_void_p(self.address + start), ctypes.c_size_t(step), _MADV_POPULATE_WRITE)
            start += step

    def forget(self, offset: int, nbytes: int) -> None:
        """Give the whole pages in this range back to the system. Afterwards they read as zeros in all processes."""
        start, end = -(-offset // PAGE) * PAGE, (offset + nbytes) // PAGE * PAGE
        if end > start:
            _libc.madvise(ctypes.c_void_p(self.address + start), ctypes.c_size_t(end - start), _MADV_REMOVE)

    def close_descriptor(self) -> None:
        """Close the descriptor. The memory stays mapped as long as this object exists: threads may still use it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Close the descriptor, and unmap the memory when its last view is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            with contextlib.suppress(BufferError):  # a view is left; the mapping goes when that does
                self.view.release()
                self._map.close()


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment: the segment's index in its arena, offset and size in bytes, address in this process."""

    segment: int
    offset: int
    nbytes: int
    address: int


class Arena:
    """Allocates blocks in segments, and makes segments as needed. A freed block is used again for the same size.

    Args:
        segment_bytes: least size of a segment.
        elsewhere: runs a function on another thread. It is used to fault in the pages of large blocks (a gigabyte takes
            seconds); by default that is done at once.
    """

    def __init__(
        self, segment_bytes: int = 64 << 20, elsewhere: Callable[[Callable[[], None]], None] | None = None
    ) -> None:
        self._elsewhere = elsewhere
        self.segments: list[Segment] = []
        self._segment_bytes = segment_bytes
        self._latest = -1  # the segment that ``allocate`` fills
        self._used = 0  # of it
        self._free: dict[int, list[Block]] = {}

    def allocate(self, nbytes: int) -> Block:
        """A block of at least ``nbytes``. It is aligned to a page if it is at least a page, else to a cache line."""
        align = PAGE if nbytes >= PAGE else LINE
        rounded = max(LINE, -(-nbytes // align) * align)
        spare = self._free.get(rounded)
        if spare:
            return spare.pop()
        start = -(-self._used // align) * align
        if self._latest < 0 or start + rounded > self.segments[self._latest].nbytes:
            self.segments.append(Segment.create(max(self._segment_bytes, rounded)))
            self._latest, start = len(self.segments) - 1, 0
        self._used = start + rounded
        segment = self.segments[self._latest]
        if self._elsewhere is None or rounded <= _AT_ONCE_BYTES:
            segment.populate(start, rounded)
        else:
            self._elsewhere(functools.partial(segment.populate, start, rounded))
        return Block(self._latest, start, rounded, segment.address + start)

    def allocate_alone(self, nbytes: int) -> Block:
        """A block of whole pages in a segment of its own. A page uses no memory until it is touched."""
        segment = Segment.create(nbytes)
        self.segments.append(segment)
        return Block(len(self.segments) - 1, 0, segment.nbytes, segment.address)

    def free(self, block: Block) -> None:
        """Make ``block`` available to ``allocate`` again."""
        self._free.setdefault(block.nbytes, []).append(block)

    def close_descriptors(self) -> None:
        """Close the descriptors of all segments; see ``Segment.close_descriptor``."""
        for segment in self.segments:
            segment.close_descriptor()

    def close(self) -> None:
        """Close all segments. No block may be used afterwards."""
        for segment in self.segments:
            segment.close()
        self.segments.clear()
        self._free.clear()
        self._latest, self._used = -1, 0
