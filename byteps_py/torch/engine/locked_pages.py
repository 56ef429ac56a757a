"""Which pages are locked for copies of a device.

CUDA refuses a copy of which only a part is locked, and does not lock a page twice. Memory that a slot gave back goes to
others, in other pieces: a new slot may begin where a smaller one began, or in the middle of one.
"""

from __future__ import annotations


class LockedPages:
    """The locked ranges of addresses, and the memory that each holds on to. Not thread-safe."""

    def __init__(self) -> None:
        self._ranges: dict[range, list[memoryview]] = {}

    def add(self, address: int, memory: memoryview) -> tuple[list[range], range | None]:
        """``memory`` begins at ``address`` and has to be locked as a whole.

        Returns the ranges to unlock, and then the one to lock (None: it is locked already). Locked pages stay locked:
        the new range spans all those that it overlaps.
        """
        wanted = range(address, address + memory.nbytes)
        overlapping = [one for one in self._ranges if one.start < wanted.stop and wanted.start < one.stop]
        if any(one.start <= wanted.start and wanted.stop <= one.stop for one in overlapping):
            return [], None
        whole = range(min(one.start for one in [wanted, *overlapping]), max(one.stop for one in [wanted, *overlapping]))
        held = [view for one in overlapping for view in self._ranges.pop(one)]
        self._ranges[whole] = [*held, memory]
        return overlapping, whole

    def remove(self, pages: range) -> None:
        """``pages`` could not be locked."""
        del self._ranges[pages]

    def clear(self) -> list[range]:
        """Forget all ranges, and return them."""
        ranges = list(self._ranges)
        self._ranges.clear()
        return ranges
