"""Counters of the bytes that a listener carries, and of the messages that it refuses. Owned by the loop's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from byteps_py.security.unauthenticated_connections import RefusalLog
from byteps_py.system.log import logger


class Limiter:
    """A rate limit. ``denied``: how often ``allow`` has returned False."""

    def __init__(self, per_second: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._clock = clock
        self._second_began = clock()
        self._granted = 0
        self.denied = 0

    def allow(self) -> bool:
        """True at most ``per_second`` times in a second."""
        now = self._clock()
        if now - self._second_began >= 1:
            self._second_began, self._granted = now, 0
        if self._granted >= self._per_second:
            self.denied += 1
            return False
        self._granted += 1
        return True


@dataclass(slots=True)
class Traffic:
    """Counters since the start; payload bytes only. ``malformed``: messages that broke the protocol."""

    bytes_received: int = 0
    bytes_sent: int = 0
    bytes_local: int = 0
    malformed: int = 0
    _log_limiter: Limiter = field(default_factory=lambda: Limiter(per_second=5))
    _refusals: RefusalLog = field(default_factory=RefusalLog)

    def turned_away(self, whom: str, reason: object) -> None:
        """Count and log a message of ``whom`` that was dropped."""
        self.malformed += 1
        self.note("dropped a message of", whom, reason)

    def refused(self, whom: str, host: str, reason: object) -> None:
        """Count a process that is not a member, and log it, once for a host and minute."""
        self.malformed += 1
        self._refusals.note(whom, host, str(reason))

    def note(self, what: str, whom: object, reason: object) -> None:
        """Log a line, unless too many such lines are being logged already."""
        if self._log_limiter.allow():
            missed, self._log_limiter.denied = self._log_limiter.denied, 0
            more = f" ({missed} more were not logged)" if missed else ""
            logger.warning("%s %s: %s%s", what, whom, str(reason), more)  # the record must not keep an error's frames
