"""The switch that a job's processes share: whether they count, and which step is the last."""

from __future__ import annotations

import mmap
from pathlib import Path

WARMING_UP, COUNTING, COUNTED = range(3)
_NAME = "switch"


class Switch:
    """Two numbers in a file that all processes map. The first rank writes them; any thread may read them."""

    def __init__(self, folder: Path) -> None:
        with (folder / _NAME).open("r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    @staticmethod
    def make(folder: Path) -> None:
        (folder / _NAME).write_bytes(bytes(16))

    @property
    def state(self) -> int:
        return self._numbers[0]

    @state.setter
    def state(self, state: int) -> None:
        self._numbers[0] = state

    @property
    def last_step(self) -> int:
        """0: not known yet."""
        return self._numbers[1]

    @last_step.setter
    def last_step(self, step: int) -> None:
        self._numbers[1] = step
