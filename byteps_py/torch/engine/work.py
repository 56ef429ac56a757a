"""What a collective returns: wait for it, ask about it, or take its future.

Owns one operation from its hand-over to its delivery. Whoever waits delivers, in the calling thread; only an operation
whose future was asked for is waited for by a thread of the pool. Any thread may call.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from byteps_py.errors import MismatchError, StallError
from byteps_py.session import Session
from byteps_py.torch.engine.call_log import CallLog
from byteps_py.torch.engine.operation_kind import OperationKind
from byteps_py.torch.engine.threads import POOL
from byteps_py.torch.process_group.arguments import limit_of
from byteps_py.torch.process_group.compilation import not_traced

#: After waits of this length: are the others at the same operation? Twice, for those that come to ask first.
_DOUBT_S = (3.0, 1.0)
Future = torch.futures.Future[Any]


class Call(NamedTuple):
    """What an operation is to do, whichever way it goes. ``outputs``: the tensors that it fills. ``finish`` is called
    once what comes has come. ``kind``: what all members must agree on, for the log of calls."""

    what: str
    outputs: list[torch.Tensor]
    timeout_s: float
    finish: Callable[[], None] | None = None
    kind: OperationKind | None = None


class GroupContext:
    """What operations of one group share: ``aborted``, or whatever ends the session, ends their waits, and no new ones
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

    def finish(self, work: Pending | None) -> None:
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


@not_traced(["wait", "synchronize", "is_completed", "is_success", "exception", "get_future", "fire"])
class Pending(dist.Work):
    """The life of a piece of work, however it is carried out: subclasses say ``_complete`` and ``_is_ready``."""

    def __init__(self, around: GroupContext, what: str, outputs: list[torch.Tensor], timeout_s: float) -> None:
        super().__init__()
        self.what = what
        self.number = 0  # of its group, in the order of the calls; 0 for what not all members call
        self._around = around
        self._outputs = outputs
        self._timeout_s = timeout_s
        self._lock = threading.RLock()  # whoever holds it is about to complete the work
        self._asking = threading.RLock()
        self._over = False
        self._error: Exception | None = None
        self._event: torch.cuda.Event | None = None
        self._future: Future | None = None
        self._promise: Future | None = None

    def _complete(self, deadline: float) -> None:
        """Wait for the result and deliver it. A StallError is no end: the work may be waited for again."""
        raise NotImplementedError

    def _is_ready(self) -> bool:
        """True if ``_complete`` would not block."""
        raise NotImplementedError

    def _release(self) -> None:
        """Let go of what only an unfinished work needs."""

    # ---- completion ------------------------------------------------------------------------------------

    def settle(self, timeout_s: float | None = None) -> None:
        """Return when it is over, well or not. Raises StallError if it is not within the time."""
        if self._over:
            return
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        if not self._lock.acquire(timeout=min(limit_s, threading.TIMEOUT_MAX)):
            raise StallError(f"{self.what}: not complete within its timeout of {limit_s:g} s")
        try:
            if not self._over:
                self._try(deadline, limit_s)
        finally:
            self._lock.release()

    def _try(self, deadline: float, limit_s: float) -> None:
        try:
            self._complete(deadline)
        except _NotYet as error:
            said = f"{self.what}: not complete within its timeout of {limit_s:g} s"
            if others := self._others():
                said = f"{said}; {others}"
            raise StallError(said) from error
        except Exception as error:
            self._error = error
        self._over = True
        self._release()

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
                    raise _NotYet from error
            if self.number:
                self._around.compare(self.number)

    def _gave_up(self) -> bool:
        """True if the service itself has ended the round."""
        return False

    def fire(self) -> None:
        """Complete the future: its callbacks run here. Only threads of the pool call this, once it is settled."""
        with self._asking:
            promise, self._promise = self._promise, None
        if promise is not None:
            if self._event is not None:
                self._event.synchronize()  # the callbacks' streams know nothing of this one
            promise.set_result((self._error, self._outputs))

    # ---- torch.distributed.Work ------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the outputs are there. Raises MismatchError, StallError (the group's timeout, or this one,
        passed) or PeerLostError. CUDA: work queued later on the current stream will see them."""
        self.settle(limit_of(timeout) or None)
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._event is not None:
            torch.cuda.current_stream(self._event.device).wait_event(self._event)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """True once the outputs are there, or it has failed. Never blocks."""
        if not self._over and self._lock.acquire(blocking=False):
            try:
                if not self._over and self._is_ready():
                    self._try(time.monotonic() + self._timeout_s, self._timeout_s)
            finally:
                self._lock.release()
        return self._over

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def source_rank(self) -> int:
        raise RuntimeError(f"{self.what} has no source rank: only a receive has one")

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Future:
        """A future of the list of outputs. Its callbacks run on a thread of the pool, and may start collectives."""
        with self._asking:
            if self._future is None:
                root: Future = torch.futures.Future()
                # An error that is set on a future of Python's is invisible to C++: DistributedDataParallel would
                # read a value that is not there. One that a callback raises is seen by both.
                self._future = root.then(_unwrap)
                self._promise = root
                if self._over:
                    self.fire()  # nobody has a callback on it yet
                else:
                    self._hand_to_pool()
            return self._future

    def get_future_result(self) -> Future:
        return self.get_future()

    def _hand_to_pool(self) -> None:
        POOL.run(self._settle_and_fire)

    def settle_whatever_comes(self) -> None:
        """``settle``; running out of time is its failure then, as nobody waits for it again."""
        try:
            self.settle()
        except Exception as error:
            with self._lock:
                if not self._over:
                    self._error, self._over = error, True
                    self._release()

    def _settle_and_fire(self) -> None:
        self.settle_whatever_comes()
        self.fire()


class CompletedWork(Pending):
    """It was over before its call was."""

    def __init__(self, around: GroupContext, what: str, outputs: list[torch.Tensor]) -> None:
        super().__init__(around, what, outputs, around.timeout_s)
        self._over = True


class _NotYet(Exception):  # noqa: N818  never leaves this module
    """The deadline passed; the work goes on."""


def _unwrap(future: Future) -> list[torch.Tensor]:
    error, outputs = future.value()
    if error is not None:
        raise error.with_traceback(None)
    return outputs  # type: ignore[no-any-return]
