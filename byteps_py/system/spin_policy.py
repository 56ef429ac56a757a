"""Decides whether a waiting thread polls for a while before it sleeps. Pure.

A wake-up takes some 50 µs, polling a socket 2 µs. A thread that polls yields the processor each time, so that others
can use its core.
"""

from __future__ import annotations

#: The time to poll: as long as two wake-ups take.
LOOK_S = 100e-6
#: Where cores are scarce or other processes late, polling is in vain. After this many vain attempts in a row, only one
#: of this many waits begins with polling, until polling succeeds again.
_MOST_VAIN, _WAITS_PER_TRY = 2, 16


class SpinPolicy:
    """Decides from the results of earlier attempts. Any thread, races do no harm.

    >>> policy = SpinPolicy()
    >>> policy.is_due()
    True
    >>> policy.ended(paid=True)
    """

    def __init__(self) -> None:
        self._vain = 0  # in a row
        self._waits = 0  # since the last attempt

    def is_due(self) -> bool:
        """True if this wait should begin with polling."""
        self._waits += 1
        return self._vain < _MOST_VAIN or self._waits >= _WAITS_PER_TRY

    def ended(self, paid: bool) -> None:
        """Record an attempt. ``paid``: the wait ended while the thread polled."""
        self._waits = 0
        self._vain = 0 if paid else self._vain + 1
