"""When a member's silence is its death: an accrual failure detector, one for each member. Pure; knows no clock.

    suspicion = silence / the silence that this member can't be expected to survive
    0 ──────────── lives ──────────── 1 ── dead

What a member can't be expected to survive follows from its own past: ``GAIN`` times as late as the latest of its recent
heartbeats, or ``GAIN_OTHERS`` times as late as others' have been, whose processors it may share. On a quiet machine,
where none is late, that is less than the floor (PS_HEARTBEAT_TIMEOUT), which then decides. On a busy machine the same
silence proves less. The ceiling (BYTEPS_HEARTBEAT_TIMEOUT_MAX_S) bounds how long a death can be overlooked. The death
of a process needs no detector: its connection ends.

Not the mean and deviation of the intervals, as in Hayashibara's detector: waits for a processor have a heavy tail, and
the worst of some hundred says more about the worst of ten thousand than their mean does. It is forgotten by halves.
"""

from __future__ import annotations

from dataclasses import dataclass

#: So many times as late as any heartbeat has been may the next one be.
GAIN = 6.0
#: The same for what only others have shown so far: the load may have begun with the silence that is to be judged.
GAIN_OTHERS = 2.0
#: A late heartbeat counts for half after so long.
HALF_LIFE_S = 180.0


@dataclass(slots=True)
class FailureDetector:
    """``interval_s``: between heartbeats, as sent. ``lateness_s``: of the latest one, as far as it is remembered."""

    interval_s: float
    floor_s: float
    ceiling_s: float
    lateness_s: float = 0.0

    def heard(self, after_s: float) -> None:
        """A sign of life, ``after_s`` since the one before."""
        remembered_s = self.lateness_s * 0.5 ** (after_s / HALF_LIFE_S)
        self.lateness_s = max(remembered_s, after_s - self.interval_s)

    def started(self) -> None:
        """The processes of its machine have started, and starved each other: that is over, as far as is known."""
        self.lateness_s /= 4

    def timeout_s(self, others_lateness_s: float = 0.0) -> float:
        """The silence that means death."""
        late_s = max(GAIN * self.lateness_s, GAIN_OTHERS * others_lateness_s)
        return min(self.ceiling_s, max(self.floor_s, self.interval_s + late_s))

    def suspicion(self, silence_s: float, others_lateness_s: float = 0.0) -> float:
        """1 and more: dead."""
        return silence_s / self.timeout_s(others_lateness_s)

    def why(self, silence_s: float) -> str:
        """Why so long a silence was a death, with the variable that says how long it may be."""
        text = f"nothing was heard of it for {silence_s:.1f} s"
        if silence_s >= self.ceiling_s > self.floor_s:
            return f"{text} (BYTEPS_HEARTBEAT_TIMEOUT_MAX_S)"
        if self.timeout_s() > self.floor_s:
            return f"{text} (PS_HEARTBEAT_TIMEOUT, longer as one of its heartbeats was {self.lateness_s:.1f} s late)"
        return f"{text} (PS_HEARTBEAT_TIMEOUT)"
