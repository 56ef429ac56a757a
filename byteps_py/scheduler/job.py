"""The state of the whole job on the scheduler, the messages of its components to members, and the time at which the
scheduler may exit. Pure.

    FORMING ──all have registered──► RUNNING ──all workers left, or stop──► ENDED
       │                                │
       └── deadline, lost member ───────┴── lost member, broken protocol, report of a rank ──► FAILED

``reason`` is one sentence on why the state is what it is. Status pages, logs and errors print this sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.roster import ClusterConfig, MemberRecord, Roster

FORMING = pb.StatusReply.STATE_FORMING
RUNNING = pb.StatusReply.STATE_RUNNING
FAILED = pb.StatusReply.STATE_FAILED
ENDED = pb.StatusReply.STATE_ENDED


#: In order of sending. After a Refused the connection is to be closed.
Outgoing = list[tuple[int, pb.SchedulerMessage]]
#: Takes a member, the body of its message, and the time. Raises ProtocolError for messages that no correct member
#: sends.
MessageHandler = Callable[[MemberRecord, Any, float], Outgoing]
END_LINGER_S = 10.0  # how long members may take to leave a job that has ended
FAILED_LINGER_S = 30.0  # … and one that has failed: trainers notice it at their next operation


class Job:
    """The state that the components of the scheduler share. ``over_s``: when it ended or failed; None while it goes
    on."""

    roster_class: type[Roster] = Roster

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.roster = self.roster_class(config)
        self.state: pb.StatusReply.State = FORMING
        self.reason = self.roster.missing()
        self.over_s: float | None = None
        self.keep_states = False  # no rank has reported the end of training: servers keep states for a restarted job

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING

    def end(self, reason: str, now_s: float) -> None:
        """End in order. A job that is over already keeps its first reason."""
        if self.over_s is None:
            self.state, self.reason, self.over_s = ENDED, reason, now_s

    def fail(self, error: str, text: str, now_s: float, silent_for: MemberRecord | None = None) -> Outgoing:
        """End with an error, a type name of byteps_py/errors.py; all members but ``silent_for`` are told."""
        if self.over_s is not None:
            return []  # the first failure explains the later ones
        self.state, self.reason, self.over_s = FAILED, text, now_s
        members = [m for m in self.roster.present() if m is not silent_for]
        return to_each(members, failure(error, text)) + self.dismiss_servers()

    def dismiss_servers(self) -> Outgoing:
        """Stop the servers of a job that is over; they stay until the last worker has left."""
        if self.roster.workers():
            return []
        stop = pb.Stop(reason=self.reason, keep_states=self.keep_states)
        return to_each(self.roster.present(), pb.SchedulerMessage(stop=stop))

    def accepts(self, what: str) -> bool:
        """True if messages that only members of a running job send are to be handled: after the end, nobody needs the
        answer. Raises ProtocolError before the first membership, when ranks have no numbers yet."""
        if self.state == FORMING:
            raise ProtocolError(f"it sent {what} before the cluster was complete")
        return self.is_running


def ranks_of(member: MemberRecord) -> range:
    """The global ranks of a communication service. Raises ProtocolError for a member of another kind."""
    if not member.is_worker:
        raise ProtocolError("only a communication service may send this: it speaks of ranks")
    return member.ranks


def to_each(members: Iterable[MemberRecord], message: pb.SchedulerMessage) -> Outgoing:
    """``message`` for each of ``members``, in order."""
    return [(m.connection, message) for m in members]


def refused(connection: int, error: str, message: str, later: bool = False) -> tuple[int, pb.SchedulerMessage]:
    """A Refused for a connection. ``error``: a type name of byteps_py/errors.py; ``later``: the process may try
    again."""
    return connection, pb.SchedulerMessage(refused=pb.Refused(error=error, message=message, later=later))


def failure(error: str, message: str, left: Iterable[int] = ()) -> pb.SchedulerMessage:
    """``left``: the ranks that have shut down in order, if that is the only reason."""
    ranks = list(left)
    return pb.SchedulerMessage(failure=pb.Failure(error=error, message=message, orderly=bool(ranks), ranks=ranks))


@dataclass(frozen=True, slots=True)
class Finish:
    """The scheduler may exit, with this status. ``reason``: why, in one sentence."""

    exit_status: int
    reason: str


def finish(has_failed: bool, over_for_s: float, has_connections: bool, late: str, reason: str) -> Finish | None:
    """The outcome once all members have left, or have had the time to; else None. ``late``: those that have not, in
    words."""
    if has_connections and over_for_s < (FAILED_LINGER_S if has_failed else END_LINGER_S):
        return None
    return Finish(int(has_failed), reason + (f" (still connected: {late})" if has_connections and late else ""))
