"""Compile a function in a background thread when it is first needed.

For processes that train, where numba would cost half a second and 40 MB: the ``build`` function that a caller gives
uses ``llvm`` alone, and imports it late. Until the function is compiled, and where it can't be, the caller does its
work without it. Any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from byteps_py.system.log import logger

_lock = threading.Lock()
#: Longer than loading LLVM takes even from a slow file system.
_LONG_S = 60.0


def address_of(call: Callable[..., None]) -> int:
    """The address of a function that ``llvm.compile_function`` returned, for other compiled code to call.

    The address is valid as long as ``call`` is referenced.
    """
    return cast(int, ctypes.cast(cast(Any, call), ctypes.c_void_p).value)


T = TypeVar("T")


class Compiled(Generic[T]):
    """The result of ``build``, which runs in a background thread. Any thread may call the methods.

    Args:
        name: of the thread (``byteps-NAME``), and in the log.
        build: returns the result; imports the compiler itself.
        fallback: what the process does without the result, for the log.
    """

    def __init__(self, name: str, build: Callable[[], T], fallback: str) -> None:
        self._name, self._build, self._fallback = name, build, fallback
        self._thread: threading.Thread | None = None
        #: The result; None until ``build`` has returned.
        self.ready: T | None = None

    def prepare(self) -> None:
        """Start ``build`` unless it was started before. Returns at once."""
        if self._thread is not None:
            return
        with _lock:
            if self._thread is None:
                # Not a daemon: the interpreter must not exit while LLVM compiles.
                thread = threading.Thread(target=self._run, name=f"byteps-{self._name}")
                with contextlib.suppress(RuntimeError):  # the interpreter is exiting
                    thread.start()
                    self._thread = thread

    def is_ready(self, timeout_s: float = _LONG_S) -> bool:
        """Wait up to ``timeout_s`` for a started ``build``; True if the result is there.

        It waits because ranks of one machine have to agree on whether they use compiled code.
        """
        if self.ready is None and self._thread is not None:
            self._thread.join(timeout_s)
        return self.ready is not None

    def _run(self) -> None:
        try:
            self.ready = self._build()
        except Exception:  # no LLVM, or one that does not know this processor
            logger.info("%s: %s", self._name, self._fallback, exc_info=True)
