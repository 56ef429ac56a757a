"""Messages that wait for their turn: one queue for each peer, tag and direction, first in, first out.

A message begins at once if none is before it and there is room. Else it waits without blocking the caller: a thread of
the pool begins it, in order, as soon as there is room. Until then its tensor must not change (as always before
``wait``). Any thread may call.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, TypeVar

from byteps_py.errors import StallError
from byteps_py.torch.engine.completion import POOL
from byteps_py.torch.engine.group_work import GroupContext, GroupWork
from byteps_py.torch.engine.work import Call


class QueuedMessage(GroupWork):
    """``begun`` is set once the message has begun, or could not; None: it began at once."""

    def __init__(self, around: GroupContext, call: Call) -> None:
        super().__init__(around, call)
        (self.tensor,) = call.outputs
        self.begun: threading.Event | None = None
        self.failure: Exception | None = None

    def _wait_for_turn(self, deadline: float) -> None:
        """Raises the failure to begin."""
        if self.begun is not None:
            self._slices(deadline, self._begin_within)
        if self.failure is not None:
            raise self.failure

    def _begin_within(self, timeout_s: float) -> None:
        if self.begun is not None and not self.begun.wait(timeout_s):
            raise StallError(f"{self.what}: waits for earlier ones")

    @property
    def has_begun(self) -> bool:
        """False, too, if it could not begin."""
        return (self.begun is None or self.begun.is_set()) and self.failure is None


M = TypeVar("M", bound=QueuedMessage)


class MessageQueue(ABC, Generic[M]):
    """Subclasses say what room is, and how a message begins."""

    def __init__(self, around: GroupContext) -> None:
        self.around = around
        self.lock = threading.RLock()  # a message may be begun again while it is held
        self._waiting: deque[M] = deque()
        self._is_served = False

    @abstractmethod
    def _has_room(self) -> bool:
        """Whether a message can begin at once. With the lock held."""

    @abstractmethod
    def _wait_for_room(self) -> None:
        """Return when the first message that waits can begin. Without the lock. What it raises fails all that wait."""

    @abstractmethod
    def _begin(self, message: M) -> None:
        """There is room. With the lock held."""

    def post(self, message: M) -> M:
        """Begin ``message`` now, if nothing is before it, else in its turn. Never blocks for others."""
        with self.lock:
            self.around.check()
            if not self._waiting and self._has_room():
                self._try_to_begin(message)
                return message
            message.begun = threading.Event()
            self._waiting.append(message)
            if not self._is_served:
                self._is_served = True
                POOL.run(self._serve)
            return message

    def _try_to_begin(self, message: M) -> None:
        try:
            self._begin(message)
        except Exception as error:
            message.failure = error
        if message.begun is not None:
            message.begun.set()

    def _serve(self) -> None:
        while True:
            with self.lock:
                if not self._waiting:
                    self._is_served = False
                    return
            try:
                self._wait_for_room()
            except Exception as error:
                self._fail(error)
                return
            with self.lock:
                self._try_to_begin(self._waiting.popleft())

    def _fail(self, error: Exception) -> None:
        with self.lock:
            self._is_served = False
            failed = list(self._waiting)
            self._waiting.clear()
        for message in failed:
            message.failure = error
            if message.begun is not None:
                message.begun.set()
