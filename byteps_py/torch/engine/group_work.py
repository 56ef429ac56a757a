"""Operations of a process group: their waits end when the group does. What they share, and those made of others.

``FallbackWork`` is the only place that knows what happens to an operation among the ranks of a machine when a member
has joined (``byteps_py.join()``). Any thread may call.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from byteps_py.errors import JoinedError, MismatchError, StallError
from byteps_py.session import Session
from byteps_py.torch.engine.call_log import CallLog
from byteps_py.torch.engine.completion import Completer
from byteps_py.torch.engine.work import Call, NotYetError, Work

#: After waits of this length a member asks: are the others at the same operation? Twice, for those that ask first.
_DOUBT_S = (3.0, 1.0)


class GroupContext:
    """What operations of one group share: ``aborted``, or the end of the session, ends their waits, and no new ones
    begin.

    ``look_s``: how often a long wait looks for that. The session must have the time to ask a silent service whether it
    is alive, and to be sure that there is no answer.
    """

    def __init__(self, session: Session, timeout_s: float, journal: CallLog, look_s: float) -> None:
        self._session = session
        self.timeout_s = timeout_s
        self.look_s = look_s
        self.journal = journal
        self.aborted: Exception | None = None

    def check(self) -> None:
        """Raises what every operation of the group would raise."""
        if self.aborted is not None:
            raise type(self.aborted)(*self.aborted.args)
        self._session.check_open()  # it may have come to its end by a StallError, which is no wait's own

    def patiently(self, wait: Callable[[float], None]) -> None:
        """``wait`` for something before an operation begins. Raises StallError; then the group is at its end, as the
        other members don't know that this one has left a call out."""
        deadline = time.monotonic() + self.timeout_s
        for look_s in itertools.chain(_DOUBT_S, itertools.repeat(self.look_s)):
            self.check()
            left = deadline - time.monotonic()
            try:
                wait(max(0.0, min(left, look_s)))
                return
            except StallError as error:
                if left <= look_s:
                    self.aborted = error
                    raise
            self.compare(self.journal.count)

    def finish(self, work: Work | None) -> None:
        """Return when ``work``, which occupies what the caller needs, is over, well or not. Its failure stays with it.
        Raises StallError; then the group is at its end, as the other members don't know that this one has left a call
        out."""
        if work is None:
            return
        try:
            work.settle()
        except StallError as error:
            self.aborted = error
            raise

    def compare(self, number: int) -> str:
        """Where the others stand, in words. If they differ the group is at its end: rounds that some have begun stay
        open for ever."""
        try:
            return self.journal.compare(number)
        except MismatchError as error:
            self.aborted = error
            raise


class GroupWork(Work):
    """``number``: of its group, in the order of the calls; 0 for what not all members call."""

    def __init__(self, around: GroupContext, call: Call) -> None:
        super().__init__(call)
        self.number = 0
        self._around = around

    def _others(self) -> str:
        try:
            return self._around.compare(self.number) if self.number else ""
        except MismatchError as error:
            return str(error)

    def _slices(self, deadline: float, wait: Callable[[float], None]) -> None:
        """``wait`` until ``deadline``, looking from time to time whether the group was aborted, or should be."""
        for look_s in itertools.chain(_DOUBT_S, itertools.repeat(self._around.look_s)):
            self._around.check()
            left = deadline - time.monotonic()
            try:
                wait(max(0.0, min(left, look_s)))
                return
            except StallError as error:
                if self._gave_up():
                    raise
                if left <= look_s:
                    raise NotYetError from error
            if self.number:
                self._around.compare(self.number)

    def _gave_up(self) -> bool:
        """True if the service itself has ended the round."""
        return False


class CompletedWork(GroupWork):
    """It was over before its call was."""

    def __init__(self, around: GroupContext, call: Call) -> None:
        super().__init__(around, call)
        self._over = True


class CombinedWork(GroupWork):
    """Several works as one. ``call.finish`` is called after them."""

    def __init__(self, around: GroupContext, call: Call, works: Sequence[Work]) -> None:
        super().__init__(around, call)
        self._works = list(works)

    def _complete(self, deadline: float) -> None:
        for work in self._works:
            self._slices(deadline, work.settle)
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()

    def _is_ready(self) -> bool:
        return all(work.is_completed() for work in self._works)


class FallbackQueue:
    """Operations of one group that may have to fall back, in the order of the calls. Any thread."""

    def __init__(self, around: GroupContext, completer: Completer) -> None:
        self.around = around
        self.completer = completer
        self.under_way: deque[FallbackWork] = deque()
        self.turning = threading.RLock()


class FallbackWork(GroupWork):
    """An operation that goes from rank to rank on one machine, and through the service if a member has joined.

    The service goes on without ranks that have joined. If one has, all others find that out, as each needs a message of
    it; and all begin what they have called in one order, whichever they wait for first. ``direct``: the way from rank
    to rank, begun. ``otherwise`` begins the same through the service.
    """

    def __init__(self, queue: FallbackQueue, call: Call, direct: GroupWork, otherwise: Callable[[], Work]) -> None:
        super().__init__(queue.around, call)
        self._finish = None  # which its two ways do
        self.number = direct.number
        self._queue = queue
        self._work: Work = direct
        self._otherwise: Callable[[], Work] | None = otherwise
        self._goes_on = False
        for earlier in list(queue.under_way):  # a caller that never waits for one does not keep it alive
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
        if self._lacks_a_member:
            for earlier in self._with_those_before:
                self._slices(deadline, earlier._settle)
            self._turn()
            self._slices(deadline, self._settle)
        self._work.wait()

    def _is_ready(self) -> bool:
        if self._work.is_completed() and self._lacks_a_member:
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
    def _lacks_a_member(self) -> bool:
        return isinstance(self._work.exception(), JoinedError)

    @property
    def _with_those_before(self) -> list[FallbackWork]:
        under_way = list(self._queue.under_way)
        return [*itertools.takewhile(lambda other: other is not self, under_way), self]

    def _turn(self) -> None:
        """The direct way of this one, and of those before it, is over: begin the other one, unless another thread
        has."""
        with self._queue.turning:
            for fallback in self._with_those_before:
                otherwise = fallback._otherwise
                if otherwise is not None and fallback._lacks_a_member:
                    fallback._work, fallback._otherwise = otherwise(), None
