"""Exception hooks that report a Python failure of this process to the other ranks at once, with the traceback.

Main thread: ``sys.excepthook`` runs before the interpreter waits for other threads and runs ``atexit`` functions, which
may take long. Other threads: the process survives, so the job does not fail; but if this rank then keeps others
waiting, their messages name the exception that ended the thread. Earlier hooks are called as well. A process of
``multiprocessing`` calls neither ``sys.excepthook`` nor ``atexit`` functions, but its finalizers. Any thread may call.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing import util
from types import TracebackType
from typing import Any, Protocol

from byteps_py.errors import BytePSError
from byteps_py.session import failure_reports
from byteps_py.wire.launch_protocol import has_launcher, send_notice


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
            failure_reports.shorten(error)
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
        if not send_notice(failure_reports.blame_for(error), failure_reports.cause(error), printed):
            sys.stderr.write(printed)


def shorten_tracebacks() -> None:
    """Let tracebacks of this package's errors end at the program's line from now on, in a job or not."""
    global _lasting
    with _lock:
        failure_reports.whole_tracebacks = os.environ.get("BYTEPS_LOG_LEVEL", "").upper() in ("DEBUG", "TRACE")
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
    return getattr(sys, "last_value", None) is error and not failure_reports.is_interactive()


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
        text = f"its thread {name!r} was ended by an exception: {failure_reports.summary(args.exc_value)}"
        for reporter in list(_reporters):
            reporter.report_note(f"{text}\n{failure_reports.traceback_of(args.exc_value)}")
