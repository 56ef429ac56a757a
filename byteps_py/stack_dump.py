"""How others learn where this process's Python is, when its rank keeps them waiting.

The communication service sends a signal; the interpreter's fault handler, which needs neither the GIL nor memory, then
writes the stacks of all threads into a file in memory that both processes hold. Costs nothing until then. One per
process; any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal

#: Of the signals that nobody else has a use for, one that user's code is unlikely to have chosen.
SIGNAL = signal.SIGRTMIN + 11
_SIG_IGN = 1
_libc = ctypes.CDLL(None, use_errno=True)
_is_open = False


class StackDump:
    """``fd``: the file. The service empties it, sends SIGNAL, and reads it a little later."""

    def __init__(self) -> None:
        global _is_open
        self.fd = os.memfd_create("byteps-stack", os.MFD_CLOEXEC)
        # What the fault handler leaves behind when it goes: a signal that comes too late must not end the process.
        _libc.signal(SIGNAL, ctypes.c_void_p(_SIG_IGN))
        try:
            faulthandler.register(SIGNAL, file=self.fd, all_threads=True)
        except BaseException:
            os.close(self.fd)
            raise
        _is_open = True

    def close(self) -> None:
        global _is_open
        faulthandler.unregister(SIGNAL)
        os.close(self.fd)
        _is_open = False


def open_stack_dump() -> StackDump | None:
    """None if the process has one already, or uses the signal itself."""
    if _is_open or signal.getsignal(SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN, None):
        return None
    with contextlib.suppress(OSError, RuntimeError):
        return StackDump()
    return None
