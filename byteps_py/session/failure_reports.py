"""Errors of a session and reports of the exception that ends this process: messages, causes, tracebacks. Any thread.

``register`` sets exception hooks that report a Python failure of this process to the other ranks at once, with the
traceback. Main thread: ``sys.excepthook`` runs before the interpreter waits for other threads and runs ``atexit``
functions, which may take long. Other threads: the process survives, so the job does not fail; but if this rank then
keeps others waiting, their messages name the exception that ended the thread. Earlier hooks are called as well. A
process of ``multiprocessing`` calls neither ``sys.excepthook`` nor ``atexit`` functions, but its finalizers. Any thread
may call.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import multiprocessing
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from multiprocessing import util
from types import TracebackType
from typing import Any, Protocol

from byteps_py.errors import (
    BytePSError,
    CommunicationError,
    MismatchError,
    NonFiniteError,
    NonFiniteInputError,
    PeerLostError,
    UsageError,
)
from byteps_py.tensors import TensorSpec
from byteps_py.wire.launch_protocol import Blame, has_launcher, send_notice
from byteps_py.wire.rank_link import Leave

#: Set by BYTEPS_LOG_LEVEL: ``without_inside`` then keeps tracebacks whole.
whole_tracebacks = False
#: Set by BYTEPS_MAX_RESTARTS: a process that fails, and will be started again, ends at once.
ends_at_once = False
_MAX_CHARS = 500
_DISREGARDED = "_byteps_py_disregarded"
_MAX_TRACEBACK_CHARS = 8000


def check_ranks(spec: TensorSpec, rank: int, size: int) -> None:
    """Raises UsageError if ``rank``, in a job of ``size`` ranks, can't declare ``spec``."""
    for what, named in (("root rank", spec.root), ("rank", spec.group[-1] if spec.group else 0)):
        if named >= size:
            raise UsageError(f"tensor {spec.name!r}: {what} {named} does not exist, ranks go from 0 to {size - 1}")
    if spec.group and rank not in spec.group:
        raise UsageError(
            f"tensor {spec.name!r}: rank {rank} is not in its group {list(spec.group)}; only ranks of the group may "
            "declare it"
        )


def service_lost(service_pid: int) -> PeerLostError:
    """The communication service has closed its channel."""
    return PeerLostError(
        f"the communication service of this machine is gone (process {service_pid}); its log may say why"
    )


def service_frozen(service_pid: int, silence_s: float) -> PeerLostError:
    """The communication service has been silent for ``silence_s`` seconds."""
    return PeerLostError(
        f"the communication service of this machine (process {service_pid}) has not answered for {silence_s:g} s: it "
        "is frozen or starved (BYTEPS_HEARTBEAT_TIMEOUT_MAX_S)"
    )


def uncaught() -> BaseException | None:
    """The exception that ends this process, if the process is ending (during ``atexit``); otherwise None."""
    # An interactive interpreter has a last error, too, but its main thread is alive.
    return None if threading.main_thread().is_alive() else getattr(sys, "last_value", None)


def in_flight() -> BaseException | None:
    """The exception that is being raised or handled in this thread, unless that was so before ``disregard``."""
    error = sys.exc_info()[1]
    return None if error is None or hasattr(error, _DISREGARDED) else error


def disregard() -> None:
    """The job begins while an exception is being handled, as in ``except ImportError: main()``: it is not the job's."""
    error = sys.exc_info()[1]
    if error is not None:
        with contextlib.suppress(Exception):  # a class of the user may refuse
            setattr(error, _DISREGARDED, True)


def ending() -> BaseException | None:
    """The exception with which this rank leaves the job: uncaught, or in flight."""
    return uncaught() or in_flight()


def is_exiting() -> bool:
    """True in the main thread once its program is over (during ``atexit``)."""
    thread = threading.current_thread()
    return thread is threading.main_thread() and not thread.is_alive()


def is_interactive() -> bool:
    """True if the interpreter continues after an uncaught exception."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive or sys.flags.inspect)


def while_waiting(error: BytePSError, what: str) -> BytePSError:
    """``error``, which ended the session, with ``what``, the operation that this rank was waiting for. A MismatchError
    stays as it is: it names the disagreement in the same words on all ranks.

    >>> while_waiting(PeerLostError("rank 3 died"), "tensor 'w', round 5: no result")
    PeerLostError("rank 3 died; tensor 'w', round 5: no result")
    """
    first, newline, others = str(error).partition("\n")  # a traceback may follow
    is_said = isinstance(error, MismatchError) or first.startswith(("tensor ", "a barrier"))
    return type(error)(str(error) if is_said else f"{first}; {what}{newline}{others}")


def summary(error: BaseException) -> str:
    """The type and the message of ``error``, at most 500 characters: ``ValueError: the data is bad``."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:_MAX_CHARS]


def cause(error: BaseException) -> str:
    """A summary that is the same on all ranks that end for the same reason: without the operation that each of them
    waited for."""
    text = summary(error)
    return text.partition("; ")[0] if isinstance(error, PeerLostError) else text


def traceback_of(error: BaseException) -> str:
    """The traceback of ``error`` as Python prints it, at most its last 8000 characters. For the other ranks, whose
    users should not have to search for it in another rank's output."""
    if isinstance(error, BytePSError):
        shorten(error)
    text = "".join(traceback.format_exception(error)).rstrip()
    return text if len(text) <= _MAX_TRACEBACK_CHARS else f"…{text[-_MAX_TRACEBACK_CHARS:]}"


def blame_for(error: BaseException) -> Blame:
    """The party at fault when ``error`` ends this process."""
    if isinstance(error, KeyboardInterrupt):
        return Blame.NOBODY
    return Blame.OTHERS if isinstance(error, PeerLostError) else Blame.OWN


def shorten(error: BytePSError) -> None:
    """Shorten its traceback to the frames that a user can act on: see ``without_inside``. An error that it was made
    from, with the same message, is left out."""
    if whole_tracebacks:
        return
    error.__traceback__ = without_inside(error.__traceback__)
    before = error.__context__
    if isinstance(before, BytePSError) and error.__cause__ in (None, before):
        if str(before).partition("\n")[0] in str(error):
            error.__cause__ = error.__context__ = None
        else:
            shorten(before)
    elif error.__cause__ is not None:  # of the user's code, such as a pipeline's stage
        error.__cause__.__traceback__ = _outside(error.__cause__.__traceback__)


def _outside(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback with its frames outside of this package and of torch; unchanged if there are none."""
    kept, entries, entry = None, [], traceback
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    for each in reversed(entries):
        if not _is_inside(each.tb_frame.f_globals.get("__name__", "")):
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept or traceback


def without_inside(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without its innermost frames in this package or in torch. The message of the error describes the
    failure; the frames before show where the program was. BYTEPS_LOG_LEVEL=DEBUG keeps the whole traceback."""
    entries = []
    entry = traceback
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    outside = [i for i, each in enumerate(entries) if not _is_inside(each.tb_frame.f_globals.get("__name__", ""))]
    if not outside or whole_tracebacks:
        return traceback
    kept: TracebackType | None = None
    for each in reversed(entries[: outside[-1] + 1]):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


def _is_inside(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in ("byteps_py", "torch")


def leave_message() -> Leave | None:
    """The message that tells other ranks of ``ending``; None if they need none. An error of the job that is in flight
    needs none: the others have it too, and the program may handle it and join again."""
    error = ending()
    return None if isinstance(error, CommunicationError) and uncaught() is None else leave_message_for(error)


def leave_message_for(error: BaseException | None) -> Leave | None:
    """The message that tells others of ``error``, with which this rank ends; None if they need not know."""
    # All ranks report non-finite gradients themselves, with more detail.
    if error is None or (isinstance(error, NonFiniteError) and not isinstance(error, NonFiniteInputError)):
        return None
    if isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
        return None  # the program ends as it was told to
    return Leave(error=summary(error), traceback=traceback_of(error))


class FailureReporter(Protocol):
    """The part of a session that this module calls. Its methods that report are quick and raise nothing."""

    def report_failure(self, error: BaseException) -> None:
        """The uncaught exception ``error`` ends this process."""

    def report_note(self, text: str) -> None:
        """Text for the messages of ranks that this rank keeps waiting."""

    def close(self) -> None:
        """Leave the job in order."""


_reporters: weakref.WeakSet[FailureReporter] = weakref.WeakSet()
_lock = threading.Lock()
_running = threading.local()  # ``is_running``: a hook of this module is running in this thread
_is_child = False  # a process of multiprocessing, with a finalizer
_lasting: ChainedHook | None = None  # the hook of shorten_tracebacks
_pid = 0  # of the process that is the rank; the failure of a child that it forks is not the rank's


class ChainedHook:
    """An exception hook that reports to the other ranks, then calls the hook that was installed before it.

    A chain may hold several of them. Code that replaces a hook keeps the old one and calls it (torch does so with each
    ``init_process_group``), and a hook that others keep can't be removed, so the next ``register`` installs another one
    on top. So each knows its own predecessor, and only the first hook of a chain reports.
    """

    def __init__(self, before: Callable[..., object], report: Callable[..., None]) -> None:
        self.before = before
        self._report = report

    def __call__(self, *args: Any) -> None:
        if getattr(_running, "is_running", False):
            self.before(*args)
            return
        _running.is_running = True
        try:
            try:
                self._report(*args)
            finally:
                self._pass_on(*args)
        finally:
            _running.is_running = False

    def _pass_on(self, *args: Any) -> None:
        self.before(*args)


class MainHook(ChainedHook):
    """``sys.excepthook``. Under a launcher, the text that it would print on stderr goes to the launcher."""

    def _pass_on(self, *args: Any) -> None:
        error = args[1]
        if not _is_the_end(error):
            self.before(*args)
            return
        is_ours = isinstance(error, BytePSError)
        if is_ours:
            shorten(error)
            args = (args[0], error, error.__traceback__)
        is_of_job = os.getpid() == _pid if _reporters else is_ours
        if not (is_of_job and has_launcher()):
            self.before(*args)
            return
        stderr, sys.stderr = sys.stderr, io.StringIO()
        try:
            self.before(*args)
        finally:
            printed, sys.stderr = sys.stderr.getvalue(), stderr
        if not send_notice(blame_for(error), cause(error), printed):
            sys.stderr.write(printed)
        elif ends_at_once and isinstance(error, Exception):
            _end_at_once()


def _end_at_once() -> None:
    """Do all that the interpreter does after it has called ``sys.excepthook``, but for one thing: taking all modules
    apart. With torch that takes a second of processor time, for which other ranks wait."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for each in (*gc.get_objects(), sys.__stdout__, sys.__stderr__):
        if issubclass(type(each), io.IOBase) and not each.closed:
            with contextlib.suppress(OSError, ValueError):  # as for files that nobody has closed
                each.flush()
    os._exit(1)


def shorten_tracebacks() -> None:
    """Let tracebacks of this package's errors end at the program's line from now on, in a job or not."""
    global _lasting, whole_tracebacks
    with _lock:
        whole_tracebacks = os.environ.get("BYTEPS_LOG_LEVEL", "").upper() in ("DEBUG", "TRACE")
        if not isinstance(sys.excepthook, ChainedHook):
            sys.excepthook = _lasting = MainHook(sys.excepthook, _report_exception)


def register(reporter: FailureReporter) -> None:
    """Report failures through ``reporter`` until ``unregister``, or until it is garbage collected."""
    global _is_child, _pid
    with _lock:
        _pid = os.getpid()
        _reporters.add(reporter)
        if not _is_child and multiprocessing.parent_process() is not None:
            _is_child = True
            util.Finalize(None, _on_end_of_child, exitpriority=1000)
        if not isinstance(sys.excepthook, ChainedHook):
            sys.excepthook = MainHook(sys.excepthook, _report_exception)
        if not isinstance(threading.excepthook, ChainedHook):
            threading.excepthook = ChainedHook(threading.excepthook, _report_exception_in_thread)


def unregister(reporter: FailureReporter) -> None:
    """Stop reporting through ``reporter``. The last one removes the hooks where nothing was installed on top of
    them."""
    with _lock:
        _reporters.discard(reporter)
        if _reporters:
            return
        # A hook beneath a foreign hook stays, and reports nothing while no reporter is registered.
        if isinstance(sys.excepthook, ChainedHook) and sys.excepthook is not _lasting:
            sys.excepthook = sys.excepthook.before
        if isinstance(threading.excepthook, ChainedHook):
            threading.excepthook = threading.excepthook.before


def _is_the_end(error: BaseException) -> bool:
    """True if ``error`` ends this process. Programs also call this hook to print an exception and continue."""
    return getattr(sys, "last_value", None) is error and not is_interactive()


def _report_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if _is_the_end(error):
        for reporter in list(_reporters):
            reporter.report_failure(error)


def _on_end_of_child() -> None:
    """A finalizer of multiprocessing. It runs while an exception, if any, is being raised."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):  # torch's spawn raises it for an error of the program
        error = (error.__context__ or error) if error.code else None
    for reporter in list(_reporters):
        if error is None:
            reporter.close()
        else:
            reporter.report_failure(error)


def _report_exception_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        name = args.thread.name if args.thread is not None else "?"
        text = f"its thread {name!r} was ended by an exception: {summary(args.exc_value)}"
        for reporter in list(_reporters):
            reporter.report_note(f"{text}\n{traceback_of(args.exc_value)}")
