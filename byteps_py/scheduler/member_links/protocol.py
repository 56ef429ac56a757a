"""The protocol of a member's link: messages survive broken connections and restarted schedulers. And a member's end.

Each side numbers its messages and keeps them until the other side confirms them; a message that arrives twice is
dropped. The messages that a member keeps while there is no scheduler are limited, because ranks wait for its answers:
each rank waits, up to the stall limit. The scheduler's end is links.py. Pure: knows no connection. One thread at a time
may call.

    connection 1:  Register ─►   ◄─ Welcome   Declare 1 ─►   ◄─ Membership 1   Arrive 2 ─►  ✂
    connection 2:  Register, received 1 ─►   ◄─ Welcome, received 1   Arrive 2 ─►   ◄─ Verdicts 2

Large messages on their way to many members are compressed once, and sent to each as these bytes. An epoch's table of
all members goes to all of them, so its bytes grow with the square of their number. Names of hosts and addresses are
alike: compressed, they take a tenth. And the scheduler copies bytes to each member, instead of building and serializing
thousands of objects again for each. A member that has the table of an earlier epoch gets what has changed
(membership_change.py).
"""

from __future__ import annotations

import secrets
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError

from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.member_links.membership_change import change_between, changed

M = TypeVar("M")


TOKEN_BYTES = 16
#: Reports that a newer one soon replaces: they are not kept and have no number.
UNNUMBERED = ("heartbeat", "stack_report", "answer")


class Outbox(Generic[M]):
    """The messages of one side that the other side has not confirmed. They are numbered from 1; ``last``: the number of
    the newest.

    >>> box = Outbox[str]()
    >>> box.put("a"), box.put("b")
    (1, 2)
    >>> box.drop(1)
    >>> list(box), box.last
    ([(2, 'b')], 2)
    """

    def __init__(self) -> None:
        self.last = 0
        self._kept: deque[M] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[tuple[int, M]]:
        return enumerate(self._kept, self.last - len(self._kept) + 1)

    def put(self, message: M) -> int:
        """Keep a message until it is confirmed. Returns its number."""
        self._kept.append(message)
        self.last += 1
        return self.last

    def has(self, received: int) -> bool:
        """True if all messages after number ``received``, the other side's last one, are still here."""
        return self.last - len(self._kept) <= received <= self.last

    def drop(self, received: int) -> None:
        """The other side has received all messages up to this number."""
        while self._kept and self.last - len(self._kept) < received:
            self._kept.popleft()


class MemberEnd:
    """A member's end of its link to the scheduler."""

    def __init__(
        self, register: pb.Register, new_token: Callable[[], bytes] = lambda: secrets.token_bytes(TOKEN_BYTES)
    ) -> None:
        self._register = pb.Register()
        self._register.CopyFrom(register)
        self._register.token = new_token()
        self._outbox: Outbox[pb.MemberMessage] = Outbox()
        self._received = 0
        self._membership = pb.Membership()  # the last one that has arrived

    @property
    def is_member(self) -> bool:
        """True once the scheduler has accepted its registration."""
        return self._register.member_id > 0

    @property
    def epoch(self) -> int:
        """The epoch of the last Membership that has arrived; 0: none has."""
        return self._register.epoch

    @property
    def unconfirmed(self) -> int:
        """The number of messages that the scheduler may not have received."""
        return len(self._outbox)

    def register(self) -> pb.MemberMessage:
        """The first message of every connection."""
        self._register.received = self._received
        return pb.MemberMessage(register=self._register)

    def stamp(self, message: pb.MemberMessage) -> pb.MemberMessage:
        """Number a message and keep it. Returns it as it is to be sent on a connection with a Welcome, if there is
        one."""
        stamped = pb.MemberMessage(received=self._received)
        stamped.MergeFrom(message)
        if message.WhichOneof("body") not in UNNUMBERED:
            stamped.number = self._outbox.put(stamped)
        return stamped

    def welcomed(self, message: pb.SchedulerMessage) -> list[pb.MemberMessage]:
        """Welcome has arrived on a new connection. Returns the messages to send there before any other.

        Raises ProtocolError if the scheduler has forgotten messages that it had confirmed.
        """
        if not self._outbox.has(message.received):
            raise ProtocolError(
                f"the scheduler has {message.received} messages of this process, but had confirmed more: it was "
                "restarted with an old copy of its journal"
            )
        self._register.member_id = message.welcome.member_id
        self._outbox.drop(message.received)
        return [kept for _, kept in self._outbox]

    def doubts(self, message: pb.SchedulerMessage) -> bool:
        """True if this refusal does not come from the scheduler that this member knows, which may come back: it has not
        the job's journal, or an older copy of it."""
        refused = message.refused
        return self.is_member and (refused.unknown or not (refused.replaced or self._outbox.has(message.received)))

    def read(self, message: pb.SchedulerMessage) -> pb.SchedulerMessage:
        """A message as it came, for ``accept``: unpacked, and with a whole Membership. Raises ProtocolError for what no
        correct scheduler sends."""
        unpacked = unpack(message)
        if not unpacked.HasField("change") or 0 < unpacked.number <= self._received:
            return unpacked
        membership = changed(self._membership, unpacked.change)
        return pb.SchedulerMessage(number=unpacked.number, received=unpacked.received, membership=membership)

    def accept(self, message: pb.SchedulerMessage) -> bool:
        """True if this message is new and has a body.

        Raises ProtocolError if a message before it is missing, or if epochs go backwards.
        """
        self._outbox.drop(message.received)
        if message.number:
            if message.number <= self._received:
                return False
            if message.number != self._received + 1:
                raise ProtocolError(f"message {message.number} of the scheduler arrived after message {self._received}")
            self._received = message.number
        if message.HasField("membership"):
            epoch = message.membership.epoch
            if epoch <= self._register.epoch:
                raise ProtocolError(f"the scheduler opened epoch {epoch} after epoch {self._register.epoch}")
            self._register.epoch, self._membership = epoch, message.membership
        return message.WhichOneof("body") is not None


#: Smaller messages are sent as they are.
LEAST_BYTES = 16 << 10
#: No message is larger once it is unpacked: a table of a million members is smaller.
MOST_BYTES = 256 << 20
#: Messages of which the bytes are kept: those that go to many members do so one after the other.
_KEPT = 8


class LargeMessages:
    """Packs large messages of the scheduler, each once. ``least_bytes``: smaller ones are sent as they are.

    >>> messages, small = LargeMessages(), pb.SchedulerMessage(release=pb.Release(sequence=1))
    >>> messages.pack(small)
    b''
    """

    def __init__(self, least_bytes: int = LEAST_BYTES) -> None:
        self._least_bytes = least_bytes
        # By identity, and the epoch since which a table changed; the message is kept so that no other one can have its
        # identity.
        self._packed: OrderedDict[tuple[int, int], tuple[pb.SchedulerMessage, bytes]] = OrderedDict()
        self._memberships: OrderedDict[int, pb.Membership] = OrderedDict()  # the latest, by epoch

    def keep(self, message: pb.SchedulerMessage) -> None:
        """Members have this message, or will: a later Membership may be sent as a change of its."""
        if message.HasField("membership") and message.membership.epoch not in self._memberships:
            self._memberships[message.membership.epoch] = message.membership
            if len(self._memberships) > _KEPT:
                self._memberships.popitem(last=False)

    def pack(self, message: pb.SchedulerMessage, since: int = 0) -> bytes:
        """The bytes that ``unpack`` makes ``message`` of, or the change since the Membership of the epoch ``since``;
        empty if it is small. It must not change afterwards."""
        before = self._memberships.get(since) if message.HasField("membership") else None
        since = 0 if before is None else since
        known = self._packed.get((id(message), since))
        if known is None:
            known = self._packed[id(message), since] = message, self._bytes(message, before)
            if len(self._packed) > _KEPT:
                self._packed.popitem(last=False)
        return known[1]

    def _bytes(self, message: pb.SchedulerMessage, before: pb.Membership | None) -> bytes:
        if message.ByteSize() < self._least_bytes:
            return b""
        if before is not None:
            message = pb.SchedulerMessage(change=change_between(before, message.membership))
        return zlib.compress(message.SerializeToString(), 1)


def unpack(message: pb.SchedulerMessage, most_bytes: int = MOST_BYTES) -> pb.SchedulerMessage:
    """The message that was packed in ``message``, with its number and confirmation; ``message`` if none was. See also
    ``MemberEnd.read``.

    Raises ProtocolError for bytes that no correct scheduler sends.
    """
    if not message.packed:
        return message
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(message.packed, most_bytes)
        unpacked = pb.SchedulerMessage.FromString(data) if decompressor.eof else pb.SchedulerMessage()
    except (zlib.error, DecodeError) as error:
        raise ProtocolError(f"a packed message of the scheduler is damaged: {error}") from None
    if unpacked.WhichOneof("body") is None or unpacked.packed:
        raise ProtocolError(f"a packed message of the scheduler, of {len(message.packed)} bytes, has no body")
    unpacked.number, unpacked.received = message.number, message.received
    return unpacked
