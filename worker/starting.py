"""Whether this machine's processes have started: until then they starve each other, and silence proves little. Pure."""

from __future__ import annotations

from collections.abc import Callable


class Starting:
    """``done()`` is called once: the kernels are loaded, and all of the ``local_size`` ranks have been here at once."""

    def __init__(self, local_size: int, done: Callable[[], None]) -> None:
        self._local_size = local_size
        self._done = done
        self._is_loaded = False
        self._most_ranks = 0
        self._is_over = False

    @property
    def has_had_ranks(self) -> bool:
        return self._most_ranks > 0

    def loaded(self) -> None:
        self._is_loaded = True
        self._check()

    def ranks_here(self, count: int) -> None:
        self._most_ranks = max(self._most_ranks, count)
        self._check()

    def _check(self) -> None:
        if self._is_loaded and self._most_ranks >= self._local_size and not self._is_over:
            self._is_over = True
            self._done()
