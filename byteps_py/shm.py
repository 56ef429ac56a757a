"""Shared memory that nobody can leak: memfd segments, passed as descriptors, carved by an allocator.

A segment has no name in any file system: it is gone when the last process that maps it is gone, SIGKILL
included, and nobody can open it who was not handed its descriptor. One owner allocates; others map.
Not thread-safe: one thread owns an Arena.
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
_libc = ctypes.CDLL(None)  # its calls release the GIL, which mmap.madvise holds
_MADV_REMOVE = 9
_MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels answer EINVAL and fault page by page instead
_AT_ONCE_BYTES = 1 << 20
_POPULATE_BYTES = 64 << 20  # tens of milliseconds, in which nothing can stop the thread


def _check(fd: int, nbytes: int) -> None:
    """Touching pages that are not there, or that somebody cuts off later, would be SIGBUS."""
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
    """One mapped memfd. ``address`` is where it lies in this process; ``view`` its bytes.

    Raises ProtocolError for a descriptor that can't hold ``nbytes`` for good.
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
        """A new segment of ``nbytes`` (rounded up to pages). Its pages cost nothing until they are touched.

        Raises OSError if there is no room for so many.
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
        """Fault pages in now, so that the first use does not (a fresh page costs 20 times a warm one). Any thread; the
        GIL is free meanwhile. What can't be had now is faulted in later."""
        start, end = offset // PAGE * PAGE, offset + nbytes
        while start < end and self.fd >= 0:  # closed: a process that ends must not wait for gigabytes of pages
            step = min(_POPULATE_BYTES, end - start)
            _libc.madvise(ctypes.c_void_p(self.address + start), ctypes.c_size_t(step), _MADV_POPULATE_WRITE)
            start += step

    def forget(self, offset: int, nbytes: int) -> None:
        """Give the whole pages in this range back to the system; afterwards they read as zeros, for all who map it."""
        start, end = -(-offset // PAGE) * PAGE, (offset + nbytes) // PAGE * PAGE
        if end > start:
            _libc.madvise(ctypes.c_void_p(self.address + start), ctypes.c_size_t(end - start), _MADV_REMOVE)

    def let_go(self) -> None:
        """Give the descriptor back. The memory goes with this object, whose users may be at work yet."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Give the descriptor back. The memory itself goes when its last view does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            with contextlib.suppress(BufferError):  # somebody still holds a view; the mapping goes with it
                self.view.release()
                self._map.close()


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment: which one, where, how long, and its address in this process."""

    segment: int
    offset: int
    nbytes: int
    address: int


class Arena:
    """Blocks out of segments that grow as needed. Freed blocks are used again for the same size class. ``elsewhere``
    runs what takes long (a gigabyte's pages take seconds) on another thread; by default it is done at once."""

    def __init__(
        self, segment_bytes: int = 64 << 20, elsewhere: Callable[[Callable[[], None]], None] | None = None
    ) -> None:
        self._elsewhere = elsewhere
        self.segments: list[Segment] = []
        self._segment_bytes = segment_bytes
        self._used = 0  # in the last segment
        self._free: dict[int, list[Block]] = {}

    def allocate(self, nbytes: int) -> Block:
        """A block of at least ``nbytes``, aligned to a page from one page up and to a cache line below."""
        align = PAGE if nbytes >= PAGE else LINE
        rounded = max(LINE, -(-nbytes // align) * align)
        spare = self._free.get(rounded)
        if spare:
            return spare.pop()
        start = -(-self._used // align) * align
        if not self.segments or start + rounded > self.segments[-1].nbytes:
            self.segments.append(Segment.create(max(self._segment_bytes, rounded)))
            start = 0
        self._used = start + rounded
        segment = self.segments[-1]
        if self._elsewhere is None or rounded <= _AT_ONCE_BYTES:
            segment.populate(start, rounded)
        else:
            self._elsewhere(functools.partial(segment.populate, start, rounded))
        return Block(len(self.segments) - 1, start, rounded, segment.address + start)

    def free(self, block: Block) -> None:
        self._free.setdefault(block.nbytes, []).append(block)

    def let_go(self) -> None:
        """Give the descriptors back; see Segment."""
        for segment in self.segments:
            segment.let_go()

    def close(self) -> None:
        for segment in self.segments:
            segment.close()
        self.segments.clear()
        self._free.clear()
        self._used = 0
