"""The scheduler as a state machine: events and the time go in, messages to connections come out.

Routes each event to the component that decides: the roster, the group of ranks, the summation services, the watch over
heartbeats. Knows no sockets, clocks or threads: time is an argument, in seconds of any steady clock. One thread at a
time may call. The states are those of job.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from byteps_py.errors import BY_NAME, ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.elastic import Break, Elastic, GiveUp, GroupState, Open
from byteps_py.scheduler.health import GroupWatch, LivenessMonitor
from byteps_py.scheduler.job import (
    ENDED,
    FORMING,
    RUNNING,
    Finish,
    Job,
    MessageHandler,
    Outgoing,
    failure,
    finish,
    refused,
    to_each,
)
from byteps_py.scheduler.membership import Forming, SummationServices
from byteps_py.scheduler.rank_group import RankGroup
from byteps_py.scheduler.roster import ClusterConfig, MemberRecord, Presence, Refusal
from byteps_py.security.unauthenticated_connections import PATIENCE_S
from byteps_py.wording import STOPPED, count_text

REGISTER_TIMEOUT_S = PATIENCE_S - 0.5  # a connection that has not registered by then is refused


# ---- events that a journal has ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConnectionOpened:
    """A connection has begun. It has to register within REGISTER_TIMEOUT_S seconds."""

    connection: int


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """The connection has ended. A member that has not left before is lost."""

    connection: int


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message has arrived. A member that breaks the protocol with it is refused, and the job fails."""

    connection: int
    message: pb.MemberMessage


@dataclass(frozen=True, slots=True)
class MemberLost:
    """The member of this connection counts as dead, even if the connection still stands."""

    connection: int
    why: str


@dataclass(frozen=True, slots=True)
class ClockTicked:
    """All deadlines but those of silent members are checked. The result does not depend on heartbeats, so that the
    journal can be replayed without them."""


@dataclass(frozen=True, slots=True)
class RanksContradict:
    """Ranks wait for each other in different operations, and would wait for ever."""

    why: str


@dataclass(frozen=True, slots=True)
class LinksChanged:
    """Links of machines have other rates, in Mbit/s by member id (see ``Roster.link_owners``): the shares of the
    servers follow."""

    mbit: Mapping[int, float]
    why: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The job is to end in order: every member gets Stop."""

    reason: str


@dataclass(frozen=True, slots=True)
class ScaleRequested:
    """Servers of CPU machines are to be drained, see ``SummationServices.scale``. Raises UsageError."""

    servers: int
    addresses: Sequence[str]


@dataclass(frozen=True, slots=True)
class EpochSeen:
    """Processes of an earlier cluster have seen epoch ``last``: epochs of this one come after it."""

    last: int


# ---- events that a journal lacks: they lead to no message ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewcomersAdmitted:
    """A restarted scheduler has waited for the members of its job, and put off all others meanwhile. Now it admits
    them again: those that the job waits for have all of their time from here."""


@dataclass(frozen=True, slots=True)
class SchedulerAwake:
    """The scheduler runs. A few times per second: a late one shows that it did not run, and received no message."""


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    """A message of the member has arrived. Each counts as a heartbeat."""

    connection: int


@dataclass(frozen=True, slots=True)
class MemberReturned:
    """The member has a new connection: heartbeats that got lost with the previous one do not count as late."""

    connection: int


@dataclass(frozen=True, slots=True)
class RegistrationRefused:
    """The caller has refused this connection, which has not registered."""

    connection: int


Event = (
    ConnectionOpened | ConnectionClosed | MessageReceived | MemberLost | ClockTicked | RanksContradict | LinksChanged
    | StopRequested | ScaleRequested | EpochSeen | NewcomersAdmitted | SchedulerAwake | HeartbeatReceived
    | MemberReturned | RegistrationRefused
)  # fmt: skip


class SchedulerCore:
    """One job. ``handle`` and ``tick`` are the only methods that change anything; the messages that they return are to
    be sent in order. ``job``: its state, for questions.

    ``job_class``, ``elastic_class``, ``liveness_class``: the classes of the components; tests name others in a
    subclass.
    """

    job_class: type[Job] = Job
    elastic_class: type[Elastic] = Elastic
    liveness_class: type[LivenessMonitor] = LivenessMonitor

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self.job = self.job_class(config)
        self._roster = self.job.roster
        self._elastic = self.elastic_class(config, self._roster) if config.elastic else None
        self._services = SummationServices(self.job, self._elastic)
        self._liveness = self.liveness_class(config)
        self._forming = Forming(self.job)
        self._strangers: dict[int, float] = {}  # connections that have not registered → when they began
        self._connections: set[int] = set()
        self._all_left = False  # all workers left in order: their successors may be starting the next job
        self._set_group(RankGroup(self.job, config.num_workers, 0))

    def _set_group(self, group: RankGroup) -> None:
        self._group = group
        self._watch = GroupWatch(self.job, group)
        self._set_handlers()

    def _set_handlers(self) -> None:
        self._handlers: Mapping[type, Callable[[Any, float], Outgoing]] = {
            ConnectionOpened: self._connection_opened,
            ConnectionClosed: self._connection_closed,
            MessageReceived: self._message_received,
            MemberLost: self._member_lost,
            ClockTicked: self._clock_ticked,
            RanksContradict: lambda event, now_s: self.job.fail("MismatchError", event.why, now_s),
            LinksChanged: self._links_changed,
            StopRequested: lambda event, now_s: self._end(f"{STOPPED}{event.reason or 'no reason given'}", now_s),
            ScaleRequested: lambda event, now_s: self._services.scale(event.servers, event.addresses, now_s),
            EpochSeen: self._epoch_seen,
            NewcomersAdmitted: self._newcomers_admitted,
            SchedulerAwake: self._scheduler_awake,
            HeartbeatReceived: self._heartbeat_received,
            MemberReturned: self._member_returned,
            RegistrationRefused: self._registration_refused,
        }
        self._message_handlers: Mapping[str, MessageHandler] = {
            "drain": self._drain,
            "gathered": self._gathered,
            "leave": self._leave,
            "measured": self._measured,
            "ready": self._ready,
            "reform": self._reform,
            "report": self._report,
            "unreachable": self._unreachable,
            **self._group.message_handlers(),
            **self._watch.message_handlers(),
            **self._services.message_handlers(),
        }

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.endswith("handlers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._set_handlers()

    def handle(self, event: Event, now_s: float) -> Outgoing:
        """Take an event. Raises only UsageError, for a ScaleRequested."""
        return self._handlers[type(event)](event, now_s)

    def tick(self, now_s: float) -> Outgoing:
        """Check everything that time may change, for a caller without a journal. Call it a few times per second."""
        out = self.handle(SchedulerAwake(), now_s)
        for event in self.suspicions(now_s):
            out += self.handle(event, now_s)
        return out + self.handle(ClockTicked(), now_s)

    # ---- questions -------------------------------------------------------------------------------------------

    @property
    def state(self) -> pb.StatusReply.State:
        """The job's state, see job.py."""
        return self.job.state

    @property
    def reason(self) -> str:
        """One sentence with the reason of the state."""
        return self.job.reason

    def suspicions(self, now_s: float) -> Iterator[MemberLost | RanksContradict | LinksChanged]:
        """The suspicions that heartbeats, and their absence, raise: members that have been silent for too long, then
        ranks that wait in vain, then links that have become slow, or fast again. Handle each event before you take the
        next. Ask after a SchedulerAwake of this time."""
        if self.state in (FORMING, RUNNING):
            present, is_forming = self._roster.present(), self.state == FORMING
            whys = [(m.connection, self._liveness.too_long(m, present, now_s, is_forming)) for m in present]
            yield from (MemberLost(connection, why) for connection, why in whys if why)
        if why := self._watch.contradiction():
            yield RanksContradict(why)
        mbit, why = self._watch.new_rates(now_s)
        if mbit:
            yield LinksChanged(mbit, why)

    def lateness(self, connection: int) -> float:
        """How many times longer than usual this member may be silent, because its heartbeats have been late."""
        member = self._roster.of_connection(connection)
        return 1.0 if member is None else self._liveness.lateness(member)

    def finished(self, now_s: float) -> Finish | None:
        """The outcome once the scheduler may exit, else None: its members have left, or have had the time to leave."""
        if self.job.over_s is None:
            return None
        # A frozen member may never close its connection.
        has_connections = bool(self._connections - self._roster.lost_connections())
        late = "; ".join(m.describe() for m in self._roster.present())
        return finish(self.state != ENDED, now_s - self.job.over_s, has_connections, late, self.reason)

    def status(self, now_s: float) -> pb.StatusReply:
        """The job as `bps status` shows it, at ``now_s``."""
        protected = [each.shadow for each in self._roster.workers() if each.shadow.survives]
        return pb.StatusReply(
            state=self.state,
            reason=self.reason,
            epoch=self._roster.epoch,
            members=[m.to_status(now_s, self._liveness.doubt(m, now_s)) for m in self._roster.everyone],
            tensors=self._group.declarations.accepted_count,
            tensor_bytes=self._group.declarations.accepted_bytes,
            replicated_bytes=self._group.declarations.hosted_bytes(is_replicated=True),
            sharded_bytes=self._group.declarations.hosted_bytes(is_replicated=False),
            hosted_remarks=self._group.declarations.hosted_remarks(),
            partition_bytes=self._roster.partition_bytes,
            num_workers=self._config.num_workers,
            num_servers=self._config.num_servers,
            missing_workers=self._roster.missing_numbers() if self.job.is_running else [],
            stalled=self._watch.stalled(),
            slow=self._watch.slow(),
            awaited=self._watch.awaited(),
            # The report of the machine that is behind all others.
            shadow=min(protected, key=lambda each: each.step, default=pb.ShadowProtection()),
        )

    # ---- one kind of event each --------------------------------------------------------------------------------

    def _connection_opened(self, event: ConnectionOpened, now_s: float) -> Outgoing:
        self._connections.add(event.connection)
        self._strangers[event.connection] = now_s
        return []

    def _connection_closed(self, event: ConnectionClosed, now_s: float) -> Outgoing:
        self._connections.discard(event.connection)
        self._strangers.pop(event.connection, None)
        member = self._roster.present_member(event.connection)
        return [] if member is None else self._lose(member, "its connection ended; see its log for why", now_s)

    def _message_received(self, event: MessageReceived, now_s: float) -> Outgoing:
        connection, message = event.connection, event.message
        member = self._roster.of_connection(connection)
        kind = message.WhichOneof("body") or ""
        if member is None:
            if connection not in self._strangers:
                return []  # a refused connection goes on sending
            del self._strangers[connection]
            if kind != "register":
                text = f"the first message must be Register, not {kind or None}"
                return [refused(connection, "ProtocolError", text)]
            return self._register(connection, message.register, now_s)
        if not member.is_present:
            return []
        member.last_seen_s = now_s
        if self._elastic is not None and self._elastic.is_stale(member, message):
            return []
        try:
            if (handler := self._message_handlers.get(kind)) is None:
                raise ProtocolError(f"a registered member must not send {kind or 'an empty message'}")
            return handler(member, getattr(message, kind), now_s)
        except ProtocolError as error:
            self._roster.remove(member, Presence.LOST)
            failures = self.job.fail("ProtocolError", f"{member.describe()} broke the protocol: {error}", now_s)
            return [refused(connection, "ProtocolError", str(error)), *failures]

    def _member_lost(self, event: MemberLost, now_s: float) -> Outgoing:
        member = self._roster.present_member(event.connection)
        return [] if member is None else self._lose(member, event.why, now_s, tell_it_too=True)

    def _clock_ticked(self, event: ClockTicked, now_s: float) -> Outgoing:
        out: Outgoing = []
        for connection, since_s in list(self._strangers.items()):
            if now_s - since_s >= REGISTER_TIMEOUT_S:
                del self._strangers[connection]
                out.append(refused(connection, "ProtocolError", f"it did not register within {REGISTER_TIMEOUT_S:g} s"))
        if self.state == FORMING:
            return out + self._form(self._forming.on_deadlines(now_s))
        if self.state == RUNNING:
            if self._services.none_since_s is not None:
                out += self._services.on_deadlines(now_s)
            out += self._regroup(now_s)
        return out

    def _links_changed(self, event: LinksChanged, now_s: float) -> Outgoing:
        self._roster.set_link_rates(event.mbit)
        return self._services.reassign(event.why, now_s) if self.job.is_running else []

    def _epoch_seen(self, event: EpochSeen, now_s: float) -> Outgoing:
        self._roster.first_epoch = max(self._roster.first_epoch, event.last + 1)
        return []

    def _newcomers_admitted(self, event: NewcomersAdmitted, now_s: float) -> Outgoing:
        self._services.wait_anew(now_s)
        if self._elastic is not None:
            self._elastic.wait_anew(now_s)
        return []

    def _scheduler_awake(self, event: SchedulerAwake, now_s: float) -> Outgoing:
        self._liveness.tick(now_s)
        return []

    def _heartbeat_received(self, event: HeartbeatReceived, now_s: float) -> Outgoing:
        if (member := self._roster.of_connection(event.connection)) is not None:
            self._liveness.on_heartbeat(member, now_s)
            member.last_seen_s = now_s
        return []

    def _member_returned(self, event: MemberReturned, now_s: float) -> Outgoing:
        if (member := self._roster.of_connection(event.connection)) is not None:
            member.last_seen_s = now_s
        return []

    def _registration_refused(self, event: RegistrationRefused, now_s: float) -> Outgoing:
        self._strangers.pop(event.connection, None)
        return []

    # ---- one kind of message each ------------------------------------------------------------------------------

    def _register(self, connection: int, register: pb.Register, now_s: float) -> Outgoing:
        if self.job.over_s is not None:
            return [refused(connection, "RendezvousError", f"this job is over: {self.reason}", self._all_left)]
        admitted = self._roster.admit(connection, register, now_s)
        if isinstance(admitted, Refusal):
            return [refused(connection, admitted.error, admitted.message, admitted.later)]
        welcome = pb.SchedulerMessage(welcome=pb.Welcome(member_id=admitted.id))
        out = [(connection, welcome)]
        if self.state == FORMING:
            return out + self._form(self._forming.registered(now_s))
        if not admitted.is_worker:  # one more summation service
            self._roster.set_late(admitted, True)
            out.append((connection, pb.SchedulerMessage(membership=self._services.membership)))
        return out

    def _measured(self, member: MemberRecord, measured: pb.Measured, now_s: float) -> Outgoing:
        return self._form(self._forming.measured(member, measured, now_s))

    def _ready(self, member: MemberRecord, ready: pb.Ready, now_s: float) -> Outgoing:
        self._liveness.started(member)
        return self._services.ready(member, now_s)

    def _form(self, out: Outgoing) -> Outgoing:
        """Open the first epoch, if the cluster is complete, after sending ``out``."""
        if self.state != FORMING or self._forming.rates is None:
            return out
        membership = self._roster.complete(self._forming.rates)
        if self._elastic is not None:
            self._elastic.first_opened(membership)
        return out + self._begin(membership, "all members have registered")

    def _begin(self, membership: pb.Membership, why: str) -> Outgoing:
        """A new group, with nothing declared, is at work."""
        self._services.opened(membership)
        n, size = len(membership.workers), sum(worker.local_size for worker in membership.workers)
        self._set_group(RankGroup(self.job, n, size))
        self.job.state = RUNNING
        self.job.reason = (
            f"{why}: {count_text(n, 'worker')} with {count_text(size, 'rank')}, "
            f"{count_text(len(membership.servers), 'summation service')} with keys"
        )
        return to_each(self._roster.present(), pb.SchedulerMessage(membership=membership))

    # ---- elastic jobs ------------------------------------------------------------------------------------------

    def _gathered(self, member: MemberRecord, gathered: pb.Gathered, now_s: float) -> Outgoing:
        if self._elastic is None or not member.is_worker:
            raise ProtocolError("only a communication service of an elastic job sends Gathered")
        out = self._elastic.gathered(member, gathered) + self._regroup(now_s)
        if self.job.is_running and self._elastic.is_deserted:
            self.job.keep_states = self._group.keeps_states
            out += self._end("all ranks of the group have left, before others joined it", now_s)
        elif self.job.is_running and self._elastic.is_succeeded and self._group.keeps_states:
            out += self._lose_group("all ranks of the group have ended, and others wait in their place", now_s, True)
        return out

    def _reform(self, member: MemberRecord, reform: pb.Reform, now_s: float) -> Outgoing:
        if self._elastic is None:
            raise ProtocolError("only the group of an elastic job can be re-formed")
        return self._lose_group(reform.reason, now_s, reform.planned)

    def _lose_group(self, why: str, now_s: float, planned: bool = False) -> Outgoing:
        """The group can't go on, or its ranks leave it together. The next one may go on."""
        if self._elastic is None or not self.job.is_running:
            return []
        return self._elastic.begin(why, planned, now_s) + self._regroup(now_s)

    def _regroup(self, now_s: float) -> Outgoing:
        """Form the next group, if all is ready for it."""
        if self._elastic is None or self._elastic.state is GroupState.AT_WORK:
            return []
        decision = self._elastic.decide(now_s)
        match decision:
            case Break(sentence):
                return self._lose_group(sentence, now_s)
            case GiveUp(sentence):
                return self.job.fail("RendezvousError", sentence, now_s)
            case Open(members):
                return self._open(decision, members, now_s)
        self.job.reason = decision.sentence
        return []

    def _open(self, decision: Open, members: Sequence[tuple[int, int]], now_s: float) -> Outgoing:
        if self._elastic is None:
            return []
        out = self._elastic.leave_behind(decision.late)
        why = self._elastic.reason
        if not self._roster.has_services_for(members):
            return out + self._services.await_one(why, now_s)
        membership = self._roster.regroup(members, why, decision.is_continued, decision.is_under_way)
        self._elastic.opened(members)
        return out + self._begin(membership, why) + self._services.release_drained()

    def _leave(self, member: MemberRecord, leave: pb.Leave, now_s: float) -> Outgoing:
        reason = leave.reason
        self._roster.remove(member, Presence.LEFT)
        self._watch.on_member_left(member)
        if self.state == FORMING:
            self._forming.left(member, reason)
            return []
        text = f"{member.describe()} has shut down" + (f": {reason}" if reason else "")
        workers = self._roster.workers()
        if not self.job.is_running:
            return self.job.dismiss_servers() if member.is_worker else []
        if self._elastic is not None and member.is_worker:
            self._elastic.forget(member)
            if workers and self._elastic.is_void(member):
                return self._regroup(now_s)  # no other member is in a group with it
        if member.is_worker and not workers:  # all may be dead, and awaited, while a service leaves
            self.job.keep_states = self._group.keeps_states
            self.job.end("all workers have left", now_s)
            self._all_left = True
            return self.job.dismiss_servers()
        if not member.is_worker:
            return self._services.reassign(text, now_s)
        self.job.reason = text
        return self._group.left(member, text) + self._regroup(now_s)

    def _report(self, member: MemberRecord, report: pb.Report, now_s: float) -> Outgoing:
        if self.job.is_running and not member.is_worker:
            return self._lose(member, report.message, now_s)  # the job goes on without a service that fails
        error = report.error if report.error in BY_NAME else "CommunicationError"
        # A traceback may follow the sentence.
        first, *rest = report.message.split("\n", 1)
        text = "\n".join([f"{first} (reported by {member.describe()})", *rest])
        return self.job.fail(error, text, now_s, silent_for=member)

    def _drain(self, member: MemberRecord, drain: pb.Drain, now_s: float) -> Outgoing:
        if member.is_worker:
            if self._elastic is None:
                raise ProtocolError("a worker can be drained only in an elastic job")
            self._roster.drain(member)
            return self._elastic.drain(member) if self.job.is_running else []
        return self._services.drain(member, drain.reason, now_s)

    def _unreachable(self, member: MemberRecord, unreachable: pb.Unreachable, now_s: float) -> Outgoing:
        server, question = self._services.accused(member, unreachable)
        if server is None:
            return question
        return self._lose(server, f"{member.describe()} can't reach it: {unreachable.reason}", now_s, tell_it_too=True)

    # ---- helpers -----------------------------------------------------------------------------------------------

    def _end(self, reason: str, now_s: float) -> Outgoing:
        self.job.end(reason, now_s)
        stop = pb.Stop(reason=self.reason, keep_states=self.job.keep_states)
        return to_each(self._roster.present(), pb.SchedulerMessage(stop=stop))

    def _lose(self, member: MemberRecord, why: str, now_s: float, tell_it_too: bool = False) -> Outgoing:
        self._roster.remove(member, Presence.LOST)
        self._watch.on_member_left(member)
        if self.state not in (FORMING, RUNNING):
            return self.job.dismiss_servers() if member.is_worker else []
        text = f"lost {member.describe()}: {why}"
        if self.job.is_running and not member.is_worker:
            out = self._services.reassign(text, now_s)
            if tell_it_too:  # it may only have been frozen
                sentence = f"this summation service was given up, and others have taken over its keys: {why}"
                out.append(refused(member.connection, "PeerLostError", sentence))
            return out
        if (
            self._elastic is not None
            and self.job.is_running
            and (self._roster.workers() or self._elastic.waits_for_all)
        ):
            self._elastic.forget(member)
            out = self._lose_group(text, now_s) if member.ranks else self._regroup(now_s)
        else:
            out = self.job.fail("PeerLostError", text, now_s)
        if tell_it_too:
            out.append((member.connection, failure("PeerLostError", text)))
        return out
