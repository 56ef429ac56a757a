"""When a scheduler whose job is over can go. Pure."""

from __future__ import annotations

from dataclasses import dataclass

END_LINGER_S = 10.0  # how long members may take to leave a job that has ended
FAILED_LINGER_S = 30.0  # … that has failed: trainers notice at their next operation


@dataclass(frozen=True, slots=True)
class Finish:
    """The scheduler's work is over: its exit status, and why."""

    exit_status: int
    reason: str


def finish(has_failed: bool, over_for_s: float, has_connections: bool, late: str, reason: str) -> Finish | None:
    """Not None once all have left, or had their time to. ``late``: who has not, in words."""
    if has_connections and over_for_s < (FAILED_LINGER_S if has_failed else END_LINGER_S):
        return None
    return Finish(int(has_failed), reason + (f" (still there: {late})" if has_connections and late else ""))
