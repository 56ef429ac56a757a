"""Memory for large results that the caller has no tensor for: ``push_pull`` and ``allreduce`` out of place.

Fresh memory costs a page fault for every 4 KB, which takes longer than the sum itself (0.7 GB/s). So the pool keeps the
memory of results that have died, by size, and the next result of that size lies in pages that are there already. A
result is an ordinary tensor; its memory comes back when the last tensor that shares it is gone. Like a tensor made from
a numpy array, it can't be resized.

Any thread; a result may die in any thread, and at any time.
"""

from __future__ import annotations

import functools
import math
import mmap
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from byteps_py.torch.collectives.slot_view import capacity_for

#: Smaller results come from malloc, which keeps small memory by itself.
LEAST_BYTES = 1 << 20
#: Free memory that the pool keeps in any case.
_KEPT_BYTES = 64 << 20


class _Lease(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """The memory of one result: torch's storage keeps it, and lets it go with the last tensor."""

    give_back: Callable[[], None] | None = None  # none for arrays that numpy derives from it

    def __del__(self) -> None:
        if self.give_back is not None:
            self.give_back()


class ResultPool:
    """Keeps ``kept_bytes`` of free memory, or as much as results have taken at one time if that is more."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        # The memory of results that have died. A finalizer may interrupt the thread that holds the lock, so it takes
        # none.
        self._returned: deque[mmap.mmap] = deque()
        self._free: OrderedDict[int, list[mmap.mmap]] = OrderedDict()  # by size, that used longest ago first
        self._leased_bytes = 0
        self._most_leased_bytes = 0

    @property
    def free_bytes(self) -> int:
        """The number of bytes in memory that no result uses."""
        with self._lock:
            self._take_back()
            return self._free_bytes()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous CPU tensor whose values are undefined, as torch.empty makes it."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < LEAST_BYTES:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        with self._lock:
            memory = self._lease(capacity_for(nbytes))
        lease = np.frombuffer(memory, np.uint8, nbytes).view(_Lease)
        lease.give_back = functools.partial(self._returned.append, memory)
        return torch.from_numpy(lease).view(dtype).view(tuple(shape))

    # ---- with the lock held ----------------------------------------------------------------------------

    def _lease(self, size: int) -> mmap.mmap:
        self._take_back()
        free = self._free.get(size)
        memory = free.pop() if free else _new(size)
        if free is not None:
            self._free.move_to_end(size)
        self._leased_bytes += size
        self._most_leased_bytes = max(self._most_leased_bytes, self._leased_bytes)
        return memory

    def _take_back(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._leased_bytes -= len(memory)
            self._free.setdefault(len(memory), []).append(memory)
        most = max(self._kept_bytes, self._most_leased_bytes)
        while self._free and self._free_bytes() + self._leased_bytes > most:
            size, free = next(iter(self._free.items()))
            if free:
                free.pop()  # unmapped with the last array that shows it, which has gone
            if not free:
                del self._free[size]

    def _free_bytes(self) -> int:
        return sum(size * len(free) for size, free in self._free.items())

    def clear(self) -> None:
        """Give the memory that no result uses back to the system."""
        with self._lock:
            self._take_back()
            self._free.clear()
            self._most_leased_bytes = self._leased_bytes


def _new(size: int) -> mmap.mmap:
    # Private: in a forked child (a DataLoader's worker, say) a result keeps its value, as any tensor does.
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


#: The pool of this process.
RESULTS = ResultPool()


def empty_result(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor for a result, of the dtype and on the device of ``like``; its values are undefined."""
    return RESULTS.empty(shape, like.dtype) if like.is_cpu else like.new_empty(tuple(shape), requires_grad=False)
