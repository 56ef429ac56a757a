"""When the machines of a quorum get their copies of accumulated values: together, in waves. Pure; time is an argument.

A machine whose change was added waits. Once a quorum waits, the wave is open for a grace window more, and machines that
come within it get the same copy. A machine that misses the wave is late: its change is added when it comes, and it gets
its copy at once, as a late member of that wave. So no machine waits for a slow or lost one, and no change is lost.

    first arrival ──── quorum is there ──── median + 4 MAD after the first arrival ────► copies for all that wait
                                      └──── all are there ──────────────────────────────┘

The window is measured, not set: the median of how long after the first of their wave machines arrived lately, and four
median absolute deviations, which a minority of slow machines does not move (Decoupled DiLoCo, 2026, waits for a fixed
time). Until the first waves have been measured, all machines are waited for.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection

#: Arrivals that count. Also the number of deviations, and the shortest window: timers are not better.
_ARRIVALS = 64
_DEVIATIONS = 4
_LEAST_WINDOW_S = 0.05


class Waves:
    """Those of one accumulator. ``open``: machines that get the present values before anything else is added.
    ``answered``: by machine, its last round that was in a wave which has ended. If the copy was lost on its way, the
    machine gets another one at once: those of that wave have gone on, perhaps to wait for it elsewhere."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.answered: dict[int, int] = {}
        self._began_at: float | None = None
        self._last_began_at = 0.0
        self._members: set[int] | None = None  # of the last wave; None: nobody can be late
        self._arrivals: deque[float] = deque(maxlen=_ARRIVALS)

    def restart(self) -> None:
        """A new epoch: machines wait anew, and none is late."""
        self.open.clear()
        self.answered.clear()
        self._began_at = self._members = None

    def is_late(self, machine: int) -> bool:
        """It missed the last wave, and no other one has begun."""
        return self._members is not None and self._began_at is None and machine not in self._members

    def arrived(self, machine: int, now: float) -> None:
        """A machine's change was added."""
        if self.is_late(machine) and self._members is not None:
            self._members.add(machine)
            self._arrivals.append(now - self._last_began_at)
            return
        if self._began_at is None:
            self._began_at = now
        self._arrivals.append(now - self._began_at)

    def window_s(self, machines: int) -> float:
        """For how long after its first arrival a wave of so many machines is open."""
        if len(self._arrivals) < 2 * machines:
            return float("inf")
        median = statistics.median(self._arrivals)
        deviation = statistics.median(abs(each - median) for each in self._arrivals)
        return max(median + _DEVIATIONS * deviation, _LEAST_WINDOW_S)

    def release(self, waiting: Collection[int], present: Collection[int], quorum: int, now: float) -> bool:
        """Let those who wait have their copies if it is time. Returns True if only time is missing. ``present``: the
        machines that have not joined."""
        self.open.intersection_update(waiting)  # of the others, connections were lost
        if self.open or not waiting or len(waiting) < needed(present, quorum):
            return False
        if self._began_at is None:
            self._began_at = now
        if not set(present) <= set(waiting) and now < self._began_at + self.window_s(len(present)):
            return True
        self.open, self._members = set(waiting), set(waiting)
        self._last_began_at, self._began_at = self._began_at, None
        return False


def needed(present: Collection[int], quorum: int) -> int:
    """How many machines a wave needs: a quorum, or all that are left."""
    return min(quorum, max(len(present), 1))
