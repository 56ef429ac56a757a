"""Logs processes that are refused: one line for a host, a reason and a minute, with a count. Not thread-safe.

A process with a wrong secret tries again and again, and a stranger may connect a thousand times a second. Each may fill
a disk with lines that say nothing new.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from byteps_py.system.log import logger

PERIOD_S = 60.0
#: Hosts and reasons that are told apart at a time; a stranger may have many addresses.
_MOST = 32
_OTHERS = "other hosts"


@dataclass(slots=True)
class _Period:
    since_s: float
    reason: str
    unlogged: int = 0


class RefusalLog:
    """The connections that one service has refused. ``call_later(delay_s, callback)``: sets a timer, while there are
    minutes to count; None: ``note`` counts those that are over."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        self._clock = clock
        self._call_later = call_later
        self._is_timed = False
        self._periods: dict[tuple[str, str], _Period] = {}  # by host, and reason without its numbers

    def note(self, whom: str, host: str, reason: str) -> None:
        """A connection of ``whom``, on ``host``, was refused. Reasons that differ only in their numbers, such as
        process ids, are alike."""
        self.tick()
        key = (host, re.sub(r"\d+", "", reason))
        if key not in self._periods and len(self._periods) >= _MOST:
            key = (_OTHERS, "")
        if (period := self._periods.get(key)) is not None:
            period.unlogged += 1
            return
        self._periods[key] = _Period(self._clock(), reason)
        logger.warning("turned away %s: %s", whom, reason)
        self._tick_later()

    def tick(self) -> None:
        """Log the counts of minutes that are over."""
        now_s = self._clock()
        for key, period in list(self._periods.items()):
            if now_s - period.since_s >= PERIOD_S:
                del self._periods[key]
                if period.unlogged:
                    text = "turned away %s %d more times in the last %.0f s: %s"
                    logger.warning(text, key[0], period.unlogged, now_s - period.since_s, period.reason)
                    self._periods[key] = _Period(now_s, period.reason)

    def _tick_later(self) -> None:
        if self._call_later is not None and self._periods and not self._is_timed:
            self._is_timed = True
            first_s = min(period.since_s for period in self._periods.values())
            self._call_later(max(0.0, first_s + PERIOD_S - self._clock()), self._timed)

    def _timed(self) -> None:
        self._is_timed = False
        self.tick()
        self._tick_later()
