"""The operations of Horovod's and BytePS's functions: found by a name and, until they are waited for, by a handle.

A handle is an int, as in Horovod. Any thread; two threads may wait for one operation.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from byteps_py.errors import MismatchError, UsageError
from byteps_py.torch.collectives.work import Call, Work


class Attempt(NamedTuple):
    """An operation that has begun on one route. ``is_done``: True if ``complete`` would not block. ``complete`` waits,
    writes the results to the outputs, and returns what ``synchronize`` returns."""

    is_done: Callable[[], bool]
    complete: Callable[[], Any]


class NamedWork(Work):
    """An operation with a name. ``on_mismatch`` is called when its owner learns that ranks disagree. It has no timeout
    of its own: the session's stall limit ends its wait."""

    def __init__(self, name: str, attempt: Attempt, on_mismatch: Callable[[], None] | None = None) -> None:
        super().__init__(Call(name, [], threading.TIMEOUT_MAX))
        self.name = name
        self._attempt: Attempt | None = attempt
        self._on_mismatch = on_mismatch
        self._result: Any = None

    @property
    def is_done(self) -> bool:
        """True if ``settle`` would not block."""
        attempt = self._attempt
        return self._over or attempt is None or attempt.is_done()

    def deliver(self) -> Any:
        """Wait, and return the result. Raises the operation's error."""
        self.settle()
        if self._error is not None:
            if self._on_mismatch is not None and isinstance(self._error, MismatchError):
                self._on_mismatch()
            raise self._error
        return self._result

    def _complete(self, deadline: float) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._result = attempt.complete()

    def _is_ready(self) -> bool:
        return self.is_done


class Handles:
    """The operations of one context by handle, and by the name that each occupies."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._operations: dict[int, NamedWork] = {}
        # Weak: the caller that will wait for an operation holds it, and nothing else should keep its output alive.
        self._occupants: weakref.WeakValueDictionary[str, NamedWork] = weakref.WeakValueDictionary()

    def add(self, operation: NamedWork) -> int:
        """Returns a new handle for ``operation``."""
        handle = next(self._next)
        self._operations[handle] = operation
        self._occupants[operation.name] = operation
        return handle

    def occupant(self, name: str) -> NamedWork | None:
        """The operation under way that occupies ``name``, or None."""
        operation = self._occupants.get(name)
        return None if operation is None or operation.is_over else operation

    def get(self, handle: int) -> NamedWork:
        """Raises UsageError for a handle that was never returned or was waited for already."""
        try:
            return self._operations[handle]
        except (KeyError, TypeError):
            raise UsageError(f"handle {handle} was not created or has been cleared") from None

    def pop(self, handle: int) -> NamedWork | None:
        """Remove the handle. Returns its operation, or None."""
        return self._operations.pop(handle, None)

    def settle(self) -> None:
        """Wait for all operations. Their owners get the results, or errors, later."""
        for operation in list(self._operations.values()):
            operation.settle()

    def clear(self) -> None:
        """Forget all operations and names."""
        self._operations.clear()
        self._occupants.clear()
