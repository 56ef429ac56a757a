"""Operations that were started and not yet waited for: handle → operation.

A handle is an int, as in Horovod. Any thread; two threads may wait for one operation.
"""

from __future__ import annotations

import itertools
import weakref

from byteps_py.errors import UsageError
from byteps_py.torch.engine.work import NamedWork


class Handles:
    """The operations of one context by handle, and which name each occupies."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._operations: dict[int, NamedWork] = {}
        # Weak: a caller that must still wait for an operation holds it, and nothing else should hold its output.
        self._occupants: weakref.WeakValueDictionary[str, NamedWork] = weakref.WeakValueDictionary()

    def add(self, operation: NamedWork) -> int:
        handle = next(self._next)
        self._operations[handle] = operation
        self._occupants[operation.name] = operation
        return handle

    def occupant(self, name: str) -> NamedWork | None:
        """The operation that still needs this name."""
        operation = self._occupants.get(name)
        return None if operation is None or operation.is_over else operation

    def get(self, handle: int) -> NamedWork:
        """Raises UsageError for a handle that was never given out or was waited for already."""
        try:
            return self._operations[handle]
        except (KeyError, TypeError):
            raise UsageError(f"handle {handle} was not created or has been cleared") from None

    def pop(self, handle: int) -> NamedWork | None:
        return self._operations.pop(handle, None)

    def settle(self) -> None:
        """Wait for all; their owners get the results, or errors, later."""
        for operation in list(self._operations.values()):
            operation.settle()

    def clear(self) -> None:
        self._operations.clear()
        self._occupants.clear()
