"""The scheduler as a state machine: events and the time go in, messages to connections come out.

Knows who is a member and lets the parts decide what it means: the roster, the group of ranks, the summation services,
the watch over heartbeats. Knows no sockets, clocks or threads: time is an argument, in seconds of any steady clock; one
thread at a time may call. The states are those of ``job.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from byteps_py.errors import BY_NAME, ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.cluster import ClusterConfig
from byteps_py.scheduler.elastic import Elastic
from byteps_py.scheduler.ending import Finish, finish
from byteps_py.scheduler.forming import Forming
from byteps_py.scheduler.group import RankGroup
from byteps_py.scheduler.job import ENDED, FORMING, RUNNING, Job
from byteps_py.scheduler.member import MemberRecord, Presence
from byteps_py.scheduler.outgoing import Outgoing, failure, refused, to_each
from byteps_py.scheduler.reforming import Break, GiveUp, Open
from byteps_py.scheduler.roster import Refusal
from byteps_py.scheduler.services import Services
from byteps_py.scheduler.silence import Silence
from byteps_py.scheduler.watch import GroupWatch
from byteps_py.unauthenticated_connections import PATIENCE_S
from byteps_py.wording import STOPPED, count_text

REGISTER_TIMEOUT_S = PATIENCE_S - 0.5  # a connection that has not said by then who it is, is turned away


class SchedulerCore:
    job_class: type[Job] = Job
    elastic_class: type[Elastic] = Elastic
    silence_class: type[Silence] = Silence

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._job = self.job_class(config)
        self._roster = self._job.roster
        self._group = RankGroup(self._job, config.num_workers, 0)
        self._watch = GroupWatch(self._job, self._group)
        self._elastic = self.elastic_class(config, self._roster) if config.elastic else None
        self._services = Services(self._job, self._elastic)
        self._silence = self.silence_class(config)
        self._forming = Forming(self._job)
        self._strangers: dict[int, float] = {}  # connections that have not registered → since when
        self._connections: set[int] = set()
        self._all_left = False  # the workers, in order: they may be on their way into their next job

    # ---- events ----------------------------------------------------------------------------------------------

    def on_connected(self, connection: int, now_s: float) -> Outgoing:
        self._connections.add(connection)
        self._strangers[connection] = now_s
        return []

    def on_disconnected(self, connection: int, now_s: float) -> Outgoing:
        """The connection is gone. A member that did not leave before is lost."""
        self._connections.discard(connection)
        self._strangers.pop(connection, None)
        member = self._roster.of_connection(connection)
        if member is None or not member.is_present:
            return []
        return self._lose(member, "its connection ended; see its log for why", now_s)

    def is_connected(self, connection: int) -> bool:
        return connection in self._connections

    def handle(self, connection: int, message: pb.MemberMessage, now_s: float) -> Outgoing:
        """Never raises for what a member sends: one that breaks the protocol is refused, and the job fails."""
        member = self._roster.of_connection(connection)
        kind = message.WhichOneof("body")
        if member is None:
            if connection not in self._strangers:
                return []  # refused before, and still talking
            del self._strangers[connection]
            if kind != "register":
                return [refused(connection, "ProtocolError", f"the first message must be register, not {kind}")]
            return self._register(connection, message.register, now_s)
        if not member.is_present:
            return []
        member.last_seen_s = now_s
        if self._elastic is not None and self._elastic.is_stale(member, message):
            return []
        try:
            match kind:
                case "gathered":
                    return self._gathered(member, message.gathered, now_s)
                case "reform":
                    return self._reform(member, message.reform, now_s)
                case "heartbeat":
                    return self._watch.heartbeat(member, message.heartbeat, now_s)
                case "declare":
                    return self._group.declare(member, message.declare)
                case "arrive":
                    return self._group.arrive(member, message.arrive.sequence)
                case "join":
                    return self._group.join(member, message.join)
                case "idle":
                    return self._group.idle(member, message.idle)
                case "leave":
                    return self._leave(member, message.leave.reason, now_s)
                case "gone":
                    return self._group.gone(member, message.gone)
                case "settled":
                    return self._group.settled(member, message.settled)
                case "measured":
                    return self._form(self._forming.measured(member, message.measured, now_s))
                case "sight":
                    return self._watch.sight(member, message.sight)
                case "drain":
                    return self._drain(member, message.drain.reason, now_s)
                case "ready":
                    self._silence.started(member)
                    return self._services.ready(member, now_s)
                case "applied":
                    return self._services.applied(member, message.applied)
                case "unreachable":
                    return self._unreachable(member, message.unreachable, now_s)
                case "report":
                    return self._report(member, message.report, now_s)
            raise ProtocolError(f"message {kind} makes no sense from a registered member")
        except ProtocolError as error:
            self._roster.remove(member, Presence.LOST)
            failures = self._job.fail("ProtocolError", f"{member.describe()} broke the protocol: {error}", now_s)
            return [refused(connection, "ProtocolError", str(error)), *failures]

    def on_lost(self, connection: int, why: str, now_s: float) -> Outgoing:
        """The member of a connection, which may still be there, counts as dead."""
        member = self._roster.of_connection(connection)
        if member is None or not member.is_present:
            return []
        return self._lose(member, why, now_s, tell_it_too=True)

    def on_tick(self, now_s: float) -> Outgoing:
        """Call a few times per second; all deadlines are checked here."""
        out: Outgoing = []
        for connection, why in self.silent(now_s):
            out += self.on_lost(connection, why, now_s)
        if why := self.contradiction():
            out += self.on_contradiction(why, now_s)
        return out + self.on_deadlines(now_s)

    def on_deadlines(self, now_s: float) -> Outgoing:
        """All deadlines but those of silent members. Says the same whatever heartbeats have said."""
        out: Outgoing = []
        for connection, since_s in list(self._strangers.items()):
            if now_s - since_s >= REGISTER_TIMEOUT_S:
                del self._strangers[connection]
                out.append(refused(connection, "ProtocolError", f"not registered after {REGISTER_TIMEOUT_S:g} s"))
        if self._job.is_running:
            out += self._services.on_deadlines(now_s) + self._regroup(now_s)
        return out + self._form(self._forming.on_deadlines(now_s))

    def on_contradiction(self, why: str, now_s: float) -> Outgoing:
        """Ranks wait for each other in different operations, and will for ever."""
        return self._job.fail("MismatchError", why, now_s)

    def stop(self, reason: str, now_s: float) -> Outgoing:
        """End the job in order: every member is told to leave."""
        return self._end(f"{STOPPED}{reason or 'no reason given'}", now_s)

    def _end(self, reason: str, now_s: float) -> Outgoing:
        self._job.end(reason, now_s)
        return to_each(self._roster.present(), pb.SchedulerMessage(stop=pb.Stop(reason=self.reason)))

    def skip_epochs(self, last: int) -> Outgoing:
        """Processes of an earlier cluster have been in epoch ``last``: this one's must come after it."""
        self._roster.first_epoch = max(self._roster.first_epoch, last + 1)
        return []

    def scale(self, count: int, addresses: Iterable[str], now_s: float) -> Outgoing:
        """Let servers of CPU machines go, see ``Services.scale``. Raises UsageError."""
        return self._services.scale(count, addresses, now_s)

    # ---- questions -------------------------------------------------------------------------------------------

    @property
    def state(self) -> pb.StatusReply.State:
        return self._job.state

    @property
    def reason(self) -> str:
        """One sentence on why the state is what it is."""
        return self._job.reason

    @property
    def epoch(self) -> int:
        """The latest that was opened here, or that is known of an earlier cluster."""
        return max(self._roster.epoch, self._roster.first_epoch - 1)

    def contradiction(self) -> str:
        """Why ranks wait in vain, as far as heartbeats show; empty if they don't."""
        return self._watch.contradiction()

    def is_member(self, connection: int) -> bool:
        """True from its registration until it has left or is lost."""
        member = self._roster.of_connection(connection)
        return member is not None and member.is_present

    def turned_away(self, connection: int) -> None:
        """A connection that has not registered has been refused by somebody else."""
        self._strangers.pop(connection, None)

    def silent(self, now_s: float) -> list[tuple[int, str]]:
        """Connections of members that have been silent for too long, and why that is so. Call a few times per
        second: how late the calls come tells how long the scheduler itself was held up."""
        self._silence.tick(now_s)
        if self.state not in (FORMING, RUNNING):
            return []
        present = self._roster.present()
        is_forming = self.state == FORMING
        whys = [(m.connection, self._silence.too_long(m, present, now_s, is_forming)) for m in present]
        return [(connection, why) for connection, why in whys if why]

    def heard(self, connection: int, now_s: float) -> None:
        """The member has given a sign of life. Not called when a journal is gone through, which lacks most of them."""
        if (member := self._roster.of_connection(connection)) is not None:
            self._silence.heard(member, now_s)
            member.last_seen_s = now_s

    def came_back(self, connection: int, now_s: float) -> None:
        """The member is heard on a new connection: what was on its way over the one before is no late heartbeat."""
        if (member := self._roster.of_connection(connection)) is not None:
            member.last_seen_s = now_s

    def timeout_s(self, connection: int) -> float:
        """The silence of a member that would be its death."""
        member = self._roster.of_connection(connection)
        return self._config.heartbeat_timeout_s if member is None else self._silence.timeout_s(member)

    def finished(self, now_s: float) -> Finish | None:
        """Not None once the scheduler can go: its members have left, or had their time to do so."""
        if self._job.over_s is None:
            return None
        # A member that froze may never close its connection.
        has_connections = bool(self._connections - self._roster.lost_connections())
        late = "; ".join(m.describe() for m in self._roster.present())
        return finish(self.state != ENDED, now_s - self._job.over_s, has_connections, late, self.reason)

    @property
    def cpu_machines(self) -> int:
        """Those that sum, or are ready to."""
        return len(self._roster.cpu_servers())

    def status(self, now_s: float) -> pb.StatusReply:
        return pb.StatusReply(
            state=self.state,
            reason=self.reason,
            epoch=self._roster.epoch,
            members=[m.to_status(now_s, self._silence.doubt(m, now_s)) for m in self._roster.everyone],
            tensors=self._group.declarations.accepted_count,
            tensor_bytes=self._group.declarations.accepted_bytes,
            partition_bytes=self._roster.partition_bytes,
            num_workers=self._config.num_workers,
            num_servers=self._config.num_servers,
            stalled=self._watch.stalled(),
            slow=self._watch.slow(),
        )

    # ---- one kind of message each ------------------------------------------------------------------------------

    def _register(self, connection: int, register: pb.Register, now_s: float) -> Outgoing:
        if self._job.over_s is not None:
            return [refused(connection, "RendezvousError", f"this job is over: {self.reason}", self._all_left)]
        admitted = self._roster.admit(connection, register, now_s)
        if isinstance(admitted, Refusal):
            return [refused(connection, admitted.error, admitted.message, admitted.later)]
        welcome = pb.SchedulerMessage(welcome=pb.Welcome(member_id=admitted.id))
        out = [(connection, welcome)]
        if self.state == FORMING:
            return out + self._form(self._forming.came(now_s))
        if not admitted.is_worker:  # a summation service more
            admitted.is_late = True
            out.append((connection, pb.SchedulerMessage(membership=self._services.membership)))
        return out

    def _form(self, out: Outgoing) -> Outgoing:
        """Open the first epoch, if it is time to, after saying ``out``."""
        if self.state != FORMING or self._forming.rates is None:
            return out
        membership = self._roster.complete(self._forming.rates)
        if self._elastic is not None:
            for member in self._roster.workers():
                self._elastic.forget(member)
        return out + self._begin(membership, "all are there")

    def _begin(self, membership: pb.Membership, why: str) -> Outgoing:
        """A group starts with nothing declared."""
        self._services.opened(membership)
        n, size = len(membership.workers), sum(worker.local_size for worker in membership.workers)
        self._group = RankGroup(self._job, n, size)
        self._watch = GroupWatch(self._job, self._group)
        self._job.state = RUNNING
        self._job.reason = (
            f"{why}: {count_text(n, 'worker')} with {count_text(size, 'rank')}, "
            f"{count_text(len(membership.servers), 'summation service')} with keys"
        )
        return to_each(self._roster.present(), pb.SchedulerMessage(membership=membership))

    # ---- elastic jobs ------------------------------------------------------------------------------------------

    def _gathered(self, member: MemberRecord, gathered: pb.Gathered, now_s: float) -> Outgoing:
        if self._elastic is None or not member.is_worker:
            raise ProtocolError("only communication services of elastic jobs come back")
        out = self._elastic.gathered(member, gathered) + self._regroup(now_s)
        if self._job.is_running and self._elastic.is_deserted:
            out += self._end("all ranks of the group have left, and others have yet to join it", now_s)
        return out

    def _reform(self, member: MemberRecord, reform: pb.Reform, now_s: float) -> Outgoing:
        if self._elastic is None:
            raise ProtocolError("the group of a job that is not elastic can't be formed anew")
        return self._lose_group(reform.reason, now_s, reform.planned)

    def _lose_group(self, why: str, now_s: float, planned: bool = False) -> Outgoing:
        """The group can't go on, or does not want to; the next one may."""
        if self._elastic is None or not self._job.is_running:
            return []
        return self._elastic.begin(why, planned, now_s) + self._regroup(now_s)

    def _regroup(self, now_s: float) -> Outgoing:
        """Form the next group, if it is time to."""
        if self._elastic is None or not self._elastic.is_active:
            return []
        decision = self._elastic.decide(now_s)
        match decision:
            case Break(sentence):
                return self._lose_group(sentence, now_s)
            case GiveUp(sentence):
                return self._job.fail("RendezvousError", sentence, now_s)
            case Open(members):
                return self._open(decision, members, now_s)
        self._job.reason = decision.sentence
        return []

    def _open(self, decision: Open, members: Sequence[tuple[int, int]], now_s: float) -> Outgoing:
        if self._elastic is None:
            return []
        out = self._elastic.leave_behind(decision.late)
        why = self._elastic.reason
        if not self._roster.has_services_for(members):
            return out + self._services.await_one(why, now_s)
        membership = self._roster.regroup(members, why, decision.is_continued)
        self._elastic.opened(members)
        return out + self._begin(membership, why) + self._services.let_go()

    def _leave(self, member: MemberRecord, reason: str, now_s: float) -> Outgoing:
        self._roster.remove(member, Presence.LEFT)
        self._watch.gone(member)
        if self.state == FORMING:
            self._forming.left(member, reason)
            return []
        text = f"{member.describe()} has shut down" + (f": {reason}" if reason else "")
        workers = self._roster.workers()
        if not self._job.is_running:
            return self._job.dismiss_servers() if member.is_worker else []
        if self._elastic is not None and member.is_worker:
            self._elastic.forget(member)
            if workers and self._elastic.is_void(member):
                return self._regroup(now_s)  # nobody in a group with it
        if not workers:
            self._job.end("all workers have left", now_s)
            self._all_left = True
            return self._job.dismiss_servers()
        if not member.is_worker:
            return self._services.reassign(text, now_s)
        self._job.reason = text
        return self._group.left(member, text) + self._regroup(now_s)

    def _report(self, member: MemberRecord, report: pb.Report, now_s: float) -> Outgoing:
        if self._job.is_running and not member.is_worker:
            return self._lose(member, report.message, now_s)  # a service that fails takes nobody with it
        error = report.error if report.error in BY_NAME else "CommunicationError"
        # A traceback may follow the sentence.
        first, *rest = report.message.split("\n", 1)
        text = "\n".join([f"{first} (reported by {member.describe()})", *rest])
        return self._job.fail(error, text, now_s, silent_for=member)

    # ---- helpers -----------------------------------------------------------------------------------------------

    def _lose(self, member: MemberRecord, why: str, now_s: float, tell_it_too: bool = False) -> Outgoing:
        self._roster.remove(member, Presence.LOST)
        self._watch.gone(member)
        if self.state not in (FORMING, RUNNING):
            return self._job.dismiss_servers() if member.is_worker else []
        text = f"lost {member.describe()}: {why}"
        if self._job.is_running and not member.is_worker:
            out = self._services.reassign(text, now_s)
            if tell_it_too:  # should it wake up
                sentence = f"this summation service was given up, and others sum what it did: {why}"
                out.append(refused(member.connection, "PeerLostError", sentence))
            return out
        if self._elastic is not None and self._job.is_running and self._roster.workers():
            self._elastic.forget(member)
            out = self._lose_group(text, now_s) if member.ranks else self._regroup(now_s)
        else:
            out = self._job.fail("PeerLostError", text, now_s)
        if tell_it_too:
            out.append((member.connection, failure("PeerLostError", text)))
        return out

    def _drain(self, member: MemberRecord, reason: str, now_s: float) -> Outgoing:
        if member.is_worker:
            if self._elastic is None:
                raise ProtocolError("only a summation service can be drained, unless the job is elastic")
            member.is_draining = True
            return self._elastic.drain(member) if self._job.is_running else []
        return self._services.drain(member, reason, now_s)

    def _unreachable(self, member: MemberRecord, unreachable: pb.Unreachable, now_s: float) -> Outgoing:
        server, question = self._services.accused(member, unreachable)
        if server is None:
            return question
        return self._lose(server, f"{member.describe()} can't reach it: {unreachable.reason}", now_s, tell_it_too=True)
