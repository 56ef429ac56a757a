"""How long a member has been silent, as far as that proves anything. Pure."""

from __future__ import annotations


class Silence:
    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last_tick_s: float | None = None
        self._awake_since_s = -float("inf")

    def tick(self, now_s: float) -> None:
        """Call a few times per second. Ticks that come late show that the scheduler itself was held up
        (suspended, starved): it has heard nobody, and starts to count anew."""
        if self._last_tick_s is not None and now_s - self._last_tick_s > self._timeout_s / 2:
            self._awake_since_s = now_s
        self._last_tick_s = now_s

    def too_long(self, last_seen_s: float, now_s: float) -> str:
        """Why this silence is a death, in words; empty while it is not."""
        silence_s = now_s - max(last_seen_s, self._awake_since_s)
        if silence_s < self._timeout_s:
            return ""
        return f"nothing was heard of it for {silence_s:.1f} s (PS_HEARTBEAT_TIMEOUT)"
