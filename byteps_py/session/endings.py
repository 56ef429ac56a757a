"""When this process's Python fails, the other ranks are told at once, with the traceback.

The main thread: ``sys.excepthook`` is called before the interpreter waits for other threads and runs ``atexit``
functions, which may take long. Another thread: the process goes on, so nobody fails; but if its rank keeps others
waiting, they are told what ended the thread. Hooks that were there before are called as well. A process of
``multiprocessing`` calls neither that hook nor ``atexit`` functions, but its finalizers. Any thread.
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

from byteps_py import failure_notice
from byteps_py.errors import BytePSError
from byteps_py.session import words


class Speaker(Protocol):
    """What this module needs of a session. The first two are quick, and raise nothing."""

    def tell_failure(self, error: BaseException) -> None:
        """``error``, which nobody caught, ends this process."""

    def tell_note(self, text: str) -> None:
        """What others should know if this rank keeps them waiting."""

    def close(self) -> None:
        """Leave in order."""


_speakers: weakref.WeakSet[Speaker] = weakref.WeakSet()
_lock = threading.Lock()
_running = threading.local()  # ``is_told``: a hook of ours has been called in this thread, and has not returned
_is_child = False  # and has a finalizer
_pid = 0  # of the process whose rank speaks; not that of a child that it forks, whose failure is not the rank's


class ChainedHook:
    """An exception hook that tells the other ranks, then calls the one that was there before it.

    A chain may hold several. Code that replaces a hook keeps it and calls it (torch does with each
    ``init_process_group``), and one that others keep can't be taken out: the next ``watch`` puts another on top. So
    each knows its own predecessor, and only the first that is called tells.
    """

    def __init__(self, before: Callable[..., object], tell: Callable[..., None]) -> None:
        self.before = before
        self._tell = tell

    def __call__(self, *args: Any) -> None:
        if getattr(_running, "is_told", False):
            self.before(*args)
            return
        _running.is_told = True
        try:
            try:
                self._tell(*args)
            finally:
                self._pass_on(*args)
        finally:
            _running.is_told = False

    def _pass_on(self, *args: Any) -> None:
        self.before(*args)


class MainHook(ChainedHook):
    """``sys.excepthook``. Under a launcher, what it would print on stderr goes there."""

    def _pass_on(self, *args: Any) -> None:
        error = args[1]
        if not _is_the_end(error):
            self.before(*args)
            return
        if isinstance(error, BytePSError):
            error.__traceback__ = words.without_inside(error.__traceback__)
            args = (args[0], error, error.__traceback__)
        if not _speakers or os.getpid() != _pid or not failure_notice.has_launcher():
            self.before(*args)
            return
        stderr, sys.stderr = sys.stderr, io.StringIO()
        try:
            self.before(*args)
        finally:
            printed, sys.stderr = sys.stderr.getvalue(), stderr
        if not failure_notice.send(words.blame_for(error), words.cause(error), printed):
            sys.stderr.write(printed)


def watch(speaker: Speaker) -> None:
    """Speak for it until ``unwatch``, or until it is gone."""
    global _is_child, _pid
    with _lock:
        _pid = os.getpid()
        _speakers.add(speaker)
        if not _is_child and multiprocessing.parent_process() is not None:
            _is_child = True
            util.Finalize(None, _on_end_of_child, exitpriority=1000)
        if not isinstance(sys.excepthook, ChainedHook):
            sys.excepthook = MainHook(sys.excepthook, _tell_exception)
        if not isinstance(threading.excepthook, ChainedHook):
            threading.excepthook = ChainedHook(threading.excepthook, _tell_exception_in_thread)


def unwatch(speaker: Speaker) -> None:
    with _lock:
        _speakers.discard(speaker)
        if _speakers:
            return
        # Those beneath somebody else's hook stay, and say nothing while there is nobody to speak for.
        if isinstance(sys.excepthook, ChainedHook):
            sys.excepthook = sys.excepthook.before
        if isinstance(threading.excepthook, ChainedHook):
            threading.excepthook = threading.excepthook.before


def _is_the_end(error: BaseException) -> bool:
    """Of this process. Programs call this hook, too, to print an exception and go on."""
    return getattr(sys, "last_value", None) is error and not words.is_interactive()


def _tell_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if _is_the_end(error):
        for speaker in list(_speakers):
            speaker.tell_failure(error)


def _on_end_of_child() -> None:
    """multiprocessing calls it while an exception is on its way out, if there is one."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):  # torch's spawn raises it for what the program has raised
        error = (error.__context__ or error) if error.code else None
    for speaker in list(_speakers):
        if error is None:
            speaker.close()
        else:
            speaker.tell_failure(error)


def _tell_exception_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        name = args.thread.name if args.thread is not None else "?"
        text = f"its thread {name!r} was ended by an exception: {words.summary(args.exc_value)}"
        for speaker in list(_speakers):
            speaker.tell_note(f"{text}\n{words.traceback_of(args.exc_value)}")
