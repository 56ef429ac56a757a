"""Operations that were started and not yet waited for: handle → operation.

A handle is an int, as in Horovod. Any thread; two threads may wait for one operation.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable

import torch

from byteps_py.errors import UsageError
from byteps_py.torch.exchange import Exchange


class Operation:
    """One started exchange of a single tensor. ``deliver`` brings the result from the exchange to ``output``."""

    def __init__(self, exchange: Exchange, output: torch.Tensor, deliver: Callable[[], None]) -> None:
        self.exchange = exchange
        self.output = output
        self._deliver = deliver
        self._error: Exception | None = None
        self._settled = False
        self._lock = threading.Lock()

    @property
    def settled(self) -> bool:
        """The output holds the result, or there is an error to raise; the exchange is free for others."""
        return self._settled

    @property
    def done(self) -> bool:
        """True if ``settle`` would not block."""
        return self._settled or self.exchange.done

    def settle(self) -> None:
        """Wait and deliver, once. An error is kept for ``finish``, which its owner calls."""
        with self._lock:
            if not self._settled:
                try:
                    self.exchange.wait()
                    self._deliver()
                except Exception as error:
                    self._error = error
                self._settled = True

    def finish(self) -> torch.Tensor:
        """The output, holding the result. Raises the operation's error."""
        self.settle()
        if self._error is not None:
            raise self._error
        return self.output


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
        self._occupants[operation.exchange.slot.spec.name] = operation
        return handle

    def occupant(self, name: str) -> Operation | None:
        """The operation that still needs the exchange of this name."""
        operation = self._occupants.get(name)
        return None if operation is None or operation.settled else operation

    def get(self, handle: int) -> Operation:
        """Raises UsageError for a handle that was never given out or was waited for already."""
        try:
            return self._operations[handle]
        except KeyError:
            raise UsageError(f"handle {handle} was not created or has been cleared") from None

    def pop(self, handle: int) -> Operation | None:
        return self._operations.pop(handle, None)

    def clear(self) -> None:
        self._operations.clear()
        self._occupants.clear()
