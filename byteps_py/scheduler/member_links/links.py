"""The scheduler's ends of all members' links: a link outlives its connections, and restarts of the scheduler.

A link is one member's life; a stream is one connection of it. The core calls a link a connection. Pure: events of
streams and the time go in, what to send on which stream comes out. Knows no sockets, files or clocks. One thread at a
time may call.

    stream opens, Register ──► link, on that stream ──stream ends──► away ──Register, same token──► on a new stream
                                  │                                    └──grace over──► lost: the core hears of it
                                  └──Leave, or lost, and the stream ends──► ended

The core is a replicated state machine. An event that changes its state is first applied, then logged (``write``). The
caller sends the messages that follow from it only once the log is safe. ``replay`` of the records alone leads to the
same state and to the same messages with the same numbers, so a restarted scheduler sends its members exactly what the
one before it had not sent. Events that are not logged (heartbeats) must not change what is sent, except messages
without a number.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from byteps_py.errors import JournalError
from byteps_py.proto import control_pb2 as pb
from byteps_py.proto.journal_pb2 import JournalRecord, LinkRates
from byteps_py.scheduler.core import (
    ClockTicked,
    ConnectionClosed,
    ConnectionOpened,
    EpochSeen,
    Event,
    HeartbeatReceived,
    LinksChanged,
    MemberLost,
    MemberReturned,
    MessageReceived,
    NewcomersAdmitted,
    RanksContradict,
    RegistrationRefused,
    ScaleRequested,
    SchedulerAwake,
    SchedulerCore,
    StopRequested,
)
from byteps_py.scheduler.job import ENDED, FAILED, FORMING, Finish, Outgoing
from byteps_py.scheduler.member_links.protocol import LEAST_BYTES, UNNUMBERED, LargeMessages, Outbox
from byteps_py.scheduler.roster import ClusterConfig, MemberRecord, describe

#: In heartbeat timeouts: how long members have to come back, and how long strangers wait for them.
LIMIT = 5
STRANGERS_WAIT = 2

#: The home of a worker: its machine's id, and its index.
Home = tuple[str, int]

#: The answers of the scheduler to messages without a number: they may be lost with a connection, as those may. What
#: follows from heartbeats, which are not logged, must be one of these: a replay would not lead to it.
_FLEETING = ("stalled", "stack_report", "slow", "ask", "probe", "relays")

#: The event that a record is of, by the kind of its body.
_EVENTS: Mapping[str, Callable[[JournalRecord], Event]] = {
    "message": lambda record: MessageReceived(record.link, record.message),
    "lost": lambda record: MemberLost(record.link, record.lost),
    "ended": lambda record: ConnectionClosed(record.link),
    "tick": lambda record: ClockTicked(),
    "admitting": lambda record: NewcomersAdmitted(),
    "stop": lambda record: StopRequested(record.stop),
    "links_changed": lambda record: LinksChanged(dict(record.links_changed.mbit), record.links_changed.why),
    "contradiction": lambda record: RanksContradict(record.contradiction),
    "scale": lambda record: ScaleRequested(record.scale.servers, record.scale.addresses),
    "beyond_epoch": lambda record: EpochSeen(record.beyond_epoch),
}


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A stream has begun; its first message must be Register."""

    stream: int


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """A message of any kind has arrived on a stream."""

    stream: int
    message: pb.MemberMessage


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The stream has ended, or was cut off, for any reason."""

    stream: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """All records have been replayed: from now on the members of the job may come back."""


#: ClockTicked: a few times per second; all deadlines are checked.
LinkEvent = (
    StreamOpened
    | StreamMessage
    | StreamClosed
    | Restarted
    | ClockTicked
    | LinksChanged
    | StopRequested
    | ScaleRequested
    | EpochSeen
)


@dataclass(frozen=True, slots=True)
class Sent:
    """Send ``message`` on ``stream``; None: end the stream. ``packed``: a large one, see protocol.py."""

    stream: int
    message: pb.SchedulerMessage | None
    number: int = 0
    received: int = 0
    packed: bytes = b""

    def stamped(self) -> pb.SchedulerMessage:
        """The message with its number and its confirmation, as it is sent."""
        stamped = pb.SchedulerMessage(number=self.number, received=self.received, packed=self.packed)
        if self.message is not None and not self.packed:
            stamped.MergeFrom(self.message)
        return stamped


@dataclass(frozen=True, slots=True)
class Away:
    """A member without a connection. ``until_s``: when it is lost; ``why``: the reason of that."""

    since_s: float
    until_s: float
    why: str


@dataclass(slots=True, eq=False)
class MemberLink:
    """One member's link. ``stream``: its connection, None if it has none."""

    id: int
    stream: int | None
    digest: bytes = b""  # of its token; empty until it has registered
    member_id: int = 0
    who: str = ""
    outbox: Outbox[pb.SchedulerMessage] = field(default_factory=Outbox)
    received: int = 0  # the number of its last message that has arrived
    confirmed: int = 0  # the number up to which the scheduler has confirmed its messages
    epoch: int = 0  # of the last Membership that it has got, or was sent on its stream
    away: Away | None = None
    over: str = ""  # the reason why it can't be resumed; empty: it is not over
    is_ended: bool = False  # the core knows that no connection is left


def check(out: Outgoing) -> int:
    """A checksum of the core's messages."""
    value = 0
    known: dict[int, int] = {}  # by identity: the same message goes to many
    for connection, message in out:
        one = known.get(id(message))
        if one is None:
            one = known[id(message)] = zlib.crc32(message.SerializeToString(deterministic=True))
        value = zlib.crc32(one.to_bytes(4, "little"), zlib.crc32(connection.to_bytes(8, "little"), value))
    return value


class WaitState(enum.Enum):
    """See the diagram of RestartWait."""

    NOT_WAITING = "not waiting"
    WAITING = "no worker is back yet"
    ABANDONED = "no worker came back"


class RestartWait:
    """After a restart of the scheduler: do the members of the journal's job come back, or does a new job begin?

    A new job may have the name and the address of one whose processes were killed, all of them or all but the servers
    of CPU machines. Then no worker comes back, and processes that register are strangers. The scheduler puts strangers
    off until it knows which of the two it is. It waits for workers: a job without any can't go on. (A job that had no
    worker yet waits for any member.)

        NOT_WAITING ──restart──► WAITING ──a worker is back──► NOT_WAITING  the job goes on; members that are still
                                    │                                       away have until the limit
                                    ├──each worker has an heir on its machine──► ABANDONED  a new job begins
                                    ├──2 timeouts over, a stranger has asked──► ABANDONED   (beside servers that are
                                    │                                                       back: an heir)
                                    ├──limit over, nobody is back──► ABANDONED
                                    └──limit over, the job was over, or only servers are back──► NOT_WAITING  it ends
        WAITING, NOT_WAITING ──the job was over, a stranger asks──► ABANDONED

    An heir is a worker with the machine index of one that is away. On the same machine it proves that this one is dead:
    the two can't have the machine's socket for ranks at the same time.

    Times are in seconds of the scheduler's clock.
    """

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._limit_s = LIMIT * heartbeat_timeout_s
        self._strangers_wait_s = STRANGERS_WAIT * heartbeat_timeout_s
        self._began_s: float | None = None
        self._workers: set[Home] = set()  # those of the job
        self._survived_by: set[Home] = set()  # workers of the job that have an heir on their machine
        self._has_stranger = False  # a process that is no member has asked to become one
        self._has_heir = self._was_over = False
        self._is_anyone_back = False
        self._is_waited = False  # as take_end has seen it last
        self.state = WaitState.NOT_WAITING

    def begin(self, now_s: float, has_members: bool, state: pb.StatusReply.State, workers: Iterable[Home]) -> float:
        """The scheduler has restarted at ``now_s``, with a job in this state. Returns how long members have to come
        back."""
        self._began_s, self._workers = now_s, set(workers)
        self._was_over = state in (FAILED, ENDED)
        if has_members or state != FORMING:
            self.state = WaitState.WAITING
        self._is_waited = self.state is WaitState.WAITING
        if not has_members:
            self._limit_s = self._strangers_wait_s
        return self._limit_s

    def take_end(self) -> bool:
        """True once, after the wait: the job goes on, and processes that are no members are admitted again."""
        is_over = self._is_waited and self.state is WaitState.NOT_WAITING
        self._is_waited = self.state is WaitState.WAITING
        return is_over

    def on_member_back(self, is_worker: bool) -> None:
        """A member of the journal has resumed its link."""
        self._is_anyone_back = True
        if self.state is WaitState.WAITING and (is_worker or not self._workers):
            self.state = WaitState.NOT_WAITING

    def on_stranger(self, worker: Home | None) -> None:
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
            # All members of a job that was over may have left, as they should.
            ends = self._is_anyone_back or (job_is_over and not self._has_stranger)
            self.state = WaitState.NOT_WAITING if ends else WaitState.ABANDONED


class MemberLinks:
    """All links of one scheduler, and the core behind them. ``handle`` takes events; ``replay``, ``state`` and
    ``adopt`` serve the journal.

    ``core_class``: the class of the core; tests name another one in a subclass.
    """

    core_class: type[SchedulerCore] = SchedulerCore
    #: Smaller messages are sent as they are.
    least_packed_bytes = LEAST_BYTES
    #: A member that leaves more messages than this unconfirmed is lost.
    most_unconfirmed = 10_000

    def __init__(self, config: ClusterConfig, write: Callable[[JournalRecord], None] | None = None) -> None:
        self.core = self.core_class(config)
        self.write = write
        self.restarts = 0
        self._large = LargeMessages(self.least_packed_bytes)
        self._grace_s = min(1.0, config.heartbeat_timeout_s / 2)
        self._links: dict[int, MemberLink] = {}  # by id; also links that are over
        self._on_stream: dict[int, MemberLink] = {}
        self._by_digest: dict[bytes, MemberLink] = {}
        self._restart_wait = RestartWait(config.heartbeat_timeout_s)
        self._predecessors: dict[bytes, str] = {}  # members of the job before this one, by digest: their descriptions
        self._next_id = 1
        self._handlers: Mapping[type, Callable[[Any, float], list[Sent]]] = {
            StreamOpened: self._opened,
            StreamMessage: self._received,
            StreamClosed: self._closed,
            Restarted: self._restarted,
            ClockTicked: self._clock_ticked,
            StopRequested: lambda event, now_s: self._do(JournalRecord(at_s=now_s, stop=event.reason)),
            ScaleRequested: self._scale_requested,
            LinksChanged: self._links_changed,
            EpochSeen: lambda event, now_s: self._do(JournalRecord(at_s=now_s, beyond_epoch=event.last)),
        }

    def handle(self, event: LinkEvent, now_s: float) -> list[Sent]:
        """Take an event. Raises only UsageError, for a ScaleRequested, of which nothing is logged then."""
        return self._handlers[type(event)](event, now_s)

    def take_place_of(self, other: MemberLinks) -> None:
        """This job begins where the job of ``other`` was given up: members of that one may still come."""
        self._predecessors = {link.digest: link.who for link in other._links.values() if link.digest and not link.over}

    # ---- the journal -------------------------------------------------------------------------------------------

    def replay(self, record: JournalRecord) -> None:
        """Apply a logged event again. Raises JournalError if the messages that follow are not those of the first
        time."""
        out = self._run(record)
        self._number(out)
        if check(out) != record.check:
            raise JournalError(
                "replaying the scheduler's journal gives other messages than when it was written (at "
                f"{record.at_s:.1f} s, {record.WhichOneof('body')}): did another version of byteps_py write it?"
            )

    def state(self, now_s: float) -> dict[str, Any]:
        """The state without the connections. It replaces all records so far."""
        return {
            "core": self.core,
            "members": [dataclasses.replace(m, stream=None, away=None) for m in self._links.values() if m.digest],
            "strangers": [link.id for link in self._links.values() if not link.digest],
            "next": self._next_id,
            "restarts": self.restarts,
            "at_s": now_s,
        }

    def adopt(self, state: Mapping[str, Any]) -> float:
        """Go on from a ``state``; call it before all else. Returns when it was made, in seconds of the scheduler's
        clock."""
        self.core, self.restarts, self._next_id = state["core"], state["restarts"], state["next"]
        for link in state["members"]:
            self._links[link.id] = self._by_digest[link.digest] = link
        for stranger in state["strangers"]:
            self.core.handle(ConnectionClosed(stranger), state["at_s"])
        return float(state["at_s"])

    # ---- questions -------------------------------------------------------------------------------------------

    def present(self) -> dict[int, MemberRecord]:
        """The members that are connected, by stream."""
        on_stream = {link.id: stream for stream, link in self._on_stream.items()}
        members = self.core.job.roster.present()
        return {on_stream[each.connection]: each for each in members if each.connection in on_stream}

    @property
    def is_abandoned(self) -> bool:
        """True if this is the job of a journal and none of its workers came back: begin a new job."""
        return self._restart_wait.state is WaitState.ABANDONED

    def finished(self, now_s: float) -> Finish | None:
        """See ``SchedulerCore.finished``."""
        return self.core.finished(now_s) if self._restart_wait.state is WaitState.NOT_WAITING else None

    def status(self, now_s: float) -> pb.StatusReply:
        """The core's status, with members that are away."""
        reply = self.core.status(now_s)
        reply.restarts = self.restarts
        away = {link.member_id: now_s - link.away.since_s for link in self._links.values() if link.away is not None}
        for member in reply.members:
            if (since_s := away.get(member.member.member_id)) is not None:
                member.doubt = f"disconnected for {since_s:.1f} s"
        return reply

    # ---- one kind of event each --------------------------------------------------------------------------------

    def _opened(self, event: StreamOpened, now_s: float) -> list[Sent]:
        link = MemberLink(self._next_id, event.stream)
        self._next_id += 1
        self._links[link.id] = self._on_stream[event.stream] = link
        self.core.handle(ConnectionOpened(link.id), now_s)
        return []

    def _received(self, event: StreamMessage, now_s: float) -> list[Sent]:
        message, link = event.message, self._on_stream.get(event.stream)
        if link is None:
            return []  # the member has resumed on another stream
        if not link.digest:
            if message.HasField("register"):
                return self._register(link, message.register, now_s)
            return self._pass(link, self.core.handle(MessageReceived(link.id, message), now_s))
        link.outbox.drop(message.received)
        if not self._is_member(link):
            return []
        self.core.handle(HeartbeatReceived(link.id), now_s)
        if message.HasField("register"):  # a repetition; no token may be logged
            message = pb.MemberMessage(register=pb.Register())
        if message.number and message.number <= link.received:
            return self._confirm(link)
        if message.number > link.received + 1:
            why = f"its message {message.number} arrived after message {link.received}"
            return self._do(JournalRecord(at_s=now_s, link=link.id, lost=why))
        is_unnumbered = message.WhichOneof("body") in UNNUMBERED
        out = self._do(JournalRecord(at_s=now_s, link=link.id, message=message), is_unnumbered)
        return [*out, *(self._confirm(link) if message.HasField("heartbeat") else ())]

    def _closed(self, event: StreamClosed, now_s: float) -> list[Sent]:
        link = self._on_stream.pop(event.stream, None)
        if link is None:
            return []
        link.stream = None
        if not link.digest:
            del self._links[link.id]
            return self._pass(link, self.core.handle(ConnectionClosed(link.id), now_s))
        if not self._is_member(link):
            return self._do(JournalRecord(at_s=now_s, link=link.id, ended=True))
        # A member whose heartbeats are late also needs longer for a new connection.
        grace_s = self._grace_s * self.core.lateness(link.id)
        link.away = Away(now_s, now_s + grace_s, "its connection ended; see its log for why")
        return []

    def _clock_ticked(self, event: ClockTicked, now_s: float) -> list[Sent]:
        out: list[Sent] = []
        may_lose = self._restart_wait.state is WaitState.NOT_WAITING
        self._restart_wait.tick(now_s, self.core.state in (FAILED, ENDED))
        for link in list(self._links.values()):
            if link.away is not None and now_s >= link.away.until_s and may_lose:
                out += self._lose(link, link.away.why, now_s)
            elif len(link.outbox) > self.most_unconfirmed and link.stream is not None:
                out += self._lose(link, f"it has confirmed none of {len(link.outbox)} messages", now_s)
        if self._restart_wait.take_end():
            out += self._do(JournalRecord(at_s=now_s, admitting=True))
        self.core.handle(SchedulerAwake(), now_s)
        for each in self.core.suspicions(now_s):
            if isinstance(each, RanksContradict):
                out += self._do(JournalRecord(at_s=now_s, contradiction=each.why))
            elif isinstance(each, LinksChanged):
                out += self._links_changed(each, now_s)
            elif self._links[each.connection].stream is not None:  # a member that is away has its own deadline
                out += self._do(JournalRecord(at_s=now_s, link=each.connection, lost=each.why))
        if self._restart_wait.state is WaitState.WAITING:
            return out  # processes that deadlines wait for are put off
        return out + self._do(JournalRecord(at_s=now_s, tick=True), True)

    def _links_changed(self, event: LinksChanged, now_s: float) -> list[Sent]:
        rates = LinkRates(mbit=event.mbit, why=event.why)
        return self._do(JournalRecord(at_s=now_s, links_changed=rates))

    def _scale_requested(self, event: ScaleRequested, now_s: float) -> list[Sent]:
        request = pb.ScaleRequest(servers=event.servers, addresses=event.addresses)
        return self._do(JournalRecord(at_s=now_s, scale=request))

    def _restarted(self, event: Restarted, now_s: float) -> list[Sent]:
        self._do(JournalRecord(at_s=now_s, restart=True))
        for link in self._links.values():
            if not self._is_member(link) and not link.is_ended:
                # It has left, and its connection ended with the previous scheduler.
                self._do(JournalRecord(at_s=now_s, link=link.id, ended=True))
        missing = [link for link in self._links.values() if self._is_member(link)]
        homes = [home for link in missing if (home := self._home_of_worker(link)) is not None]
        return_s = self._restart_wait.begin(now_s, bool(missing), self.core.state, homes)
        for link in missing:
            why = f"it did not come back within {return_s:g} s after the scheduler was started again"
            link.away = Away(now_s, now_s + return_s, why)
        return []  # no stream is open

    def _is_member(self, link: MemberLink) -> bool:
        """True from its registration until it has left or is lost."""
        return self.core.job.roster.present_member(link.id) is not None

    def _home_of_worker(self, link: MemberLink) -> Home | None:
        """The home of a present worker; None for a member that is no worker."""
        member = self.core.job.roster.present_member(link.id)
        return member.home if member is not None and member.is_worker else None

    # ---- registering and resuming ---------------------------------------------------------------------------

    def _register(self, link: MemberLink, register: pb.Register, now_s: float) -> list[Sent]:
        digest = hashlib.sha256(register.token).digest() if register.token else b""
        known = self._by_digest.get(digest)
        if known is not None:
            return self._resume(known, link, register, now_s)
        if (who := self._predecessors.get(digest)) is not None:
            text = f"the job of {who} is over: its workers were started again, and a new job has begun at this address"
            return self._refuse(link, now_s, "PeerLostError", text, replaced=True)
        if register.member_id:
            self.handle(EpochSeen(register.epoch), now_s)
            return self._refuse(
                link,
                now_s,
                "RendezvousError",
                f"this scheduler does not know {describe(register)}, which was member {register.member_id} of its job: "
                "it was started without the job's journal (BYTEPS_JOURNAL_DIR), or for another job",
                unknown=True,
            )
        is_worker = register.role == pb.ROLE_COMMUNICATION
        home = (register.machine_id, register.machine_index) if is_worker else None
        self._restart_wait.on_stranger(home)
        if self._restart_wait.state is not WaitState.NOT_WAITING:
            return self._refuse(link, now_s, "RendezvousError", self._waiting_for(), later=True)
        stated = pb.Register()
        stated.CopyFrom(register)
        stated.token = digest or hashlib.sha256(f"none {link.id}".encode()).digest()
        record = JournalRecord(at_s=now_s, link=link.id, register=stated)
        out = self._run(record)
        if not link.digest:
            if any(other.away is not None for other in self._links.values()):  # one of their places may become free
                return self._refuse(link, now_s, "RendezvousError", self._waiting_for(), later=True)
            return self._pass(link, out)
        return self._keep(record, out)

    def _resume(self, known: MemberLink, newcomer: MemberLink, register: pb.Register, now_s: float) -> list[Sent]:
        stream = newcomer.stream
        is_older = register.received > known.outbox.last  # this journal, than the member knows
        if not is_older and (stream is None or not self._is_member(known)):
            newcomer.received = known.received  # the member sees whether this is the journal that it knows
            why = known.over or self.core.reason
            return self._refuse(newcomer, now_s, "PeerLostError", f"{known.who} can't come back: {why}")
        if stream is None or not known.outbox.has(register.received):
            return self._refuse(
                newcomer,
                now_s,
                "RendezvousError",
                f"{known.who} has received {register.received} messages, but the scheduler knows only of "
                f"{known.outbox.last}: it was started with an old copy of its journal (BYTEPS_JOURNAL_DIR)",
                unknown=True,
            )
        del self._links[newcomer.id]
        self.core.handle(ConnectionClosed(newcomer.id), now_s)
        out: list[Sent] = []
        if known.stream is not None:
            del self._on_stream[known.stream]
            out.append(Sent(known.stream, None))
        known.stream, self._on_stream[stream] = stream, known
        known.away = None
        self._restart_wait.on_member_back(self._home_of_worker(known) is not None)
        self.core.handle(MemberReturned(known.id), now_s)
        known.outbox.drop(register.received)
        known.confirmed, known.epoch = known.received, register.epoch
        welcome = pb.SchedulerMessage(welcome=pb.Welcome(member_id=known.member_id))
        out.append(Sent(stream, welcome, 0, known.received))
        return out + [self._sent(known, stream, message, number) for number, message in known.outbox]

    def _refuse(self, link: MemberLink, now_s: float, error: str, text: str, **more: bool) -> list[Sent]:
        self.core.handle(RegistrationRefused(link.id), now_s)
        refusal = pb.SchedulerMessage(refused=pb.Refused(error=error, message=text, **more))
        return self._pass(link, [(link.id, refusal)])

    def _waiting_for(self) -> str:
        who = [link.who for link in self._links.values() if link.away is not None]
        some = ", ".join(who[:4]) + (", …" if len(who) > 4 else "")
        return f"the scheduler waits for members of its job to come back: {some or 'any'}"

    def _lose(self, link: MemberLink, why: str, now_s: float) -> list[Sent]:
        link.away = None
        out = self._do(JournalRecord(at_s=now_s, link=link.id, lost=why))
        if link.stream is None:
            out += self._do(JournalRecord(at_s=now_s, link=link.id, ended=True))
        return out

    # ---- what is logged and what is sent -------------------------------------------------------------------------

    def _do(self, record: JournalRecord, may_be_nothing: bool = False) -> list[Sent]:
        """Apply an event and log it. ``may_be_nothing``: do not log it if it changed nothing that must be kept."""
        before = (self.core.state, self.core.reason)
        out = self._run(record)
        is_nothing = may_be_nothing and before == (self.core.state, self.core.reason)
        if is_nothing and all(message.WhichOneof("body") in _FLEETING for _, message in self._to_members(out)):
            return [sent for each, message in out for sent in self._pass(self._links[each], [(each, message)])]
        return self._keep(record, out)

    def _keep(self, record: JournalRecord, out: Outgoing) -> list[Sent]:
        if self.write is not None:
            record.check = check(self._to_members(out))
            self.write(record)
        return self._number(out)

    def _to_members(self, out: Outgoing) -> Outgoing:
        """Without messages to strangers, which are not logged."""
        return [(connection, message) for connection, message in out if self._links[connection].digest]

    def _run(self, record: JournalRecord) -> Outgoing:
        kind = record.WhichOneof("body") or ""
        match kind:
            case "register":
                return self._enter(record)
            case "restart":
                self.restarts += 1
                return []
            case "message":
                link = self._links[record.link]
                link.received = max(link.received, record.message.number)
            case "lost":
                self._links[record.link].over = record.lost
            case "ended":
                link = self._links[record.link]
                link.over, link.is_ended = link.over or "it has left", True
                link.outbox.drop(link.outbox.last)
        return self.core.handle(_EVENTS[kind](record), record.at_s)

    def _enter(self, record: JournalRecord) -> Outgoing:
        link = self._links.get(record.link)
        if link is None:  # replaying
            link = self._links[record.link] = MemberLink(record.link, None)
            self._next_id = max(self._next_id, record.link + 1)
            self.core.handle(ConnectionOpened(link.id), record.at_s)
        message = pb.MemberMessage(register=record.register)
        out = self.core.handle(MessageReceived(link.id, message), record.at_s)
        if self._is_member(link):
            link.digest = record.register.token
            link.who = describe(record.register)
            link.member_id = next(m.welcome.member_id for _, m in out if m.HasField("welcome"))
            self._by_digest[link.digest] = link
        return out

    def _number(self, out: Outgoing) -> list[Sent]:
        sent: list[Sent] = []
        for connection, message in out:
            link = self._links[connection]
            if not link.digest or message.WhichOneof("body") in ("welcome", "refused"):
                sent += self._pass(link, [(connection, message)])
                continue
            number = link.outbox.put(message)
            self._large.keep(message)
            if link.stream is not None:
                link.confirmed = link.received
                sent.append(self._sent(link, link.stream, message, number))
        return sent

    def _sent(self, link: MemberLink, stream: int, message: pb.SchedulerMessage, number: int) -> Sent:
        packed = self._large.pack(message, link.epoch)
        if message.HasField("membership"):
            link.epoch = message.membership.epoch
        return Sent(stream, message, number, link.received, packed)

    def _pass(self, link: MemberLink, out: Outgoing) -> list[Sent]:
        """Send messages without a number: no one has to know whether they arrived."""
        sent: list[Sent] = []
        if link.stream is None:
            return sent
        for _, message in out:
            sent.append(Sent(link.stream, message, 0, link.received))
            if message.HasField("refused"):
                sent.append(Sent(link.stream, None))
        return sent

    def _confirm(self, link: MemberLink) -> list[Sent]:
        """Confirm the messages of a member that have arrived, if the member does not know yet."""
        if link.confirmed == link.received or link.stream is None:
            return []
        link.confirmed = link.received
        return [Sent(link.stream, pb.SchedulerMessage(), 0, link.received)]
