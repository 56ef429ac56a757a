"""Exit statuses by which a service tells its launcher what to do, beyond 0 (it ended in order) and 1 (it failed).

``handle_signals`` keeps a status from being replaced by a signal that comes while the process ends.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

#: The program finds its configuration unusable, its port included.
UNUSABLE_STATUS = 2
#: A summation service that was taken for dead, and is not: it can be started again (EX_TEMPFAIL).
GIVEN_UP_STATUS = 75
#: A scheduler whose journal can't be kept (EX_CONFIG): the next one could not, either.
NO_JOURNAL_STATUS = 78


@contextmanager
def handle_signals(signals: Sequence[int], handler: Callable[[int, object], object]) -> Iterator[None]:
    """Call ``handler`` for these signals, and ignore them afterwards: for a process with nothing left to do but end.

    An interpreter that ends restores the default action of a signal with a handler, which would kill it. Main thread
    only.
    """
    for number in signals:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
