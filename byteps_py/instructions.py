"""Instructions that no library has a call for, compiled by LLVM in a thread, when they are first needed.

Not by numba, which takes half a second and 40 MB: this is for processes that train. Whoever uses such instructions does
without them until they are there, and where they can't be compiled. What builds them imports llvm.py late.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from byteps_py.log import logger

_lock = threading.Lock()
#: Longer than it takes to load LLVM from a file system that is slow, too.
_LONG_S = 60.0


def address_of(call: Callable[..., None]) -> int:
    """Where other instructions find those that ``llvm.compile_function`` has returned, which must be kept meanwhile."""
    return cast(int, ctypes.cast(cast(Any, call), ctypes.c_void_p).value)


T = TypeVar("T")


class Compiled(Generic[T]):
    """What ``build`` returns, once it has. ``otherwise``: what is done without it, for the log. Any thread."""

    def __init__(self, name: str, build: Callable[[], T], otherwise: str) -> None:
        self._name, self._build, self._otherwise = name, build, otherwise
        self._thread: threading.Thread | None = None
        #: None until it is there.
        self.ready: T | None = None

    def prepare(self) -> None:
        """Have it compiled, unless it is. Returns at once."""
        if self._thread is not None:
            return
        with _lock:
            if self._thread is None:
                # No daemon: the interpreter must not end while LLVM is at work.
                thread = threading.Thread(target=self._run, name=f"byteps-{self._name}")
                with contextlib.suppress(RuntimeError):  # the interpreter is about to end
                    thread.start()
                    self._thread = thread

    def is_ready(self, timeout_s: float = _LONG_S) -> bool:
        """Whether it is there: once that is known, or within the time. Ranks of one machine should answer alike."""
        if self.ready is None and self._thread is not None:
            self._thread.join(timeout_s)
        return self.ready is not None

    def _run(self) -> None:
        try:
            self.ready = self._build()
        except Exception:  # LLVM for a processor that it does not know, or none
            logger.info("%s: %s", self._name, self._otherwise, exc_info=True)
