"""Operations among the ranks themselves that go through the communication service if not all ranks take part.

``FallbackWork`` is the only class that knows how an operation changes its route after it has begun: a sum by name for
which a rank does not wait (all_reduce/negotiated.py), and an operation of a process group of which a member has joined
(``byteps_py.join()``). Any thread may call.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from byteps_py.errors import JoinedError, StallError
from byteps_py.torch.collectives.completion import Completer
from byteps_py.torch.collectives.work import Call, NotYetError, Work


class DeclinedError(Exception):
    """A rank has declined to carry the operation out among the ranks. It never leaves ``FallbackWork``."""


class FallbackQueue:
    """The operations that may have to fall back to the service. Any thread.

    Args:
        switch_lock: held while operations begin again through the service.
        is_ordered: the service matches the operations by the order of the calls, not by their names.
    """

    def __init__(self, switch_lock: AbstractContextManager[object], is_ordered: bool) -> None:
        self.switch_lock = switch_lock
        self.is_ordered = is_ordered
        self.under_way: deque[FallbackWork] = deque()  # in the order of the calls, if that matters


class FallbackWork(Work):
    """An operation that goes from rank to rank, and through the service if not all ranks take part.

    The service continues without ranks that have joined. If a member of a process group has joined, all other members
    detect that, because each of them needs a message of it, and all repeat their calls through the service in one
    order, whichever they wait for first. They detect it at different times: a rank that a member waits for may know
    already, and then it does not begin. So whichever rank a member waits for, it must detect that any other one has
    joined.

    ``direct``: the operation from rank to rank, begun; it fails with JoinedError or DeclinedError, on all ranks, if not
    all take part. ``fallback`` begins the same operation through the service.
    """

    def __init__(self, queue: FallbackQueue, call: Call, direct: Work, fallback: Callable[[], Work]) -> None:
        super().__init__(call)
        self._finish = None  # ``direct`` and ``fallback`` call it
        self._queue = queue
        self._work = direct
        self._fallback: Callable[[], Work] | None = fallback
        self._is_in_background = False
        if queue.is_ordered:
            for earlier in list(queue.under_way):  # polling removes the finished ones from the queue
                if not earlier.is_completed():
                    break
            queue.under_way.append(self)

    def complete_in_background(self, completer: Completer) -> None:
        """Let the pool complete it: the caller does not wait at once, and the operation needs this rank's thread."""
        self._is_in_background = True
        completer.add(self)

    def _hand_to_pool(self) -> None:
        if not self._is_in_background:  # otherwise the pool has it already
            super()._hand_to_pool()

    def _complete(self, deadline: float) -> None:
        self._complete_work(deadline)
        if self._is_declined:
            for earlier in self._up_to_this:
                earlier._complete_work(deadline)
            self._fall_back()
            self._complete_work(deadline)
        self._work.wait()

    def _is_ready(self) -> bool:
        if self._work.is_completed() and self._is_declined:
            if not all(earlier._work.is_completed() for earlier in self._up_to_this):
                return False
            self._fall_back()
        return self._work.is_completed()

    def _others(self) -> str:
        return self._work._others()

    def _release(self) -> None:
        self._fallback = None
        if self._queue.is_ordered:
            with contextlib.suppress(ValueError):  # it has been removed
                self._queue.under_way.remove(self)

    def _complete_work(self, deadline: float) -> None:
        try:
            self._work.complete(max(0.0, deadline - time.monotonic()))
        except StallError as error:
            raise NotYetError from error

    @property
    def _is_declined(self) -> bool:
        return isinstance(self._work.exception(), (JoinedError, DeclinedError))

    @property
    def _up_to_this(self) -> list[FallbackWork]:
        if not self._queue.is_ordered:
            return [self]
        under_way = list(self._queue.under_way)
        return [*itertools.takewhile(lambda other: other is not self, under_way), self]

    def _fall_back(self) -> None:
        """The direct operations up to this one are over: begin those through the service that not all ranks take part
        in, unless another thread has."""
        with self._queue.switch_lock:
            for work in self._up_to_this:
                fallback = work._fallback
                if fallback is not None and work._is_declined:
                    work._work, work._fallback = fallback(), None
