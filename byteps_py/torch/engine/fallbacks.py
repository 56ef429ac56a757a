"""Operations that go from rank to rank on one machine, and through the service if a member of the group has joined.

The service goes on without ranks that have joined. If one has, all others find that out, as each needs a word of it;
and all begin what they have called in one order, whichever they wait for first.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable

from byteps_py.errors import JoinedError
from byteps_py.torch.engine.completion import Completer
from byteps_py.torch.engine.work import Call, GroupContext, Pending


class FallbackQueue:
    """Operations of one group that are under way, in the order of the calls. Any thread."""

    def __init__(self, around: GroupContext, completer: Completer) -> None:
        self.around = around
        self.completer = completer
        self.under_way: deque[Fallback] = deque()
        self.turning = threading.RLock()


class Fallback(Pending):
    """``direct``: the way from rank to rank, begun. ``otherwise`` begins the same through the service."""

    def __init__(
        self,
        queue: FallbackQueue,
        call: Call,
        direct: Pending,
        otherwise: Callable[[], Pending],
    ) -> None:
        super().__init__(queue.around, call.what, call.outputs, call.timeout_s)
        self.number = direct.number
        self._queue = queue
        self._work = direct
        self._otherwise: Callable[[], Pending] | None = otherwise
        self._goes_on = False
        for earlier in list(queue.under_way):  # whoever never waits for one does not keep it
            if not earlier.is_completed():
                break
        queue.under_way.append(self)

    def go_on_by_itself(self) -> None:
        """The caller does not wait for it at once, and it does not come to its end without this rank."""
        self._goes_on = True
        self._queue.completer.add(self)

    def _hand_to_pool(self) -> None:
        if not self._goes_on:  # else it has been
            super()._hand_to_pool()

    def _complete(self, deadline: float) -> None:
        self._slices(deadline, self._settle)
        if self._is_without_a_member:
            for earlier in self._with_those_before:
                self._slices(deadline, earlier._settle)
            self._turn()
            self._slices(deadline, self._settle)
        self._work.wait()

    def _is_ready(self) -> bool:
        if self._work.is_completed() and self._is_without_a_member:
            if not all(earlier._work.is_completed() for earlier in self._with_those_before):
                return False
            self._turn()
        return self._work.is_completed()

    def _release(self) -> None:
        self._otherwise = None
        with contextlib.suppress(ValueError):  # it has been removed
            self._queue.under_way.remove(self)

    def _settle(self, timeout_s: float) -> None:
        self._work.settle(timeout_s)

    @property
    def _is_without_a_member(self) -> bool:
        return isinstance(self._work.exception(), JoinedError)

    @property
    def _with_those_before(self) -> list[Fallback]:
        under_way = list(self._queue.under_way)
        return [*itertools.takewhile(lambda other: other is not self, under_way), self]

    def _turn(self) -> None:
        """The direct way of this one, and of those before it, has come to its end: begin the other one, unless another
        thread has."""
        with self._queue.turning:
            for fallback in self._with_those_before:
                otherwise = fallback._otherwise
                if otherwise is not None and fallback._is_without_a_member:
                    fallback._work, fallback._otherwise = otherwise(), None
