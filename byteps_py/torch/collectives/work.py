"""The life of an operation, from its start to the delivery of its result, on every route.

    Work              wait for it, poll it, take its future: the Work of torch.distributed
      NamedWork       an operation of Horovod's or BytePS's functions, with a name and a handle (below)
      GroupWork       an operation of a process group; its waits end when the group does (group_work.py)
        ServiceWork   a round in a slot of the communication service (group_work.py)
        PeerWork      messages between ranks (peer_streams.py)
        LargeSumWork  a large sum, of which each member adds a share (all_reduce/large.py)
        CombinedWork  several operations as one
      FallbackWork    an operation among the ranks or, if not all take part, through the service (fallback_work.py)

The thread that waits for an operation delivers its result. A thread of the pool waits only for an operation whose
future was requested. Any thread may call.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._dynamo import eval_frame

from byteps_py.errors import MismatchError, StallError, UsageError
from byteps_py.session.progress import Progress
from byteps_py.tensor_codec import Codec
from byteps_py.tensors import DType, Op
from byteps_py.torch.collectives.completion import POOL
from byteps_py.torch.collectives.movers import QueuedWork

if TYPE_CHECKING:
    from byteps_py.session.round_recorder import RoundRecorder

Future = torch.futures.Future[Any]
C = TypeVar("C", bound=type)


def not_traced(names: Iterable[str]) -> Callable[[C], C]:
    """A class decorator that keeps torch.compile's tracer out of this backend: the methods ``names``, and everything
    that they call, run untraced.

    The tracer examines every Python frame that begins while a compiled function runs, including frames that C++ calls
    (from a reducer, for example). torch's own backends are not Python, so it never sees them.
    ``torch.compiler.disable`` would do the same, but it loads the compiler, which takes longer than all the rest of
    torch. Used at import.
    """

    def decorate(cls: C) -> C:
        skip = eval_frame._FrameAction.SKIP
        for name in names:
            code = getattr(cls, name).__code__
            eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
        return cls

    return decorate


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
    codec: Codec | None = None

    def __str__(self) -> str:
        op = "average" if self.average else self.op.name.lower()
        op = f"scattered {op}" if self.scatters else op
        root = f" from rank {self.root}" if self.root >= 0 else ""
        terms = f" ({self.terms})" if self.terms else ""
        coded = f", compressed to {self.codec}" if self.codec is not None else ""
        return f"{op} of {self.dtype.name.lower()}{list(self.shape)}{root}{terms}{coded}"


class Call(NamedTuple):
    """A description of an operation, the same on every route. ``what``: its description in messages. ``outputs``: the
    tensors that it fills. ``finish`` is called once their bytes have arrived. ``kind``: the facts on which members must
    agree, for the log of calls. ``inputs`` keeps the memory of this member's contributions until they are sent."""

    what: str
    outputs: list[torch.Tensor]
    timeout_s: float
    finish: Callable[[], None] | None = None
    kind: OperationKind | None = None
    inputs: object = None


class OperationRecord:
    """The record of an operation in the flight recorder. Any thread."""

    __slots__ = ("_flight", "_number")

    def __init__(self, flight: RoundRecorder, number: int) -> None:
        self._flight = flight
        self._number = number

    def over(self, error: Exception | None) -> None:
        """The operation is over. An error that ends its group is a reason to write the records to a file."""
        self._flight.recorder.end(self._number, error is not None)
        if isinstance(error, StallError | MismatchError):
            self.stalled(error)

    def stalled(self, error: Exception) -> None:
        """Whoever waits for the operation gets ``error``."""
        self._flight.dump.dump_at(error, is_end=False)


@not_traced(["wait", "synchronize", "is_completed", "is_success", "exception", "get_future", "fire"])
class Work(dist.Work):
    """An operation that has begun. Subclasses define ``_complete`` and ``_is_ready``. Any thread."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.what = call.what
        self._outputs = call.outputs
        self._timeout_s = call.timeout_s
        self._finish = call.finish
        self._lock = threading.RLock()  # held by the thread that completes the work
        self._asking = threading.RLock()
        self._over = False
        self._error: Exception | None = None
        self._queued: QueuedWork | None = None  # with it, the outputs are there
        self._future: Future | None = None
        self._promise: Future | None = None
        self._progress: Progress | None = None  # that counts futures
        self.record: OperationRecord | None = None  # in the flight recorder

    def _complete(self, deadline: float) -> None:
        """Wait for the result and deliver it. After ``NotYetError`` it may be called again."""
        raise NotImplementedError

    def _is_ready(self) -> bool:
        """True if ``_complete`` would not block."""
        raise NotImplementedError

    def _release(self) -> None:
        """Drop references that only an unfinished operation needs."""

    def _comes_after(self, works: Iterable[Work]) -> None:
        """The outputs are what this thread has queued by now: it has waited for ``works``, and gone on with theirs."""
        queued = next((work._queued for work in works if work._queued is not None), None)
        if queued is not None:
            self._queued = queued.renewed()

    def _others(self) -> str:
        """The operations that other members are in, for the message of a timeout."""
        return ""

    # ---- completion ------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """True if the outputs hold the result, or there is an error to raise."""
        return self._over

    def complete(self, timeout_s: float | None = None) -> None:
        """Return when the operation is over, successful or not. Raises StallError after ``timeout_s`` seconds (None:
        its own timeout)."""
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
            text = f"{self.what}: not complete within its timeout of {limit_s:g} s"
            if others := self._others():
                text = f"{text}; {others}"
            stall = StallError(text)
            if self.record is not None:
                self.record.stalled(stall)
            raise stall from error
        except Exception as error:
            self._error = error
        self._end()

    def _end(self) -> None:
        self._over = True
        if self.record is not None:
            self.record.over(self._error)
        self._release()

    def complete_or_fail(self) -> None:
        """``complete``, where a timeout becomes the operation's error, because no caller waits for it again. Raises
        nothing."""
        try:
            self.complete()
        except Exception as error:
            with self._lock:
                if not self._over:
                    self._error = error
                    self._end()

    def fire(self) -> None:
        """Complete the future: its callbacks run on this thread. Only threads of the pool call this, after
        ``complete``."""
        with self._asking:
            promise, self._promise = self._promise, None
        if promise is not None:
            if self._queued is not None:
                self._queued.synchronize()  # the callbacks' streams are not ordered after this one
            if self._progress is not None:
                self._progress.future_ended()
            promise.set_result((self._error, self._outputs))

    def _hand_to_pool(self) -> None:
        POOL.run(self._complete_and_fire)

    def _complete_and_fire(self) -> None:
        self.complete_or_fail()
        self.fire()

    # ---- torch.distributed.Work ------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the outputs hold the result. Raises MismatchError, StallError (``timeout``, or the group's
        timeout, passed) or PeerLostError. CUDA: work queued later on the current stream sees the outputs."""
        self.complete(timeout_s_of(timeout) or None)
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._queued is not None:
            self._queued.order()
        return True

    def synchronize(self) -> None:
        """``wait`` with the default timeout."""
        self.wait()

    def block_current_stream(self) -> None:
        """``wait``: results reach a CUDA stream through the host."""
        self.wait()

    def is_completed(self) -> bool:
        """True once the outputs hold the result, or the operation has failed. Never blocks."""
        if not self._over and self._lock.acquire(blocking=False):
            try:
                if not self._over and self._is_ready():
                    self._try(time.monotonic() + self._timeout_s, self._timeout_s)
            finally:
                self._lock.release()
        return self._over

    def is_success(self) -> bool:
        """True once the outputs hold the result. Never blocks."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """The operation's error, if it has failed; otherwise None. Never blocks."""
        return self._error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """The outputs, valid after ``wait``."""
        return self._outputs

    def source_rank(self) -> int:
        """The position in the group of a receive's sender. Raises RuntimeError for other operations."""
        raise RuntimeError(f"{self.what} has no source rank: only a receive has one")

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Future:
        """A future of the list of outputs. Its callbacks run on a thread of the pool, and may start collectives."""
        with self._asking:
            if self._future is None:
                root: Future = torch.futures.Future()
                # C++ does not see an error that is set on a Python future: DistributedDataParallel would read a value
                # that does not exist. Both see an error that a callback raises.
                self._future = root.then(_unwrap)
                self._promise = root
                if self._progress is not None:
                    self._progress.future_begun()
                if self._over:
                    self.fire()  # no callback was added yet
                else:
                    self._hand_to_pool()
            return self._future

    def get_future_result(self) -> Future:
        """``get_future``."""
        return self.get_future()


class NotYetError(Exception):
    """The deadline passed and the operation continues. Never leaves ``Work.complete``."""


def timeout_s_of(timeout: timedelta | float | None) -> float | None:
    """A timeout in seconds; None: none. torch's own backends also accept numbers of seconds, and a negative time for
    "unset"."""
    if timeout is None:
        return None
    limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return None if limit_s < 0 else limit_s


def _unwrap(future: Future) -> list[torch.Tensor]:
    error, outputs = future.value()
    if error is not None:
        raise error.with_traceback(None)
    return outputs  # type: ignore[no-any-return]


class Attempt(NamedTuple):
    """An operation that has begun on one route. ``is_done``: True if ``complete`` would not block. ``complete`` waits,
    writes the results to the outputs, and returns the result of ``synchronize``."""

    is_done: Callable[[], bool]
    complete: Callable[[], Any]


class NamedWork(Work):
    """An operation of Horovod's or BytePS's functions: found by a name and, until it is waited for, by a handle. Two
    threads may wait for it. ``on_mismatch`` is called when its owner learns that ranks disagree. It has no timeout
    of its own: the session's stall limit ends its wait."""

    def __init__(self, name: str, attempt: Attempt, on_mismatch: Callable[[], None] | None = None) -> None:
        super().__init__(Call(name, [], threading.TIMEOUT_MAX))
        self.name = name
        self._attempt: Attempt | None = attempt
        self._on_mismatch = on_mismatch
        self._result: Any = None

    @property
    def is_done(self) -> bool:
        """True if ``complete`` would not block."""
        attempt = self._attempt
        return self._over or attempt is None or attempt.is_done()

    def deliver(self) -> Any:
        """Wait, and return the result. Raises the operation's error."""
        if torch._C._autograd._profiler_enabled():
            with torch.autograd.profiler.record_function(f"byteps::wait for {self.name}"):
                self.complete()
        else:
            self.complete()
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
    """The operations of one context by handle, an int as in Horovod, and by the name that each occupies."""

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

    def complete_all(self) -> None:
        """Wait for all operations. Their owners get the results, or errors, later."""
        for operation in list(self._operations.values()):
            operation.complete()

    def clear(self) -> None:
        """Forget all operations and names."""
        self._operations.clear()
        self._occupants.clear()
