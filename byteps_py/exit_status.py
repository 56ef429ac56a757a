"""Exit statuses by which a service tells its launcher what to do, beyond 0 (it ended in order) and 1 (it failed).

``handle_signals`` makes sure that a signal which arrives while the process exits does not replace its status.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

#: The configuration is unusable, for instance because the port is taken.
UNUSABLE_STATUS = 2
#: A summation service that was declared dead by mistake. It can be started again (EX_TEMPFAIL).
GIVEN_UP_STATUS = 75
#: A scheduler that can't write its journal (EX_CONFIG). Starting it again would not help.
NO_JOURNAL_STATUS = 78


@contextmanager
def handle_signals(signals: Sequence[int], handler: Callable[[int, object], object]) -> Iterator[None]:
    """Call ``handler`` for ``signals`` inside the ``with`` block, and ignore them afterwards. Main thread only.

    For a process that exits after the block. An interpreter that exits restores the default action of a signal that has
    a Python handler; that action would kill the process.
    """
    for number in signals:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
