"""How long a member's timeout is follows from its own heartbeats so far (failure_detector.py). A worker that
starves on a loaded machine is alive, and losing it would end the job, while a summation service is replaced: so only a
worker is given time, as long as another process of its machine is heard. Processes that start together (ranks import
torch, services load kernels) starve each other for seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from byteps_py.failure_detector import FailureDetector
from byteps_py.scheduler.cluster_config import ClusterConfig
from byteps_py.scheduler.roster import MemberRecord

DOUBT_INTERVALS = 3
_KEPT = 100  # times of being held up; older ones are of no account


class LivenessMonitor:
    detector_class: type[FailureDetector] = FailureDetector

    def __init__(self, config: ClusterConfig) -> None:
        self._interval_s, self._timeout_s = config.heartbeat_interval_s, config.heartbeat_timeout_s
        self._ceiling_s = config.patience_s
        self._doubt_s = DOUBT_INTERVALS * self._interval_s
        self._last_tick_s: float | None = None
        self._awake_since_s = -float("inf")
        self._held_up: list[tuple[float, float]] = []  # until when, and for how long, the latest last

    def tick(self, now_s: float) -> None:
        """Call a few times per second. Ticks that come late show that the scheduler itself was held up
        (suspended, starved): it has heard nobody. That time counts for nobody's silence, and nobody is dead before the
        scheduler has listened for a whole timeout again. (To count anew after each would be never to count to ten
        timeouts on a machine that is busy.)"""
        if self._last_tick_s is not None and now_s - self._last_tick_s > self._timeout_s / 2:
            self._awake_since_s = now_s
            self._held_up = [*self._held_up[1 - _KEPT :], (now_s, now_s - self._last_tick_s)]
        self._last_tick_s = now_s

    def heard(self, member: MemberRecord, now_s: float) -> None:
        """A sign of life on a connection that stands. What the scheduler has not heard while it was held up itself
        was not late."""
        late_tick_s = 0.0 if self._last_tick_s is None else now_s - max(self._last_tick_s, member.last_seen_s)
        deaf_s = late_tick_s if late_tick_s > self._timeout_s / 2 else 0.0
        self._detector(member).heard(max(0.0, self._silence_s(member, now_s) - deaf_s))

    def started(self, member: MemberRecord) -> None:
        """It is ready for work."""
        self._detector(member).started()

    def timeout_s(self, member: MemberRecord) -> float:
        """The silence of this member that would be its death."""
        return self._detector(member).timeout_s()

    def too_long(
        self, member: MemberRecord, present: Sequence[MemberRecord], now_s: float, is_forming: bool = False
    ) -> str:
        """Why this member's silence is a death, in words; empty while it is not. ``present``: it and all others.
        ``is_forming``: the cluster is yet to come together."""
        silence_s, detector = self._silence_s(member, now_s), self._detector(member)
        if detector.suspicion(silence_s) < 1 or now_s - self._awake_since_s < self._timeout_s:
            return ""
        others_late_s = max((self._detector(m).lateness_s for m in present if m is not member), default=0.0)
        if detector.suspicion(silence_s, others_late_s) < 1:
            return ""
        here = [other for other in present if other.facts.machine_id == member.facts.machine_id]
        is_starting = is_forming or not all(other.is_ready for other in here)
        is_heard_beside = any(self._silence_s(other, now_s) < self._timeout_s for other in here)
        slow = is_starting or (member.is_worker and is_heard_beside)
        if slow and silence_s < self._ceiling_s:
            return ""
        return detector.why(silence_s)

    def doubt(self, member: MemberRecord, now_s: float) -> str:
        """What makes one doubt that a present member lives, in words; empty if nothing does."""
        silence_s = self._silence_s(member, now_s)
        return f"silent for {silence_s:.1f} s" if member.is_present and silence_s > self._doubt_s else ""

    def _detector(self, member: MemberRecord) -> FailureDetector:
        if member.detector is None:
            member.detector = self.detector_class(self._interval_s, self._timeout_s, self._ceiling_s)
        return member.detector

    def _silence_s(self, member: MemberRecord, now_s: float) -> float:
        deaf_s = sum(for_s for until_s, for_s in self._held_up if until_s > member.last_seen_s)
        return now_s - member.last_seen_s - deaf_s
