"""Whether to look again and again before one sleeps. Pure.

To be woken takes some 50 µs, to look at a socket 2. A process that looks yields the processor each time, so
that whoever shares its core can go on.
"""

from __future__ import annotations

#: As long as two wake-ups.
LOOK_S = 100e-6
#: Where cores are short, or others late, who looks does so in vain: after so many times in a row, only one of so many
#: waits begins with it, until it pays again.
_MOST_VAIN, _WAITS_PER_TRY = 2, 16


class SpinPolicy:
    """From how often it did pay. Any thread, races do no harm."""

    def __init__(self) -> None:
        self._vain = 0  # in a row
        self._waits = 0  # since the last look

    def is_due(self) -> bool:
        """True if this wait is to begin with a look."""
        self._waits += 1
        return self._vain < _MOST_VAIN or self._waits >= _WAITS_PER_TRY

    def ended(self, paid: bool) -> None:
        self._waits = 0
        self._vain = 0 if paid else self._vain + 1
