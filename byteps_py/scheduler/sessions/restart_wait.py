"""Whether the members of a journal's job come back to a scheduler that was started again, and when to give up. Pure.

The same job and address may also be a new job's, after one that was killed with all its processes: then nobody comes
back, and whoever comes is a stranger. UnauthenticatedConnections are put off until it is clear which of both it is.

    started again ──a member is back──► the job goes on; who is still away has until the limit, then is lost
                  ──nobody, a stranger asks, 2 timeouts over──► abandoned: a new job
                  ──nobody, limit──► abandoned; if the job was over anyway, it ends
"""

from __future__ import annotations

#: In heartbeat timeouts.
LIMIT = 5
STRANGERS_WAIT = 2


class RestartWait:
    """``nobody_is_back``: members of a journal's job are waited for, and none has come yet."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._limit_s = LIMIT * heartbeat_timeout_s
        self._wait_s = STRANGERS_WAIT * heartbeat_timeout_s
        self._began_s = -float("inf")
        self._asked = False
        self.nobody_is_back = False
        self.is_abandoned = False

    def begin(self, now_s: float, has_members: bool, is_forming: bool) -> float:
        """Started again at ``now_s``. How long members have to come back."""
        self._began_s = now_s
        self.nobody_is_back = has_members or not is_forming
        if not has_members:
            self._limit_s = self._wait_s
        return self._limit_s

    def is_back(self) -> None:
        self.nobody_is_back = False

    def somebody_asks(self) -> None:
        """A process that is no member wants to become one."""
        self._asked = True

    def is_open(self, now_s: float) -> bool:
        """True while members may yet come back."""
        return now_s - self._began_s < self._limit_s

    def tick(self, now_s: float, job_is_over: bool) -> None:
        if not self.nobody_is_back:
            return
        gave_up = not self.is_open(now_s)
        if gave_up and job_is_over and not self._asked:
            self.nobody_is_back = False  # they have gone, as they should
        elif gave_up or (self._asked and now_s - self._began_s >= self._wait_s):
            self.is_abandoned = True
