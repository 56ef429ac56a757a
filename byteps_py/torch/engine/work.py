"""The life of an operation, from its start to its delivery, whichever way it goes.

    Work              wait for it, ask about it, take its future: the Work of torch.distributed
      NamedWork       an operation of Horovod's or BytePS's functions, found by its name and its handle
      GroupWork       an operation of a process group; its waits end when the group does (group_work.py)
        ServiceWork   a round in a slot of the communication service (service_work.py)
        PeerWork      messages between the ranks of a machine (peer_streams.py)
        RingWork      a large sum in shared memory (peer_ring_sums.py)
        FallbackWork  one of the last two, or, once a member has joined, the same operation through the service
        CombinedWork  several operations as one

The thread that waits for an operation delivers its result. A thread of the pool waits only for an operation whose
future was asked for. Any thread may call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from byteps_py.errors import MismatchError, StallError
from byteps_py.tensors import DType, Op
from byteps_py.torch.engine.compilation import not_traced
from byteps_py.torch.engine.completion import POOL

Future = torch.futures.Future[Any]


@dataclass(frozen=True, slots=True)
class OperationKind:
    """The facts on which all members must agree. ``root``: a global rank, or -1. ``shape``: of the contribution."""

    op: Op
    dtype: DType
    shape: tuple[int, ...]
    average: bool = False
    root: int = -1
    scatters: bool = False
    terms: str = ""

    def __str__(self) -> str:
        op = "average" if self.average else self.op.name.lower()
        op = f"scattered {op}" if self.scatters else op
        root = f" from rank {self.root}" if self.root >= 0 else ""
        terms = f" ({self.terms})" if self.terms else ""
        return f"{op} of {self.dtype.name.lower()}{list(self.shape)}{root}{terms}"


class Call(NamedTuple):
    """What an operation is to do, whichever way it goes. ``outputs``: the tensors that it fills. ``finish`` is called
    once the data are there. ``kind``: what all members must agree on, for the log of calls."""

    what: str
    outputs: list[torch.Tensor]
    timeout_s: float
    finish: Callable[[], None] | None = None
    kind: OperationKind | None = None


@not_traced(["wait", "synchronize", "is_completed", "is_success", "exception", "get_future", "fire"])
class Work(dist.Work):
    """An operation that has begun. Subclasses define ``_complete`` and ``_is_ready``."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.what = call.what
        self._outputs = call.outputs
        self._timeout_s = call.timeout_s
        self._finish = call.finish
        self._lock = threading.RLock()  # the thread that holds it is about to complete the work
        self._asking = threading.RLock()
        self._over = False
        self._error: Exception | None = None
        self._event: torch.cuda.Event | None = None
        self._future: Future | None = None
        self._promise: Future | None = None

    def _complete(self, deadline: float) -> None:
        """Wait for the result and deliver it. ``NotYetError`` is no end: the work may be waited for again."""
        raise NotImplementedError

    def _is_ready(self) -> bool:
        """True if ``_complete`` would not block."""
        raise NotImplementedError

    def _release(self) -> None:
        """Let go of what only an unfinished work needs."""

    def _others(self) -> str:
        """Where other members stand, in words, for the message that this work is late."""
        return ""

    # ---- completion ------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """The outputs hold the result, or there is an error to raise."""
        return self._over

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
        except NotYetError as error:
            said = f"{self.what}: not complete within its timeout of {limit_s:g} s"
            if others := self._others():
                said = f"{said}; {others}"
            raise StallError(said) from error
        except Exception as error:
            self._error = error
        self._over = True
        self._release()

    def settle_whatever_comes(self) -> None:
        """``settle``; a timeout is its failure then, as nobody waits for it again."""
        try:
            self.settle()
        except Exception as error:
            with self._lock:
                if not self._over:
                    self._error, self._over = error, True
                    self._release()

    def fire(self) -> None:
        """Complete the future: its callbacks run here. Only threads of the pool call this, once it is settled."""
        with self._asking:
            promise, self._promise = self._promise, None
        if promise is not None:
            if self._event is not None:
                self._event.synchronize()  # the callbacks' streams know nothing of this one
            promise.set_result((self._error, self._outputs))

    def _hand_to_pool(self) -> None:
        POOL.run(self._settle_and_fire)

    def _settle_and_fire(self) -> None:
        self.settle_whatever_comes()
        self.fire()

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


# ---- operations with a name --------------------------------------------------------------------------------


class Attempt(NamedTuple):
    """One way of an operation, begun. ``is_done``: true if ``complete`` would not block. ``complete`` waits, brings the
    results where they belong, and returns what ``synchronize`` returns."""

    is_done: Callable[[], bool]
    complete: Callable[[], Any]


class NamedWork(Work):
    """An operation of Horovod's or BytePS's functions. ``on_mismatch`` is called when its owner hears that ranks
    disagree. It has no timeout of its own: the session's stall limit ends its wait."""

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


class NotYetError(Exception):
    """The deadline passed; the work goes on. Never leaves ``Work.settle``."""


def limit_of(timeout: timedelta | float | None) -> float | None:
    """A timeout in seconds; None for none. torch's own backends take numbers of seconds, too, and say "unset" with a
    negative time."""
    if timeout is None:
        return None
    limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return None if limit_s < 0 else limit_s


def _unwrap(future: Future) -> list[torch.Tensor]:
    error, outputs = future.value()
    if error is not None:
        raise error.with_traceback(None)
    return outputs  # type: ignore[no-any-return]
