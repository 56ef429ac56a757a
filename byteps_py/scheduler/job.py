"""The state of the whole job on the scheduler, what its parts say to members, and when the scheduler may exit. Pure.

    FORMING ──all have registered──► RUNNING ──all workers left, or stop──► ENDED
       │                                │
       └── deadline, lost member ───────┴── lost member, broken protocol, report of a rank ──► FAILED

``reason`` is one sentence on why the state is what it is. Status pages, logs and errors print this sentence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.cluster_config import ClusterConfig
from byteps_py.scheduler.roster import MemberRecord, Roster

FORMING = pb.StatusReply.STATE_FORMING
RUNNING = pb.StatusReply.STATE_RUNNING
FAILED = pb.StatusReply.STATE_FAILED
ENDED = pb.StatusReply.STATE_ENDED


class Job:
    """What the parts of the scheduler share. ``over_s``: since when it has ended or failed."""

    roster_class: type[Roster] = Roster

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.roster = self.roster_class(config)
        self.state: pb.StatusReply.State = FORMING
        self.reason = self.roster.missing()
        self.over_s: float | None = None

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING

    def end(self, reason: str, now_s: float) -> None:
        """In order. What has ended already has ended for the first reason."""
        if self.over_s is None:
            self.state, self.reason, self.over_s = ENDED, reason, now_s

    def fail(self, error: str, text: str, now_s: float, silent_for: MemberRecord | None = None) -> Outgoing:
        if self.over_s is not None:
            return []  # the first failure explains the later ones
        self.state, self.reason, self.over_s = FAILED, text, now_s
        told = [m for m in self.roster.present() if m is not silent_for]
        return to_each(told, failure(error, text)) + self.dismiss_servers()

    def dismiss_servers(self) -> Outgoing:
        """Servers of a job that is over stay as long as a worker does, and no longer."""
        if self.roster.workers():
            return []
        return to_each(self.roster.present(), pb.SchedulerMessage(stop=pb.Stop(reason=self.reason)))

    def takes(self, what: str) -> bool:
        """Whether to listen to what only members of a running job say: before the membership, ranks have no numbers
        to vote with; after the end, nobody needs the answer."""
        if self.state == FORMING:
            raise ProtocolError(f"sent {what} before the cluster was complete")
        return self.is_running


def ranks_of(member: MemberRecord) -> range:
    """Those that it speaks for. Raises ProtocolError if it speaks for none."""
    if not member.is_worker:
        raise ProtocolError("only communication services speak for ranks")
    return member.ranks


#: In order of sending. After a Refused the connection is to be closed.
Outgoing = list[tuple[int, pb.SchedulerMessage]]


def to_each(members: Iterable[MemberRecord], message: pb.SchedulerMessage) -> Outgoing:
    return [(m.connection, message) for m in members]


def refused(connection: int, error: str, message: str, later: bool = False) -> tuple[int, pb.SchedulerMessage]:
    return connection, pb.SchedulerMessage(refused=pb.Refused(error=error, message=message, later=later))


def failure(error: str, message: str, left: Iterable[int] = ()) -> pb.SchedulerMessage:
    """``left``: ranks that have shut down in order, the only reason; none if there is a worse one."""
    ranks = list(left)
    return pb.SchedulerMessage(failure=pb.Failure(error=error, message=message, orderly=bool(ranks), ranks=ranks))


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
