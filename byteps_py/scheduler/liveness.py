"""Whether a silent member counts as dead. Pure: time is an argument.

A member's timeout follows from its own heartbeats so far (failure_detector.py). Two kinds of silence are forgiven for
longer. A worker that gets no processor time on a loaded machine is alive, and losing it would end the job, whereas
others replace a summation service: so a worker has more time while another process of its machine is heard. And
processes that start together (ranks import torch, services load kernels) hold each other up for seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from byteps_py.failure_detector import FailureDetector
from byteps_py.scheduler.cluster_config import ClusterConfig
from byteps_py.scheduler.roster import MemberRecord

DOUBT_INTERVALS = 3
_KEPT = 100  # how many pauses of the scheduler itself are remembered


class LivenessMonitor:
    """Judges the members of one job. ``detector_class``: the class of their detectors; tests name another one."""

    detector_class: type[FailureDetector] = FailureDetector

    def __init__(self, config: ClusterConfig) -> None:
        self._interval_s, self._timeout_s = config.heartbeat_interval_s, config.heartbeat_timeout_s
        self._ceiling_s = config.patience_s
        self._doubt_s = DOUBT_INTERVALS * self._interval_s
        self._last_tick_s: float | None = None
        self._awake_since_s = -float("inf")
        self._pauses: list[tuple[float, float]] = []  # (end, duration) of each pause, the latest last

    def tick(self, now_s: float) -> None:
        """Call a few times per second. A late tick shows that the scheduler itself did not run (it was suspended, or
        got no processor time) and heard no member. Such a pause counts for no member's silence, and no member is dead
        before the scheduler has listened for a whole timeout again. (Silences are not counted from zero after a pause:
        on a busy machine they would never reach ten timeouts.)"""
        if self._last_tick_s is not None and now_s - self._last_tick_s > self._timeout_s / 2:
            self._awake_since_s = now_s
            self._pauses = [*self._pauses[1 - _KEPT :], (now_s, now_s - self._last_tick_s)]
        self._last_tick_s = now_s

    def heard(self, member: MemberRecord, now_s: float) -> None:
        """A message arrived on the member's connection. A pause of the scheduler does not make it late."""
        late_tick_s = 0.0 if self._last_tick_s is None else now_s - max(self._last_tick_s, member.last_seen_s)
        deaf_s = late_tick_s if late_tick_s > self._timeout_s / 2 else 0.0
        self._detector(member).heard(max(0.0, self._silence_s(member, now_s) - deaf_s))

    def started(self, member: MemberRecord) -> None:
        """The member is ready for work."""
        self._detector(member).started()

    def timeout_s(self, member: MemberRecord) -> float:
        """The silence, in seconds, after which this member counts as dead."""
        return self._detector(member).timeout_s()

    def too_long(
        self, member: MemberRecord, present: Sequence[MemberRecord], now_s: float, is_forming: bool = False
    ) -> str:
        """Why the member counts as dead, in words; empty while it does not. ``present``: all members, with this one.
        ``is_forming``: the cluster is not complete yet."""
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
        """Why a present member may be dead, for the status, in words; empty if there is no doubt."""
        silence_s = self._silence_s(member, now_s)
        return f"silent for {silence_s:.1f} s" if member.is_present and silence_s > self._doubt_s else ""

    def _detector(self, member: MemberRecord) -> FailureDetector:
        if member.detector is None:
            member.detector = self.detector_class(self._interval_s, self._timeout_s, self._ceiling_s)
        return member.detector

    def _silence_s(self, member: MemberRecord, now_s: float) -> float:
        deaf_s = sum(for_s for until_s, for_s in self._pauses if until_s > member.last_seen_s)
        return now_s - member.last_seen_s - deaf_s
