"""Whether a connection between two ranks still carries bytes, and for how long a broken one may be made again. Pure.

up ──nothing came for a while──► a PING ──nothing came for ``silence_s``──► broken ──``give_up_s``──► lost
 ▲                                                                            │
 └────────────────────────────── a new connection ────────────────────────────┘
"""

from __future__ import annotations

import enum


class LinkDue(enum.Enum):
    """What a link needs."""

    NOTHING = enum.auto()
    PING = enum.auto()
    BREAK = enum.auto()  # nothing comes any more: end the connection, and make another one
    GIVE_UP = enum.auto()


class LinkWatch:
    """``silence_s``: a connection over which nothing comes for so many seconds, not even answers, is broken. It may be
    made again within twice that time: the caller, too, may be that late to notice. All times are of one monotonic
    clock, in seconds."""

    def __init__(self, silence_s: float, now_s: float) -> None:
        self.silence_s = silence_s
        self.give_up_s = 2 * silence_s
        self._heard_s = now_s
        self._pinged_s: float | None = None  # the first PING since something came
        self._broken_s: float | None = None

    @property
    def interval_s(self) -> float:
        """How often to call ``due``."""
        return min(1.0, self.silence_s / 4)

    def came(self, now_s: float) -> None:
        """Something came, or a new connection was made."""
        self._heard_s, self._pinged_s = now_s, None

    def broke(self, now_s: float) -> None:
        """The connection has ended."""
        if self._broken_s is None:
            self._broken_s = now_s

    def resumed(self, now_s: float) -> None:
        """There is a new connection."""
        self._broken_s = None
        self.came(now_s)

    def due(self, now_s: float) -> LinkDue:
        """What to do now."""
        if self._broken_s is not None:
            return LinkDue.GIVE_UP if now_s - self._broken_s >= self.give_up_s else LinkDue.NOTHING
        if now_s - self._heard_s < self.silence_s / 4:
            return LinkDue.NOTHING
        if self._pinged_s is None:
            self._pinged_s = now_s
            return LinkDue.PING
        # From the PING on: before, nobody had to say anything.
        return LinkDue.BREAK if now_s - self._pinged_s >= 0.75 * self.silence_s else LinkDue.NOTHING
