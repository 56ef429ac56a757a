"""What the scheduler says, and to which connection. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.member import MemberRecord

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
