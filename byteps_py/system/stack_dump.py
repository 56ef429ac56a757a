"""Lets the communication service read the Python stacks of a rank that keeps others waiting.

The service sends a signal. Python's fault handler, which needs neither the GIL nor memory, then writes the stacks of
all threads to a file in memory that both processes have open. Until then it costs nothing. One per process; any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal

#: A real-time signal that other software is unlikely to use.
SIGNAL = signal.SIGRTMIN + 11
_SIG_IGN = 1
_libc = ctypes.CDLL(None, use_errno=True)
_is_open = False


class StackDump:
    """Handles ``SIGNAL`` in this process. ``fd`` is the file: the service empties it, sends the signal, and reads it a
    little later."""

    def __init__(self) -> None:
        global _is_open
        self.fd = os.memfd_create("byteps-stack", os.MFD_CLOEXEC)
        # The fault handler restores this action when it is unregistered. A signal that arrives after that must not end
        # the process.
        _libc.signal(SIGNAL, ctypes.c_void_p(_SIG_IGN))
        try:
            faulthandler.register(SIGNAL, file=self.fd, all_threads=True)
        except BaseException:
            os.close(self.fd)
            raise
        _is_open = True

    def close(self) -> None:
        """Stop handling the signal, and close the file."""
        global _is_open
        faulthandler.unregister(SIGNAL)
        os.close(self.fd)
        _is_open = False


def open_stack_dump() -> StackDump | None:
    """Make a StackDump; None if the process has one already, or uses the signal itself."""
    if _is_open or signal.getsignal(SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN, None):
        return None
    with contextlib.suppress(OSError, RuntimeError):
        return StackDump()
    return None
