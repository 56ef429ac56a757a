"""After a restart of the scheduler: do the members of the journal's job come back, or does a new job begin? Pure.

A new job may have the name and the address of one whose processes were killed, all of them or all but the servers of
CPU machines. Then no worker comes back, and processes that register are strangers. The scheduler puts strangers off
until it knows which of the two it is. It waits for workers: what is left of a job without any can't go on. (A job that
had no worker yet waits for any member.)

    NOT_WAITING ──restart──► WAITING ──a worker is back──► NOT_WAITING  the job goes on; members that are still away
                                │                                       have until the limit, and are lost then
                                ├──each worker has an heir on its machine──► ABANDONED  a new job begins
                                ├──2 timeouts over, a stranger has asked──► ABANDONED   (beside servers that are back:
                                │                                                       an heir of any machine)
                                ├──limit over, nobody is back──► ABANDONED
                                └──limit over, the job was over, or only servers are back──► NOT_WAITING  it ends
    WAITING, NOT_WAITING ──the job was over, a stranger asks──► ABANDONED

An heir is a worker with the machine index of one that is away. On the same machine it proves that this one is dead: the
two can't have the machine's socket for ranks at the same time.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import job as states

#: In heartbeat timeouts: how long members have to come back, and how long strangers wait for them.
LIMIT = 5
STRANGERS_WAIT = 2

#: Where a worker is at home: its machine's id, and its index.
Home = tuple[str, int]


class WaitState(enum.Enum):
    """See the diagram of this module."""

    NOT_WAITING = "not waiting"
    WAITING = "no worker is back yet"
    ABANDONED = "no worker came back"


class RestartWait:
    """One scheduler's wait for the members of its journal's job. Times are in seconds of the scheduler's clock."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._limit_s = LIMIT * heartbeat_timeout_s
        self._strangers_wait_s = STRANGERS_WAIT * heartbeat_timeout_s
        self._began_s: float | None = None
        self._workers: set[Home] = set()  # those of the job
        self._survived_by: set[Home] = set()  # workers of the job that have an heir on their machine
        self._has_stranger = False  # a process that is no member has asked to become one
        self._has_heir = self._was_over = False
        self._is_anyone_back = False
        self.state = WaitState.NOT_WAITING

    def begin(self, now_s: float, has_members: bool, state: pb.StatusReply.State, workers: Iterable[Home]) -> float:
        """The scheduler has restarted at ``now_s``, with a job in this state. Returns how long members have to come
        back."""
        self._began_s, self._workers = now_s, set(workers)
        self._was_over = state in (states.FAILED, states.ENDED)
        if has_members or state != states.FORMING:
            self.state = WaitState.WAITING
        if not has_members:
            self._limit_s = self._strangers_wait_s
        return self._limit_s

    def member_is_back(self, is_worker: bool) -> None:
        """A member of the journal has resumed its session."""
        self._is_anyone_back = True
        if self.state is WaitState.WAITING and (is_worker or not self._workers):
            self.state = WaitState.NOT_WAITING

    def stranger_asks(self, worker: Home | None) -> None:
        """A process that is no member wants to become one. ``worker``: where it is at home, if it is a worker."""
        if self._began_s is None:
            return
        self._has_stranger = True
        if worker is not None:
            self._has_heir |= worker[1] in {index for _, index in self._workers}
            self._survived_by |= {worker} & self._workers
        is_sure = bool(self._workers) and self._survived_by == self._workers and self.state is WaitState.WAITING
        if is_sure or self._was_over:
            self.state = WaitState.ABANDONED

    def tick(self, now_s: float, job_is_over: bool) -> None:
        """Check the deadlines. Call it a few times per second."""
        if self.state is not WaitState.WAITING or self._began_s is None:
            return
        waited_s = now_s - self._began_s
        if waited_s >= self._strangers_wait_s and (self._has_heir if self._is_anyone_back else self._has_stranger):
            self.state = WaitState.ABANDONED
        elif waited_s >= self._limit_s:
            # Of a job that was over, all may have left, as they should.
            ends = self._is_anyone_back or (job_is_over and not self._has_stranger)
            self.state = WaitState.NOT_WAITING if ends else WaitState.ABANDONED
