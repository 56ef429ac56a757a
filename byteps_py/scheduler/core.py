"""The scheduler as a state machine: events and the time go in, messages to connections come out.

Routes each event to the part that decides: the roster, the group of ranks, the summation services, the watch over
heartbeats. Knows no sockets, clocks or threads: time is an argument, in seconds of any steady clock. One thread at a
time may call. The states are those of job.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from byteps_py.errors import BY_NAME, ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.cluster_config import ClusterConfig
from byteps_py.scheduler.elastic import Break, Elastic, GiveUp, GroupState, Open
from byteps_py.scheduler.forming import Forming
from byteps_py.scheduler.group_watch import GroupWatch
from byteps_py.scheduler.job import ENDED, FORMING, RUNNING, Finish, Job, Outgoing, failure, finish, refused, to_each
from byteps_py.scheduler.liveness import LivenessMonitor
from byteps_py.scheduler.rank_group import RankGroup
from byteps_py.scheduler.roster import MemberRecord, Presence, Refusal
from byteps_py.scheduler.summation_services import SummationServices
from byteps_py.unauthenticated_connections import PATIENCE_S
from byteps_py.wording import STOPPED, count_text

REGISTER_TIMEOUT_S = PATIENCE_S - 0.5  # a connection that has not registered by then is refused


class SchedulerCore:
    """One job. Methods that return Outgoing are events; their messages are to be sent in order.

    ``job_class``, ``elastic_class``, ``liveness_class``: the classes of the parts; tests name others in a subclass.
    """

    job_class: type[Job] = Job
    elastic_class: type[Elastic] = Elastic
    liveness_class: type[LivenessMonitor] = LivenessMonitor

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._job = self.job_class(config)
        self._roster = self._job.roster
        self._group = RankGroup(self._job, config.num_workers, 0)
        self._watch = GroupWatch(self._job, self._group)
        self._elastic = self.elastic_class(config, self._roster) if config.elastic else None
        self._services = SummationServices(self._job, self._elastic)
        self._liveness = self.liveness_class(config)
        self._forming = Forming(self._job)
        self._strangers: dict[int, float] = {}  # connections that have not registered → when they began
        self._connections: set[int] = set()
        self._all_left = False  # all workers left in order: their successors may be starting the next job

    # ---- events ----------------------------------------------------------------------------------------------

    def on_connected(self, connection: int, now_s: float) -> Outgoing:
        """A connection has begun. It has to register within REGISTER_TIMEOUT_S seconds."""
        self._connections.add(connection)
        self._strangers[connection] = now_s
        return []

    def on_disconnected(self, connection: int, now_s: float) -> Outgoing:
        """The connection has ended. A member that has not left before is lost."""
        self._connections.discard(connection)
        self._strangers.pop(connection, None)
        member = self._roster.of_connection(connection)
        if member is None or not member.is_present:
            return []
        return self._lose(member, "its connection ended; see its log for why", now_s)

    def is_connected(self, connection: int) -> bool:
        """True from ``on_connected`` to ``on_disconnected``."""
        return connection in self._connections

    def handle(self, connection: int, message: pb.MemberMessage, now_s: float) -> Outgoing:
        """A member's message. Never raises: a member that breaks the protocol is refused, and the job fails."""
        member = self._roster.of_connection(connection)
        kind = message.WhichOneof("body")
        if member is None:
            if connection not in self._strangers:
                return []  # a refused connection goes on sending
            del self._strangers[connection]
            if kind != "register":
                return [refused(connection, "ProtocolError", f"the first message must be Register, not {kind}")]
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
                case "keep_states":
                    self._group.keep_states(member)
                    return []
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
                    self._liveness.started(member)
                    return self._services.ready(member, now_s)
                case "applied":
                    return self._services.applied(member, message.applied)
                case "unreachable":
                    return self._unreachable(member, message.unreachable, now_s)
                case "report":
                    return self._report(member, message.report, now_s)
            raise ProtocolError(f"a registered member must not send {kind or 'an empty message'}")
        except ProtocolError as error:
            self._roster.remove(member, Presence.LOST)
            failures = self._job.fail("ProtocolError", f"{member.describe()} broke the protocol: {error}", now_s)
            return [refused(connection, "ProtocolError", str(error)), *failures]

    def on_lost(self, connection: int, why: str, now_s: float) -> Outgoing:
        """The member of this connection counts as dead, even if the connection still stands."""
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
        """All deadlines but those of silent members. The result does not depend on heartbeats, so that the journal can
        be replayed without them."""
        out: Outgoing = []
        for connection, since_s in list(self._strangers.items()):
            if now_s - since_s >= REGISTER_TIMEOUT_S:
                del self._strangers[connection]
                out.append(refused(connection, "ProtocolError", f"it did not register within {REGISTER_TIMEOUT_S:g} s"))
        if self._job.is_running:
            out += self._services.on_deadlines(now_s) + self._regroup(now_s)
        return out + self._form(self._forming.on_deadlines(now_s))

    def on_contradiction(self, why: str, now_s: float) -> Outgoing:
        """Ranks wait for each other in different operations, and would wait for ever."""
        return self._job.fail("MismatchError", why, now_s)

    def stop(self, reason: str, now_s: float) -> Outgoing:
        """End the job in order: every member gets Stop."""
        return self._end(f"{STOPPED}{reason or 'no reason given'}", now_s)

    def _end(self, reason: str, now_s: float) -> Outgoing:
        self._job.end(reason, now_s)
        stop = pb.Stop(reason=self.reason, keep_states=self._job.keep_states)
        return to_each(self._roster.present(), pb.SchedulerMessage(stop=stop))

    def skip_epochs(self, last: int) -> Outgoing:
        """Processes of an earlier cluster have seen epoch ``last``: epochs of this one come after it."""
        self._roster.first_epoch = max(self._roster.first_epoch, last + 1)
        return []

    def scale(self, count: int, addresses: Iterable[str], now_s: float) -> Outgoing:
        """Drain servers of CPU machines, see ``SummationServices.scale``. Raises UsageError."""
        return self._services.scale(count, addresses, now_s)

    # ---- questions -------------------------------------------------------------------------------------------

    @property
    def state(self) -> pb.StatusReply.State:
        """The job's state, see job.py."""
        return self._job.state

    @property
    def reason(self) -> str:
        """One sentence on why the state is what it is."""
        return self._job.reason

    @property
    def epoch(self) -> int:
        """The latest epoch that was opened here, or that an earlier cluster is known to have had."""
        return max(self._roster.epoch, self._roster.first_epoch - 1)

    def contradiction(self) -> str:
        """Why ranks wait in vain, as far as heartbeats show it; empty if they do not."""
        return self._watch.contradiction()

    def is_member(self, connection: int) -> bool:
        """True from its registration until it has left or is lost."""
        member = self._roster.of_connection(connection)
        return member is not None and member.is_present

    def worker_home(self, connection: int) -> tuple[str, int] | None:
        """The machine id and the index with which a worker has registered; None for what is no worker."""
        member = self._roster.of_connection(connection)
        return member.home if member is not None and member.is_worker else None

    def turned_away(self, connection: int) -> None:
        """The caller has refused this connection, which has not registered."""
        self._strangers.pop(connection, None)

    def silent(self, now_s: float) -> list[tuple[int, str]]:
        """(connection, reason) of each member that has been silent for too long. Call a few times per second: late
        calls show how long the scheduler itself did not run."""
        self._liveness.tick(now_s)
        if self.state not in (FORMING, RUNNING):
            return []
        present = self._roster.present()
        is_forming = self.state == FORMING
        whys = [(m.connection, self._liveness.too_long(m, present, now_s, is_forming)) for m in present]
        return [(connection, why) for connection, why in whys if why]

    def heard(self, connection: int, now_s: float) -> None:
        """A message of the member has arrived. Not called while a journal is replayed, which lacks most messages."""
        if (member := self._roster.of_connection(connection)) is not None:
            self._liveness.heard(member, now_s)
            member.last_seen_s = now_s

    def came_back(self, connection: int, now_s: float) -> None:
        """The member has a new connection: heartbeats that got lost with the previous one do not count as late."""
        if (member := self._roster.of_connection(connection)) is not None:
            member.last_seen_s = now_s

    def timeout_s(self, connection: int) -> float:
        """The silence, in seconds, after which this member counts as dead."""
        member = self._roster.of_connection(connection)
        return self._config.heartbeat_timeout_s if member is None else self._liveness.timeout_s(member)

    def finished(self, now_s: float) -> Finish | None:
        """Not None once the scheduler may exit: its members have left, or have had the time to leave."""
        if self._job.over_s is None:
            return None
        # A frozen member may never close its connection.
        has_connections = bool(self._connections - self._roster.lost_connections())
        late = "; ".join(m.describe() for m in self._roster.present())
        return finish(self.state != ENDED, now_s - self._job.over_s, has_connections, late, self.reason)

    @property
    def cpu_machines(self) -> int:
        """The number of CPU machines whose servers sum, or are ready to."""
        return len(self._roster.cpu_servers())

    def status(self, now_s: float) -> pb.StatusReply:
        """The job as `bps status` shows it, at ``now_s``."""
        return pb.StatusReply(
            state=self.state,
            reason=self.reason,
            epoch=self._roster.epoch,
            members=[m.to_status(now_s, self._liveness.doubt(m, now_s)) for m in self._roster.everyone],
            tensors=self._group.declarations.accepted_count,
            tensor_bytes=self._group.declarations.accepted_bytes,
            partition_bytes=self._roster.partition_bytes,
            num_workers=self._config.num_workers,
            num_servers=self._config.num_servers,
            stalled=self._watch.stalled(),
            slow=self._watch.slow(),
            shadow=self._shadow(),
        )

    def _shadow(self) -> pb.ShadowProtection:
        """Of the machine that is behind all others."""
        said = [each.shadow for each in self._roster.workers() if each.shadow.survives]
        return min(said, key=lambda each: each.step, default=pb.ShadowProtection())

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
            return out + self._form(self._forming.registered(now_s))
        if not admitted.is_worker:  # one more summation service
            admitted.is_late = True
            out.append((connection, pb.SchedulerMessage(membership=self._services.membership)))
        return out

    def _form(self, out: Outgoing) -> Outgoing:
        """Open the first epoch, if the cluster is complete, after sending ``out``."""
        if self.state != FORMING or self._forming.rates is None:
            return out
        membership = self._roster.complete(self._forming.rates)
        if self._elastic is not None:
            for member in self._roster.workers():
                self._elastic.forget(member)
        return out + self._begin(membership, "all members have registered")

    def _begin(self, membership: pb.Membership, why: str) -> Outgoing:
        """A new group, with nothing declared, is at work."""
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
            raise ProtocolError("only a communication service of an elastic job sends Gathered")
        out = self._elastic.gathered(member, gathered) + self._regroup(now_s)
        if self._job.is_running and self._elastic.is_deserted:
            self._job.keep_states = self._group.keeps_states
            out += self._end("all ranks of the group have left, before others joined it", now_s)
        return out

    def _reform(self, member: MemberRecord, reform: pb.Reform, now_s: float) -> Outgoing:
        if self._elastic is None:
            raise ProtocolError("only the group of an elastic job can be re-formed")
        return self._lose_group(reform.reason, now_s, reform.planned)

    def _lose_group(self, why: str, now_s: float, planned: bool = False) -> Outgoing:
        """The group can't go on, or its ranks leave it together. The next one may go on."""
        if self._elastic is None or not self._job.is_running:
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
                return self._regroup(now_s)  # no other member is in a group with it
        if not workers:
            self._job.keep_states = self._group.keeps_states
            self._job.end("all workers have left", now_s)
            self._all_left = True
            return self._job.dismiss_servers()
        if not member.is_worker:
            return self._services.reassign(text, now_s)
        self._job.reason = text
        return self._group.left(member, text) + self._regroup(now_s)

    def _report(self, member: MemberRecord, report: pb.Report, now_s: float) -> Outgoing:
        if self._job.is_running and not member.is_worker:
            return self._lose(member, report.message, now_s)  # the job goes on without a service that fails
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
            if tell_it_too:  # it may only have been frozen
                sentence = f"this summation service was given up, and others have taken over its keys: {why}"
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
                raise ProtocolError("a worker can be drained only in an elastic job")
            member.is_draining = True
            return self._elastic.drain(member) if self._job.is_running else []
        return self._services.drain(member, reason, now_s)

    def _unreachable(self, member: MemberRecord, unreachable: pb.Unreachable, now_s: float) -> Outgoing:
        server, question = self._services.accused(member, unreachable)
        if server is None:
            return question
        return self._lose(server, f"{member.describe()} can't reach it: {unreachable.reason}", now_s, tell_it_too=True)
