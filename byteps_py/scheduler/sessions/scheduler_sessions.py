"""Sessions of members with the scheduler: they outlive connections, and restarts of the scheduler.

A session is one member's life; a stream is one connection of it. What the core calls a connection is a session. Pure:
events of streams and the time go in, what to send on which stream comes out. Knows no sockets, files or clocks. One
thread at a time may call.

    stream opens, Register ──► session, on that stream ──stream ends──► away ──Register, same token──► on a new stream
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
import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from byteps_py.errors import JournalError
from byteps_py.proto import control_pb2 as pb
from byteps_py.proto.journal_pb2 import JournalRecord
from byteps_py.scheduler import job as states
from byteps_py.scheduler.cluster_config import ClusterConfig
from byteps_py.scheduler.core import SchedulerCore
from byteps_py.scheduler.job import Finish, Outgoing
from byteps_py.scheduler.roster import describe
from byteps_py.scheduler.sessions.restart_wait import RestartWait, WaitState
from byteps_py.scheduler.sessions.session_protocol import Outbox
from byteps_py.scheduler.sessions.snapshot import freeze, thaw

#: What members say without a number, and what the scheduler may say because of it. Both may be lost with a connection.
_UNNUMBERED = ("heartbeat", "sight")
_FLEETING = ("stalled", "sight", "slow")


@dataclass(frozen=True, slots=True)
class Sent:
    """Send ``message`` on ``stream``; None: end the stream."""

    stream: int
    message: pb.SchedulerMessage | None
    number: int = 0
    received: int = 0

    def stamped(self) -> pb.SchedulerMessage:
        """The message with its number and its confirmation, as it is sent."""
        stamped = pb.SchedulerMessage(number=self.number, received=self.received)
        if self.message is not None:
            stamped.MergeFrom(self.message)
        return stamped


@dataclass(frozen=True, slots=True)
class Away:
    """A member without a connection. ``until_s``: when it is lost; ``why``: the reason of that."""

    since_s: float
    until_s: float
    why: str


@dataclass(slots=True, eq=False)
class SessionRecord:
    """One member's session. ``stream``: its connection, None if it has none."""

    id: int
    stream: int | None
    digest: bytes = b""  # of its token; empty until it has registered
    member_id: int = 0
    who: str = ""
    outbox: Outbox[pb.SchedulerMessage] = field(default_factory=Outbox)
    received: int = 0  # the number of its last message that has arrived
    confirmed: int = 0  # the number up to which the scheduler has confirmed its messages
    away: Away | None = None
    over: str = ""  # why nobody can resume it; empty: it is not over


def check(out: Outgoing) -> int:
    """A checksum of what the core says."""
    value = 0
    texts: dict[int, bytes] = {}
    for connection, message in out:
        text = texts.get(id(message))
        if text is None:
            text = texts[id(message)] = message.SerializeToString(deterministic=True)
        value = zlib.crc32(text, zlib.crc32(connection.to_bytes(8, "little"), value))
    return value


class Sessions:
    """All sessions of one scheduler, and the core behind them.

    ``core_class``: the class of the core; tests name another one in a subclass.
    """

    core_class: type[SchedulerCore] = SchedulerCore
    #: A member that leaves more messages than this unconfirmed is lost.
    most_unconfirmed = 10_000

    def __init__(self, config: ClusterConfig, write: Callable[[JournalRecord], None] | None = None) -> None:
        self.core = self.core_class(config)
        self.write = write
        self.restarts = 0
        self._timeout_s = config.heartbeat_timeout_s
        self._grace_s = min(1.0, self._timeout_s / 2)
        self._sessions: dict[int, SessionRecord] = {}  # by id; also sessions that are over
        self._on_stream: dict[int, SessionRecord] = {}
        self._by_digest: dict[bytes, SessionRecord] = {}
        self._restart_wait = RestartWait(config.heartbeat_timeout_s)
        self._predecessors: dict[bytes, str] = {}  # members of the job before this one, by digest: who, in words
        self._next_id = 1

    # ---- events ----------------------------------------------------------------------------------------------

    def opened(self, stream: int, now_s: float) -> list[Sent]:
        """A stream has begun; its first message must be Register."""
        session = SessionRecord(self._next_id, stream)
        self._next_id += 1
        self._sessions[session.id] = self._on_stream[stream] = session
        self.core.on_connected(session.id, now_s)
        return []

    def received(self, stream: int, message: pb.MemberMessage, now_s: float) -> list[Sent]:
        """Never raises for what a member sends."""
        session = self._on_stream.get(stream)
        if session is None:
            return []  # the member has resumed on another stream
        if not session.digest:
            if message.HasField("register"):
                return self._register(session, message.register, now_s)
            return self._pass(session, self.core.handle(session.id, message, now_s))
        session.outbox.drop(message.received)
        if not self.core.is_member(session.id):
            return []
        self.core.heard(session.id, now_s)
        if message.HasField("register"):  # a repetition; no token may be logged
            message = pb.MemberMessage(register=pb.Register())
        if message.number and message.number <= session.received:
            return self._confirm(session)
        if message.number > session.received + 1:
            why = f"its message {message.number} arrived after message {session.received}"
            return self._do(JournalRecord(at_s=now_s, session=session.id, lost=why))
        is_unnumbered = message.WhichOneof("body") in _UNNUMBERED
        out = self._do(JournalRecord(at_s=now_s, session=session.id, message=message), is_unnumbered)
        return [*out, *(self._confirm(session) if message.HasField("heartbeat") else ())]

    def closed(self, stream: int, now_s: float) -> list[Sent]:
        """The stream has ended, or was cut off, for whatever reason."""
        session = self._on_stream.pop(stream, None)
        if session is None:
            return []
        session.stream = None
        if not session.digest:
            del self._sessions[session.id]
            return self._pass(session, self.core.on_disconnected(session.id, now_s))
        if not self.core.is_member(session.id):
            return self._do(JournalRecord(at_s=now_s, session=session.id, ended=True))
        # A member whose heartbeats are late also needs longer for a new connection.
        grace_s = self._grace_s * self.core.timeout_s(session.id) / self._timeout_s
        self._send_away(session, now_s, grace_s, "its connection ended; see its log for why")
        return []

    def tick(self, now_s: float) -> list[Sent]:
        """Call a few times per second; all deadlines are checked here."""
        out: list[Sent] = []
        sessions = list(self._sessions.values())
        may_lose = self._restart_wait.state is WaitState.NOT_WAITING
        self._restart_wait.tick(now_s, self._is_over)
        for session in sessions:
            if session.away is not None and now_s >= session.away.until_s and may_lose:
                out += self._lose(session, session.away.why, now_s)
            elif len(session.outbox) > self.most_unconfirmed and session.stream is not None:
                out += self._lose(session, f"it has confirmed none of {len(session.outbox)} messages", now_s)
        for connection, why in self.core.silent(now_s):
            if self._sessions[connection].stream is not None:  # a member that is away has its own deadline
                out += self._do(JournalRecord(at_s=now_s, session=connection, lost=why))
        if why := self.core.contradiction():
            out += self._do(JournalRecord(at_s=now_s, contradiction=why))
        return out + self._do(JournalRecord(at_s=now_s, tick=True), True)

    def stop(self, reason: str, now_s: float) -> list[Sent]:
        """End the job in order: every member gets Stop."""
        return self._do(JournalRecord(at_s=now_s, stop=reason))

    def scale(self, request: pb.ScaleRequest, now_s: float) -> list[Sent]:
        """Drain servers of CPU machines. Raises UsageError, as the core does; then nothing is logged."""
        return self._do(JournalRecord(at_s=now_s, scale=request))

    def restart(self, now_s: float) -> None:
        """All records have been replayed: from now on the members of the job may come back."""
        self._do(JournalRecord(at_s=now_s, restart=True))
        for session in self._sessions.values():
            if not self.core.is_member(session.id) and self.core.is_connected(session.id):
                # It has left, and its connection ended with the previous scheduler.
                self._do(JournalRecord(at_s=now_s, session=session.id, ended=True))
        missing = [s for s in self._sessions.values() if self.core.is_member(s.id)]
        homes = [home for s in missing if (home := self.core.worker_home(s.id)) is not None]
        return_s = self._restart_wait.begin(now_s, bool(missing), self.core.state, homes)
        for session in missing:
            why = f"it did not come back within {return_s:g} s after the scheduler was started again"
            self._send_away(session, now_s, return_s, why)

    def skip_epochs(self, last: int, now_s: float) -> None:
        """Processes of an earlier cluster have seen epoch ``last``: epochs of this one come after it."""
        self._do(JournalRecord(at_s=now_s, beyond_epoch=last))

    def take_place_of(self, other: Sessions) -> None:
        """This job begins where the job of ``other`` was given up: members of that one may still come."""
        self._predecessors = {s.digest: s.who for s in other._sessions.values() if s.digest and not s.over}

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

    def snapshot(self, now_s: float) -> bytes:
        """The state without the connections. It replaces all records so far. ``restore`` reads it."""
        members = [dataclasses.replace(s, stream=None, away=None) for s in self._sessions.values() if s.digest]
        strangers = [s.id for s in self._sessions.values() if not s.digest]
        return freeze({"core": self.core, "members": members, "strangers": strangers, "next": self._next_id,
                       "restarts": self.restarts, "at_s": now_s})  # fmt: skip

    def restore(self, snapshot: bytes) -> float:
        """Take over the state of a ``snapshot``; call it before all else. Returns when it was made, in seconds of the
        scheduler's clock. Raises JournalError."""
        state = thaw(snapshot)
        self.core, self.restarts, self._next_id = state["core"], state["restarts"], state["next"]
        for session in state["members"]:
            self._sessions[session.id] = self._by_digest[session.digest] = session
        for stranger in state["strangers"]:
            self.core.on_disconnected(stranger, state["at_s"])
        return float(state["at_s"])

    # ---- questions -------------------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self.core.state in (states.FAILED, states.ENDED)

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
        away = {s.member_id: now_s - s.away.since_s for s in self._sessions.values() if s.away is not None}
        for member in reply.members:
            if (since_s := away.get(member.member.member_id)) is not None:
                member.doubt = f"disconnected for {since_s:.1f} s"
        return reply

    # ---- registering and resuming ---------------------------------------------------------------------------

    def _register(self, session: SessionRecord, register: pb.Register, now_s: float) -> list[Sent]:
        digest = hashlib.sha256(register.token).digest() if register.token else b""
        known = self._by_digest.get(digest)
        if known is not None:
            return self._resume(known, session, register, now_s)
        if (who := self._predecessors.get(digest)) is not None:
            text = f"the job of {who} is over: its workers were started again, and a new job has begun at this address"
            return self._refuse(session, "PeerLostError", text, replaced=True)
        if register.member_id:
            self.skip_epochs(register.epoch, now_s)
            return self._refuse(
                session,
                "RendezvousError",
                f"this scheduler does not know {describe(register)}, which was member {register.member_id} of its job: "
                "it was started without the job's journal (BYTEPS_JOURNAL_DIR), or for another job",
                unknown=True,
            )
        is_worker = register.role == pb.ROLE_COMMUNICATION
        home = (register.machine_id, register.machine_index) if is_worker else None
        self._restart_wait.stranger_asks(home)
        if self._restart_wait.state is not WaitState.NOT_WAITING:
            return self._refuse(session, "RendezvousError", self._waiting_for(), later=True)
        stated = pb.Register()
        stated.CopyFrom(register)
        stated.token = digest or hashlib.sha256(f"none {session.id}".encode()).digest()
        record = JournalRecord(at_s=now_s, session=session.id, register=stated)
        out = self._run(record)
        if not session.digest:
            if any(other.away is not None for other in self._sessions.values()):  # one of their places may become free
                return self._refuse(session, "RendezvousError", self._waiting_for(), later=True)
            return self._pass(session, out)
        return self._keep(record, out)

    def _resume(self, known: SessionRecord, newcomer: SessionRecord, register: pb.Register, now_s: float) -> list[Sent]:
        stream = newcomer.stream
        is_older = register.received > known.outbox.last  # this journal, than what the member knows
        if not is_older and (stream is None or not self.core.is_member(known.id)):
            newcomer.received = known.received  # the member sees whether this is the journal that it knows
            why = known.over or self.core.reason
            return self._refuse(newcomer, "PeerLostError", f"{known.who} can't come back: {why}")
        if stream is None or not known.outbox.has(register.received):
            return self._refuse(
                newcomer,
                "RendezvousError",
                f"{known.who} has received {register.received} messages, but the scheduler knows only of "
                f"{known.outbox.last}: it was started with an old copy of its journal (BYTEPS_JOURNAL_DIR)",
                unknown=True,
            )
        del self._sessions[newcomer.id]
        self.core.on_disconnected(newcomer.id, now_s)
        out: list[Sent] = []
        if known.stream is not None:
            del self._on_stream[known.stream]
            out.append(Sent(known.stream, None))
        known.stream, self._on_stream[stream] = stream, known
        known.away = None
        self._restart_wait.member_is_back(self.core.worker_home(known.id) is not None)
        self.core.came_back(known.id, now_s)
        known.outbox.drop(register.received)
        known.confirmed = known.received
        welcome = pb.SchedulerMessage(welcome=pb.Welcome(member_id=known.member_id))
        out.append(Sent(stream, welcome, 0, known.received))
        return out + [Sent(stream, message, number, known.received) for number, message in known.outbox]

    def _refuse(self, session: SessionRecord, error: str, text: str, **more: bool) -> list[Sent]:
        self.core.turned_away(session.id)
        refusal = pb.SchedulerMessage(refused=pb.Refused(error=error, message=text, **more))
        return self._pass(session, [(session.id, refusal)])

    def _waiting_for(self) -> str:
        who = [s.who for s in self._sessions.values() if s.away is not None]
        some = ", ".join(who[:4]) + (", …" if len(who) > 4 else "")
        return f"the scheduler waits for members of its job to come back: {some or 'any'}"

    def _send_away(self, session: SessionRecord, now_s: float, grace_s: float, why: str) -> None:
        session.away = Away(now_s, now_s + grace_s, why)

    def _lose(self, session: SessionRecord, why: str, now_s: float) -> list[Sent]:
        session.away = None
        out = self._do(JournalRecord(at_s=now_s, session=session.id, lost=why))
        if session.stream is None:
            out += self._do(JournalRecord(at_s=now_s, session=session.id, ended=True))
        return out

    # ---- what is logged and what is sent -------------------------------------------------------------------------

    def _do(self, record: JournalRecord, may_be_nothing: bool = False) -> list[Sent]:
        """Apply an event and log it. ``may_be_nothing``: do not log it if it changed nothing that must be kept."""
        before = (self.core.state, self.core.reason)
        out = self._run(record)
        is_nothing = may_be_nothing and before == (self.core.state, self.core.reason)
        if is_nothing and all(message.WhichOneof("body") in _FLEETING for _, message in self._to_members(out)):
            return [sent for each, message in out for sent in self._pass(self._sessions[each], [(each, message)])]
        return self._keep(record, out)

    def _keep(self, record: JournalRecord, out: Outgoing) -> list[Sent]:
        if self.write is not None:
            record.check = check(self._to_members(out))
            self.write(record)
        return self._number(out)

    def _to_members(self, out: Outgoing) -> Outgoing:
        """Without messages to strangers, about whom nothing is logged."""
        return [(connection, message) for connection, message in out if self._sessions[connection].digest]

    def _run(self, record: JournalRecord) -> Outgoing:
        now_s, core = record.at_s, self.core
        match record.WhichOneof("body"):
            case "register":
                return self._enter(record)
            case "message":
                session = self._sessions[record.session]
                session.received = max(session.received, record.message.number)
                return core.handle(session.id, record.message, now_s)
            case "lost":
                self._sessions[record.session].over = record.lost
                return core.on_lost(record.session, record.lost, now_s)
            case "ended":
                session = self._sessions[record.session]
                session.over = session.over or "it has left"
                session.outbox.drop(session.outbox.last)
                return core.on_disconnected(record.session, now_s)
            case "tick":
                return core.on_deadlines(now_s)
            case "stop":
                return core.stop(record.stop, now_s)
            case "contradiction":
                return core.on_contradiction(record.contradiction, now_s)
            case "scale":
                return core.scale(record.scale.servers, record.scale.addresses, now_s)
            case "restart":
                self.restarts += 1
            case "beyond_epoch":
                core.skip_epochs(record.beyond_epoch)
        return []

    def _enter(self, record: JournalRecord) -> Outgoing:
        session = self._sessions.get(record.session)
        if session is None:  # replaying
            session = self._sessions[record.session] = SessionRecord(record.session, None)
            self._next_id = max(self._next_id, record.session + 1)
            self.core.on_connected(session.id, record.at_s)
        out = self.core.handle(session.id, pb.MemberMessage(register=record.register), record.at_s)
        if self.core.is_member(session.id):
            session.digest = record.register.token
            session.who = describe(record.register)
            session.member_id = next(m.welcome.member_id for _, m in out if m.HasField("welcome"))
            self._by_digest[session.digest] = session
        return out

    def _number(self, out: Outgoing) -> list[Sent]:
        sent: list[Sent] = []
        for connection, message in out:
            session = self._sessions[connection]
            if not session.digest or message.WhichOneof("body") in ("welcome", "refused"):
                sent += self._pass(session, [(connection, message)])
                continue
            number = session.outbox.put(message)
            if session.stream is not None:
                session.confirmed = session.received
                sent.append(Sent(session.stream, message, number, session.received))
        return sent

    def _pass(self, session: SessionRecord, out: Outgoing) -> list[Sent]:
        """Send messages without a number: nobody has to know whether they arrived."""
        sent: list[Sent] = []
        if session.stream is None:
            return sent
        for _, message in out:
            sent.append(Sent(session.stream, message, 0, session.received))
            if message.HasField("refused"):
                sent.append(Sent(session.stream, None))
        return sent

    def _confirm(self, session: SessionRecord) -> list[Sent]:
        """Confirm what has arrived of a member's messages, if the member does not know it yet."""
        if session.confirmed == session.received or session.stream is None:
            return []
        session.confirmed = session.received
        return [Sent(session.stream, pb.SchedulerMessage(), 0, session.received)]
