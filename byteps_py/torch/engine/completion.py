"""Who completes the futures of a sequence of operations: one thread at a time waits, in order.

Never a thread that runs collectives: callbacks run where a future is completed, and may start collectives themselves.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from byteps_py.torch.engine.threads import POOL


class Completable(Protocol):
    """Something with a future."""

    def settle_whatever_comes(self) -> None:
        """Return when it is over, well or not. Raises nothing."""

    def fire(self) -> None:
        """Complete the future: its callbacks run here."""


class Completer:
    """Completes the futures of one group in the order of the calls. Callbacks of one don't hold up the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Completable] = deque()
        self._is_served = False

    def add(self, work: Completable) -> None:
        with self._lock:
            self._waiting.append(work)
            if self._is_served:
                return
            self._is_served = True
        POOL.run(self._serve)

    def _serve(self) -> None:
        with self._lock:
            work = self._waiting.popleft()
        work.settle_whatever_comes()
        with self._lock:
            self._is_served = bool(self._waiting)
            more = self._is_served
        if more:
            POOL.run(self._serve)  # another thread waits for the next one while callbacks run on this one
        work.fire()
