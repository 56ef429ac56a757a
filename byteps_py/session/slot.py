"""A declared tensor in a training process, and how fast results come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from byteps_py.tensors import TensorSpec

#: The length of the intervals of ``ResultRate``.
SPAN_S = 10.0


@dataclass(slots=True, eq=False, weakref_slot=True)
class Slot:
    """The memory of a declared tensor in this process, and the state of its current round.

    ``inputs``: the buffers for contributions, used in turn; each is a writable view of ``spec.nbytes`` bytes.
    ``result``: a writable view of the result, valid once ``wait`` has returned. ``result`` may be the same memory as an
    input.
    """

    spec: TensorSpec
    inputs: tuple[memoryview, ...]
    result: memoryview
    id: int = 0
    round: int = 0  # rounds handed over so far
    done_round: int = 0  # rounds delivered so far
    begun_bytes: int = 0  # of the next round: handed over in part so far
    chunks: list[int] = field(default_factory=list)  # of the current result: delivered, not yet taken by the caller
    nonfinite_ranks: int = 0  # that made the latest result NaN or infinite, if the spec asks: see rank_bits.py
    error: Exception | None = None

    @property
    def input(self) -> memoryview:
        """The buffer for the next contribution, of ``spec.nbytes`` bytes."""
        return self.inputs[self.round % len(self.inputs)]

    @property
    def pending(self) -> bool:
        """True if a round was handed over and is neither delivered nor failed."""
        return self.error is None and self.done_round < self.round


class ResultRate:
    """The observer of every session: how many bytes of results come in a second. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._bytes = 0
        self._since = clock()
        self._last: tuple[int, float] | None = None

    def begun(self, slot: Slot, at_ns: int | None = None) -> None:
        """See Observer."""

    def delivered(self, slot: Slot) -> None:
        """See Observer."""
        with self._lock:
            now = self._clock()
            if now - self._since >= SPAN_S:
                self._end_span(now)
            self._bytes += slot.spec.nbytes

    def closed(self) -> None:
        """See Observer."""

    def speed(self) -> tuple[int, float]:
        """(time in ms since the epoch, MB/s) of the last interval of ``SPAN_S`` that is over; before, of the present
        one."""
        with self._lock:
            now = self._clock()
            if now - self._since >= SPAN_S:
                self._end_span(now)
            return self._last or self._measured(now)

    def _measured(self, now: float) -> tuple[int, float]:
        elapsed = now - self._since
        return int(time.time() * 1e3), self._bytes / elapsed / 1e6 if elapsed > 0 else 0.0

    def _end_span(self, now: float) -> None:
        self._last = self._measured(now)
        self._bytes, self._since = 0, now
