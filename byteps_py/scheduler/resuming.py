"""A member's end of its session with the scheduler, which outlives connections and schedulers.

Numbers what the member says and keeps it until the scheduler has it for good; drops what comes a second time. How much
is kept while there is no scheduler is bounded by what ranks do without its answers: each waits, up to the stall limit.
Pure: knows no connection. One thread at a time may call.

    connection 1:  Register ─►   ◄─ Welcome   Declare 1 ─►   ◄─ Membership 1   Arrive 2 ─►  ✂
    connection 2:  Register, has got 1 ─►   ◄─ Welcome, has got 1   Arrive 2 ─►   ◄─ Verdicts 2
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.outbox import Outbox

TOKEN_BYTES = 16
#: News that are worth nothing later: not kept, not numbered.
_FLEETING = ("heartbeat", "sight")


class MemberSession:
    """``is_member``: the scheduler has welcomed it."""

    def __init__(
        self, register: pb.Register, new_token: Callable[[], bytes] = lambda: secrets.token_bytes(TOKEN_BYTES)
    ) -> None:
        self._register = pb.Register()
        self._register.CopyFrom(register)
        self._register.token = new_token()
        self._outbox: Outbox[pb.MemberMessage] = Outbox()
        self._received = 0

    @property
    def is_member(self) -> bool:
        return self._register.member_id > 0

    @property
    def epoch(self) -> int:
        """Of the last membership that has come; 0: the cluster is not complete, as far as is known here."""
        return self._register.epoch

    @property
    def unheard(self) -> int:
        """How many messages the scheduler may not have got."""
        return len(self._outbox)

    def register(self) -> pb.MemberMessage:
        """The first message of a connection, the first one or a later one."""
        self._register.received = self._received
        return pb.MemberMessage(register=self._register)

    def say(self, message: pb.MemberMessage) -> pb.MemberMessage:
        """The message as it is to be sent, if there is a connection on which the scheduler has said Welcome."""
        stamped = pb.MemberMessage(received=self._received)
        stamped.MergeFrom(message)
        if message.WhichOneof("body") not in _FLEETING:
            stamped.number = self._outbox.put(stamped)
        return stamped

    def welcomed(self, message: pb.SchedulerMessage) -> list[pb.MemberMessage]:
        """Welcome has come on a new connection: what is to be sent there, before anything else.

        Raises ProtocolError if the scheduler has forgotten what it had confirmed.
        """
        if not self._outbox.has(message.received):
            raise ProtocolError(
                f"the scheduler has got {message.received} messages of this process and had confirmed more before: "
                "it goes on from an old copy of its journal"
            )
        self._register.member_id = message.welcome.member_id
        self._outbox.drop(message.received)
        return [kept for _, kept in self._outbox]

    def hear(self, message: pb.SchedulerMessage) -> bool:
        """True if this message is news, False if it has come before or says nothing.

        Raises ProtocolError if one before it is missing, or if epochs go backwards.
        """
        self._outbox.drop(message.received)
        if message.number:
            if message.number <= self._received:
                return False
            if message.number != self._received + 1:
                raise ProtocolError(f"message {message.number} of the scheduler came after message {self._received}")
            self._received = message.number
        if message.HasField("membership"):
            epoch = message.membership.epoch
            if epoch <= self._register.epoch:
                raise ProtocolError(f"the scheduler opens epoch {epoch} after epoch {self._register.epoch}")
            self._register.epoch = epoch
        return message.WhichOneof("body") is not None
