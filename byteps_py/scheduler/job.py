"""The state of the whole job on the scheduler, and its one way to end badly. Pure.

    FORMING ──all there──► RUNNING ──all workers left, or stop──► ENDED
       │                      │
       └── deadline, death ───┴── death, broken protocol, report of a rank ──► FAILED

``reason`` is one sentence on why the state is what it is; status, logs and errors print the same one.
"""

from __future__ import annotations

from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.cluster import ClusterConfig
from byteps_py.scheduler.member import MemberRecord
from byteps_py.scheduler.outgoing import Outgoing, failure, to_each
from byteps_py.scheduler.roster import Roster

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
