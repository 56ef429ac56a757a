"""An accrual failure detector, one for each member: how long a silence means that the member is dead.

Pure: it knows no clock. The thread that owns the member calls it.

    suspicion = silence / timeout of this member
    0 ──────────── alive ──────────── 1 ── dead

The timeout follows from the past. It is ``GAIN`` times the delay of the member's most delayed recent heartbeat, or
``GAIN_OTHERS`` times the delay of other members' heartbeats, which may share its processors. On an idle machine no
heartbeat is late; there the floor (PS_HEARTBEAT_TIMEOUT) decides. On a busy machine the same silence proves less. The
ceiling (BYTEPS_HEARTBEAT_TIMEOUT_MAX_S) bounds how long a death can remain unnoticed. A process that ends needs no
detector, because its connection ends too.

Hayashibara's detector uses the mean and the deviation of the intervals; this one does not. The time that a process
waits for a processor has a heavy tail, and the maximum of some hundred waits says more about the maximum of ten
thousand than their mean does. The remembered maximum halves every ``HALF_LIFE_S`` seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The next heartbeat may be this many times as late as the member's most delayed one.
GAIN = 6.0
#: The same for other members' heartbeats. They count because the load may have begun with the silence itself.
GAIN_OTHERS = 2.0
#: A member whose link is slow (config/tuning.py) has so many times the shortest timeout. A queue there may hold a
#: second of other traffic, and what is lost in it comes some such seconds later.
SLOW_LINK = 5.0
#: After this many seconds a late heartbeat counts for half.
HALF_LIFE_S = 180.0


@dataclass(slots=True)
class FailureDetector:
    """The state of one member. All times are seconds.

    Attributes:
        interval_s: time between heartbeats as the member sends them.
        floor_s: the shortest timeout.
        ceiling_s: the longest timeout.
        lateness_s: delay of the most delayed heartbeat so far, halved every ``HALF_LIFE_S``.
        has_slow_link: its heartbeats come over a link of a few Mbit/s.

    >>> detector = FailureDetector(interval_s=0.2, floor_s=1.0, ceiling_s=10.0)
    >>> detector.timeout_s()
    1.0
    >>> detector.on_heartbeat(0.7)  # half a second late
    >>> round(detector.timeout_s(), 1)
    3.2
    >>> FailureDetector(interval_s=0.2, floor_s=1.0, ceiling_s=10.0, has_slow_link=True).timeout_s()
    5.0
    """

    interval_s: float
    floor_s: float
    ceiling_s: float
    lateness_s: float = 0.0
    has_slow_link: bool = False

    def on_heartbeat(self, after_s: float) -> None:
        """Record a heartbeat, ``after_s`` seconds after the one before."""
        remembered_s = self.lateness_s * 0.5 ** (after_s / HALF_LIFE_S)
        self.lateness_s = max(remembered_s, after_s - self.interval_s)

    def started(self) -> None:
        """Record that the machine's processes have started. They were late because they competed for processors while
        they started, which is over."""
        self.lateness_s /= 4

    def timeout_s(self, others_lateness_s: float = 0.0) -> float:
        """The silence that means that the member is dead."""
        late_s = max(GAIN * self.lateness_s, GAIN_OTHERS * others_lateness_s)
        return min(self.ceiling_s, max(self._least_s, self.interval_s + late_s))

    @property
    def _least_s(self) -> float:
        return min(self.ceiling_s, SLOW_LINK * self.floor_s) if self.has_slow_link else self.floor_s

    def suspicion(self, silence_s: float, others_lateness_s: float = 0.0) -> float:
        """``silence_s`` as a fraction of the timeout; 1 or more means dead."""
        return silence_s / self.timeout_s(others_lateness_s)

    def why(self, silence_s: float) -> str:
        """Why a silence of ``silence_s`` means that the member is dead, naming the variable that sets the limit."""
        text = f"nothing was heard of it for {silence_s:.1f} s"
        if silence_s >= self.ceiling_s > self.floor_s:
            return f"{text} (BYTEPS_HEARTBEAT_TIMEOUT_MAX_S)"
        if self.timeout_s() > self._least_s:
            return f"{text} (PS_HEARTBEAT_TIMEOUT, longer as one of its heartbeats was {self.lateness_s:.1f} s late)"
        if self.has_slow_link:
            return f"{text} (PS_HEARTBEAT_TIMEOUT, {SLOW_LINK:g} times as long as its link is slow)"
        return f"{text} (PS_HEARTBEAT_TIMEOUT)"
