"""One member's session, what is sent to it, and how to tell whether the same was said again. Pure data."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.outbox import Outbox
from byteps_py.scheduler.outgoing import Outgoing


@dataclass(frozen=True, slots=True)
class Sent:
    """``message`` is to be sent on ``stream``; None: the stream is to be ended."""

    stream: int
    message: pb.SchedulerMessage | None
    number: int = 0
    received: int = 0

    def stamped(self) -> pb.SchedulerMessage:
        stamped = pb.SchedulerMessage(number=self.number, received=self.received)
        if self.message is not None:
            stamped.MergeFrom(self.message)
        return stamped


@dataclass(slots=True, eq=False)
class SessionRecord:
    id: int
    stream: int | None
    digest: bytes = b""  # of its token; empty until it has registered
    member_id: int = 0
    who: str = ""
    outbox: Outbox[pb.SchedulerMessage] = field(default_factory=Outbox)
    received: int = 0  # the last number of its messages
    confirmed: int = 0  # … that it has been told to have come
    away_until_s: float | None = None
    away_why: str = ""
    away_since_s: float = 0.0
    over: str = ""  # why it can't be gone on with


def check(out: Outgoing) -> int:
    """A number for what the core says, the same whenever it says the same."""
    value = 0
    texts: dict[int, bytes] = {}
    for connection, message in out:
        text = texts.get(id(message))
        if text is None:
            text = texts[id(message)] = message.SerializeToString(deterministic=True)
        value = zlib.crc32(text, zlib.crc32(connection.to_bytes(8, "little"), value))
    return value
