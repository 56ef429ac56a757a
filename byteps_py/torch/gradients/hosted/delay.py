"""Delayed updates of a hosted optimizer: a step that is made while the next forward and backward passes run.

    step k:  finish step k-1 ─► new parameters      hand over the gradients of k ─► thread: sums, steps ─┐
    step k+1:  finish step k ◄──────────────────────────────────────────────────────────────────────────┘

Owns the thread, which ends with its step. Must not know what a step does. The training thread calls.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable


class DelayedSteps:
    """``after``: the number of steps that are made at once before the first one that is delayed; None: all.
    ``take``: takes the parameters of a step."""

    def __init__(self, after: int | None, take: Callable[[], None]) -> None:
        self._after, self._take = after, take
        self._made = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_wanted(self) -> bool:
        """True if steps are delayed sooner or later."""
        return self._after is not None

    @property
    def is_due(self) -> bool:
        """True if the next step is delayed."""
        return self._after is not None and self._made >= self._after

    def count(self) -> None:
        """A step was made at once."""
        self._made += 1

    def start(self, work: Callable[[], None]) -> None:
        """Do ``work`` on a thread of its own, until ``finish``, which comes before the next ``start``."""

        def run() -> None:
            try:
                work()
            except BaseException as error:  # raised by ``finish``
                self._error = error

        context = contextvars.copy_context()  # this rank's, of several in one process
        self._thread = threading.Thread(target=context.run, args=(run,), name="byteps-delayed-step", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the step under way, if there is one, and take its parameters. Raises its error."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join()  # its waits have limits of their own
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._take()
