"""Operations that were started and not yet waited for: handle → operation.

A handle is an int, as in Horovod. Any thread; two threads may wait for one operation.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from byteps_py.errors import MismatchError, UsageError


class Operation:
    """One started operation.

    ``is_done``: true if ``complete`` would not block. ``complete`` waits, brings the results where they belong and
    returns what ``synchronize`` returns; it is called once. ``on_mismatch``: for who is told that ranks disagree.
    """

    def __init__(
        self,
        name: str,
        is_done: Callable[[], bool],
        complete: Callable[[], Any],
        on_mismatch: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._is_done = is_done
        self._complete: Callable[[], Any] | None = complete
        self._on_mismatch = on_mismatch
        self._result: Any = None
        self._error: Exception | None = None
        self._settled = False
        self._lock = threading.Lock()

    @property
    def settled(self) -> bool:
        """The outputs hold the result, or there is an error to raise; its name is free for others."""
        return self._settled

    @property
    def done(self) -> bool:
        """True if ``settle`` would not block."""
        return self._settled or self._is_done()

    def settle(self) -> None:
        """Wait and deliver, once. An error is kept for ``finish``, which its owner calls."""
        with self._lock:
            complete, self._complete = self._complete, None
            if complete is not None:
                try:
                    self._result = complete()
                except Exception as error:
                    self._error = error
                self._settled = True

    def finish(self) -> Any:
        """The result, delivered. Raises the operation's error."""
        self.settle()
        if self._error is not None:
            if isinstance(self._error, MismatchError):
                self._on_mismatch()
            raise self._error
        return self._result


class Handles:
    """The operations of one context by handle, and who occupies which name."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._operations: dict[int, Operation] = {}
        # Weak: whoever must still wait for an operation holds it, and nobody else should hold its output.
        self._occupants: weakref.WeakValueDictionary[str, Operation] = weakref.WeakValueDictionary()

    def add(self, operation: Operation) -> int:
        handle = next(self._next)
        self._operations[handle] = operation
        self._occupants[operation.name] = operation
        return handle

    def occupant(self, name: str) -> Operation | None:
        """The operation that still needs this name."""
        operation = self._occupants.get(name)
        return None if operation is None or operation.settled else operation

    def get(self, handle: int) -> Operation:
        """Raises UsageError for a handle that was never given out or was waited for already."""
        try:
            return self._operations[handle]
        except (KeyError, TypeError):
            raise UsageError(f"handle {handle} was not created or has been cleared") from None

    def pop(self, handle: int) -> Operation | None:
        return self._operations.pop(handle, None)

    def settle(self) -> None:
        """Wait for all; their owners get the results, or errors, later."""
        for operation in list(self._operations.values()):
            operation.settle()

    def clear(self) -> None:
        self._operations.clear()
        self._occupants.clear()
