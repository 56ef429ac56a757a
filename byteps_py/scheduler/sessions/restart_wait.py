"""After a restart of the scheduler: do the members of the journal's job come back, or does a new job begin? Pure.

A new job may have the name and the address of one that was killed with all its processes. Then no member comes back,
and every process that registers is a stranger. The scheduler puts strangers off until it knows which of the two it is.

    NOT_WAITING ──restart──► WAITING ──a member is back──► NOT_WAITING  the job goes on; members that are still away
                                │                                       have until the limit, and are lost then
                                ├──no member, a stranger asks, 2 timeouts over──► ABANDONED  a new job begins
                                ├──no member, limit over──► ABANDONED
                                └──no member, limit over, the job was over──► NOT_WAITING  it ends
"""

from __future__ import annotations

import enum

#: In heartbeat timeouts: how long members have to come back, and how long strangers wait for them.
LIMIT = 5
STRANGERS_WAIT = 2


class WaitState(enum.Enum):
    """See the diagram of this module."""

    NOT_WAITING = "not waiting"
    WAITING = "no member is back yet"
    ABANDONED = "no member came back"


class RestartWait:
    """One scheduler's wait for the members of its journal's job. Times are in seconds of the scheduler's clock."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._limit_s = LIMIT * heartbeat_timeout_s
        self._strangers_wait_s = STRANGERS_WAIT * heartbeat_timeout_s
        self._began_s = -float("inf")
        self._has_stranger = False  # a process that is no member has asked to become one
        self.state = WaitState.NOT_WAITING

    def begin(self, now_s: float, has_members: bool, is_forming: bool) -> float:
        """The scheduler has restarted at ``now_s``. Returns how long members have to come back."""
        self._began_s = now_s
        if has_members or not is_forming:
            self.state = WaitState.WAITING
        if not has_members:
            self._limit_s = self._strangers_wait_s
        return self._limit_s

    def member_is_back(self) -> None:
        """A member of the journal has resumed its session."""
        if self.state is WaitState.WAITING:
            self.state = WaitState.NOT_WAITING

    def stranger_asks(self) -> None:
        """A process that is no member wants to become one."""
        self._has_stranger = True

    def tick(self, now_s: float, job_is_over: bool) -> None:
        """Check the deadlines. Call it a few times per second."""
        if self.state is not WaitState.WAITING:
            return
        waited_s = now_s - self._began_s
        if waited_s >= self._limit_s and job_is_over and not self._has_stranger:
            self.state = WaitState.NOT_WAITING  # its members have left, as they should
        elif waited_s >= self._limit_s or (self._has_stranger and waited_s >= self._strangers_wait_s):
            self.state = WaitState.ABANDONED
