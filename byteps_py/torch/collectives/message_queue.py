"""Messages that wait for their turn: one queue for each peer, tag and direction, first in, first out.

A message begins at once if no other message waits and its slot or window is free. Otherwise it waits without blocking
the caller: a thread of the pool begins it, in order, as soon as it can. Its tensor must not change until ``wait`` has
returned. Any thread may call.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, TypeVar

from byteps_py.errors import StallError
from byteps_py.torch.collectives.completion import POOL
from byteps_py.torch.collectives.group_work import GroupContext, GroupWork
from byteps_py.torch.collectives.work import Call


class QueuedMessage(GroupWork):
    """``begun`` is set once the message has begun or has failed to; None: it began at once."""

    def __init__(self, group_context: GroupContext, call: Call) -> None:
        super().__init__(group_context, call)
        (self.tensor,) = call.outputs
        self.begun: threading.Event | None = None
        self.failure: Exception | None = None

    def _wait_for_turn(self, deadline: float) -> None:
        """Wait until the message has begun. Raises the error if it has failed to."""
        if self.begun is not None:
            self._wait_in_slices(deadline, self._begin_within)
        if self.failure is not None:
            raise self.failure

    def _begin_within(self, timeout_s: float) -> None:
        if self.begun is not None and not self.begun.wait(timeout_s):
            raise StallError(f"{self.what}: waits for earlier messages")

    @property
    def has_begun(self) -> bool:
        """False while it waits, and if it has failed to begin."""
        return (self.begun is None or self.begun.is_set()) and self.failure is None


M = TypeVar("M", bound=QueuedMessage)


class MessageQueue(ABC, Generic[M]):
    """Subclasses define when a message can begin, and how it begins."""

    def __init__(self, group_context: GroupContext) -> None:
        self.group_context = group_context
        self.lock = threading.RLock()  # a message may be begun again while this thread holds it
        self._waiting: deque[M] = deque()
        self._is_served = False

    @abstractmethod
    def _can_begin(self) -> bool:
        """True if a message can begin at once. Called with the lock held."""

    @abstractmethod
    def _wait_to_begin(self) -> None:
        """Return when the first waiting message can begin. Called without the lock. An exception fails all waiting
        messages."""

    @abstractmethod
    def _begin(self, message: M) -> None:
        """Begin ``message``, which can begin. Called with the lock held."""

    def post(self, message: M) -> M:
        """Begin ``message`` now if no other message waits, otherwise in its turn. Never blocks for other ranks. Raises
        what has ended the group."""
        with self.lock:
            self.group_context.check()
            if not self._waiting and self._can_begin():
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
                self._wait_to_begin()
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
