"""The scheduler as a state machine: events and the time go in, messages to connections come out.

Owns what the cluster is, what its ranks agreed on and whether it can go on. Knows no sockets, clocks or threads:
time is an argument, in seconds of any steady clock; one thread at a time may call.

    FORMING ──all there──► RUNNING ──all workers left, or stop──► ENDED
       │                      │
       └── deadline, death ───┴── death, broken protocol, report of a rank ──► FAILED

``reason`` is one sentence on why the state is what it is; status, logs and errors print the same one.
"""

from __future__ import annotations

from collections.abc import Iterable

from byteps_py.errors import BY_NAME, ProtocolError, UsageError
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import stalls
from byteps_py.scheduler.barrier import Barriers
from byteps_py.scheduler.cluster import ClusterConfig
from byteps_py.scheduler.declarations import Decided, Declarations, Reopened
from byteps_py.scheduler.ending import Finish, finish
from byteps_py.scheduler.farewell import Farewell
from byteps_py.scheduler.joining import Joining
from byteps_py.scheduler.member import MemberRecord, Presence
from byteps_py.scheduler.outgoing import Outgoing, failure, refused, to_each
from byteps_py.scheduler.pace import PaceWatch, Slow
from byteps_py.scheduler.pace import sentences as slow_sentences
from byteps_py.scheduler.roster import Refusal, Roster
from byteps_py.scheduler.silence import Silence
from byteps_py.scheduler.survey import Survey
from byteps_py.scheduler.words import count_text, ranks_text

REGISTER_TIMEOUT_S = 4.0  # a connection that has not said by then who it is, is turned away

FORMING = pb.StatusReply.STATE_FORMING
RUNNING = pb.StatusReply.STATE_RUNNING
FAILED = pb.StatusReply.STATE_FAILED
ENDED = pb.StatusReply.STATE_ENDED


class SchedulerCore:
    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._roster = Roster(config)
        self._declarations = Declarations(config.num_workers, 0)
        self._stalls = stalls.StallWatch(config.stall_warn_s)
        self._pace = PaceWatch(config.straggler, config.stall_warn_s)
        self._barriers = Barriers(config.num_workers)
        self._joining = Joining(config.num_workers)
        self._farewell = Farewell()
        self._strangers: dict[int, float] = {}  # connections that have not registered → since when
        self._connections: set[int] = set()
        self._first_registration_s: float | None = None
        self._silence = Silence(config.heartbeat_timeout_s, config.heartbeat_interval_s)
        self._survey: Survey | None = None  # all are there, and their links are being measured
        self._over_s: float | None = None
        self._all_left = False  # the workers, in order: they may be on their way into their next job
        self._membership = pb.Membership()
        self.state: pb.StatusReply.State = FORMING
        self.reason = self._roster.missing()

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
        try:
            match kind:
                case "heartbeat":
                    return self._heartbeat(member, message.heartbeat, now_s)
                case "declare":
                    return self._declare(member, message.declare)
                case "arrive":
                    return self._arrive(member, message.arrive.sequence)
                case "join":
                    return self._join(member, message.join)
                case "idle":
                    return self._idle(member, message.idle)
                case "leave":
                    return self._leave(member, message.leave.reason, now_s)
                case "gone":
                    return self._gone(member, message.gone)
                case "settled":
                    return self._settled(member, message.settled)
                case "measured":
                    return self._measured(member, message.measured, now_s)
                case "sight":
                    return self._sight(member, message.sight)
                case "drain":
                    return self._drain(member, message.drain.reason, now_s)
                case "ready":
                    return self._ready(member, now_s)
                case "applied":
                    return self._applied(member, message.applied)
                case "unreachable":
                    return self._unreachable(member, message.unreachable, now_s)
                case "report":
                    return self._report(member, message.report, now_s)
            raise ProtocolError(f"message {kind} makes no sense from a registered member")
        except ProtocolError as error:
            self._roster.remove(member, Presence.LOST)
            failures = self._fail("ProtocolError", f"{member.describe()} broke the protocol: {error}", now_s)
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
        if self.state == FORMING and self._survey is not None:
            out += self._go_on_measuring(self._survey, now_s)
        elif self.state == FORMING and self._first_registration_s is not None:
            limit_s = self._config.start_timeout_s
            if now_s - self._first_registration_s >= limit_s:
                text = f"the cluster is not complete after {limit_s:g} s (BYTEPS_START_TIMEOUT_S): {self.reason}"
                out += self._fail("RendezvousError", text, now_s)
        return out

    def on_contradiction(self, why: str, now_s: float) -> Outgoing:
        """Ranks wait for each other in different operations, and will for ever."""
        return self._fail("MismatchError", why, now_s)

    def stop(self, reason: str, now_s: float) -> Outgoing:
        """End the job in order: every member is told to leave."""
        if self._over_s is None:
            self.state, self._over_s = ENDED, now_s
            self.reason = f"stopped: {reason or 'no reason given'}"
        return to_each(self._roster.present(), pb.SchedulerMessage(stop=pb.Stop(reason=self.reason)))

    def skip_epochs(self, last: int) -> Outgoing:
        """Processes of an earlier cluster have been in epoch ``last``: this one's must come after it."""
        self._roster.first_epoch = max(self._roster.first_epoch, last + 1)
        return []

    # ---- questions -------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The latest that was opened here, or that is known of an earlier cluster."""
        return max(self._roster.epoch, self._roster.first_epoch - 1)

    def contradiction(self) -> str:
        """Why ranks wait in vain, as far as heartbeats show; empty if they don't."""
        if self.state != RUNNING:
            return ""
        size = sum(len(m.ranks) for m in self._roster.everyone)
        return self._stalls.contradiction(size, self._declarations.describe)

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
        whys = [(m.connection, self._silence.too_long(m, present, now_s)) for m in present]
        return [(connection, why) for connection, why in whys if why]

    def heard(self, connection: int, now_s: float) -> None:
        """The member has given a sign of life."""
        if (member := self._roster.of_connection(connection)) is not None:
            member.last_seen_s = now_s

    def finished(self, now_s: float) -> Finish | None:
        """Not None once the scheduler can go: its members have left, or had their time to do so."""
        if self._over_s is None:
            return None
        # A member that froze may never close its connection.
        has_connections = bool(self._connections - self._roster.lost_connections())
        late = "; ".join(m.describe() for m in self._roster.present())
        return finish(self.state != ENDED, now_s - self._over_s, has_connections, late, self.reason)

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
            tensors=self._declarations.accepted_count,
            tensor_bytes=self._declarations.accepted_bytes,
            partition_bytes=self._roster.partition_bytes,
            num_workers=self._config.num_workers,
            num_servers=self._config.num_servers,
            stalled=stalls.sentences(self._current_stalls(), self._who) if self.state == RUNNING else [],
            slow=self._slow_sentences(self._slow()),
        )

    # ---- one kind of message each ------------------------------------------------------------------------------

    def _register(self, connection: int, register: pb.Register, now_s: float) -> Outgoing:
        if self._over_s is not None:
            return [refused(connection, "RendezvousError", f"this job is over: {self.reason}", self._all_left)]
        admitted = self._roster.admit(connection, register, now_s)
        if isinstance(admitted, Refusal):
            return [refused(connection, admitted.error, admitted.message, admitted.later)]
        if self._first_registration_s is None:
            self._first_registration_s = now_s
        welcome = pb.SchedulerMessage(welcome=pb.Welcome(member_id=admitted.id))
        out = [(connection, welcome)]
        if self.state == FORMING:
            self.reason = self._roster.missing()
        if self.state == RUNNING:  # a summation service more
            admitted.is_late = True
            out.append((connection, pb.SchedulerMessage(membership=self._membership)))
        elif not self.reason:
            out += self._all_are_there(now_s)
        return out

    def _all_are_there(self, now_s: float) -> Outgoing:
        rates = self._roster.link_rates()
        if self._config.num_workers == 1 or all(rates):
            return self._complete(rates)
        n, k = self._config.num_workers, self._config.num_servers
        self._survey = Survey(n, k, self._config.needs_gpu_machine_servers)
        return self._go_on_measuring(self._survey, now_s)

    def _go_on_measuring(self, survey: Survey, now_s: float) -> Outgoing:
        """Begin the next turn once the one before is over; after the last one the job can start."""
        out: Outgoing = []
        workers, servers = self._roster.workers(), [*self._roster.cpu_servers(), *self._roster.gpu_servers()]
        while survey.is_turn_over(now_s):
            for worker, server in survey.next_turn(now_s):
                message = pb.Measure(turn=survey.turn, address=servers[server].facts.address)
                out.append((workers[worker].connection, pb.SchedulerMessage(measure=message)))
            if survey.is_over:
                self._survey = None
                return [*out, *self._complete(survey.settle(self._roster.link_rates()))]
        self.reason = survey.sentence
        return out

    def _measured(self, member: MemberRecord, measured: pb.Measured, now_s: float) -> Outgoing:
        if self._survey is None:
            return []
        self._ranks_of(member)
        self._survey.measured(member.facts.machine_index, measured.turn, measured.mbit)
        return self._go_on_measuring(self._survey, now_s)

    def _complete(self, link_mbit: list[float]) -> Outgoing:
        self._membership = membership = self._roster.complete(link_mbit)
        size = sum(worker.local_size for worker in membership.workers)
        self._declarations = Declarations(self._config.num_workers, size)
        self.state = RUNNING
        self.reason = (
            f"all are there: {count_text(len(membership.workers), 'worker')} with {count_text(size, 'rank')}, "
            f"{count_text(len(membership.servers), 'summation service')} with keys"
        )
        return to_each(self._roster.present(), pb.SchedulerMessage(membership=membership))

    def _heartbeat(self, member: MemberRecord, heartbeat: pb.Heartbeat, now_s: float) -> Outgoing:
        if heartbeat.bare:
            return []
        member.statistics = heartbeat.statistics
        self._stalls.report(member.id, heartbeat.waiting)
        if not all(pace.rank in member.ranks for pace in heartbeat.ranks):
            raise ProtocolError("it says how ranks keep up that are not its own")
        self._pace.report(member.id, heartbeat.ranks, heartbeat.servers)
        out: Outgoing = []
        for sentence in self._slow_sentences(self._pace.due(self._slow(), now_s)):
            slow = pb.SchedulerMessage(slow=pb.Slow(message=sentence))
            out += to_each(self._roster.workers(), slow)
        if not heartbeat.waiting or self.state != RUNNING:
            return out
        due = self._stalls.due(self._current_stalls(), now_s)
        for sentence, missing in stalls.told(due, self._who):
            stalled = pb.Stalled(message=sentence, missing=missing)
            out += to_each(self._roster.present(), pb.SchedulerMessage(stalled=stalled))
        return out

    def _declare(self, member: MemberRecord, declare: pb.Declare) -> Outgoing:
        if self.state != RUNNING:
            return self._too_early(member, "declare")
        verdicts: list[pb.Verdict] = []
        out: Outgoing = []
        others = [m for m in self._roster.workers() if m is not member]
        for ballot in declare.ballots:
            match self._declarations.cast(member.facts.machine_index, self._ranks_of(member), ballot):
                case Decided(verdict):
                    verdicts.append(verdict)
                case Reopened(reopen):
                    out += to_each(others, pb.SchedulerMessage(reopen=reopen))
        if verdicts:
            batch = pb.SchedulerMessage(verdicts=pb.Verdicts(verdicts=verdicts))
            out += to_each(self._roster.workers(), batch)
        return out

    def _arrive(self, member: MemberRecord, sequence: int) -> Outgoing:
        if self.state != RUNNING:
            return self._too_early(member, "arrive")
        self._ranks_of(member)
        is_last = self._barriers.arrive(member.facts.machine_index, sequence)
        return self._release([sequence] if is_last else [])

    def _release(self, sequences: list[int]) -> Outgoing:
        out: Outgoing = []
        for sequence in sequences:
            out += to_each(self._roster.workers(), pb.SchedulerMessage(release=pb.Release(sequence=sequence)))
        return out

    def _join(self, member: MemberRecord, join: pb.Join) -> Outgoing:
        if self.state != RUNNING:
            return self._too_early(member, "join")
        ranks = self._ranks_of(member)
        is_new = self._joining.join(ranks, join.rank)
        out = to_each(self._roster.workers(), pb.SchedulerMessage(joined=join))
        if is_new and (verdicts := self._declarations.join(join.rank)):
            batch = pb.SchedulerMessage(verdicts=pb.Verdicts(verdicts=verdicts))
            out += to_each(self._roster.workers(), batch)
        if self._joining.ranks.issuperset(ranks):
            out += self._release(self._barriers.excuse(member.facts.machine_index))
        return out

    def _idle(self, member: MemberRecord, idle: pb.Idle) -> Outgoing:
        if self.state != RUNNING:
            return self._too_early(member, "idle")
        over = self._joining.idle(member.facts.machine_index, self._ranks_of(member), idle.direct_round)
        if over is None:
            return []
        self._declarations.start_anew()
        self._barriers.expect_all()
        return to_each(self._roster.workers(), pb.SchedulerMessage(all_joined=over))

    def _leave(self, member: MemberRecord, reason: str, now_s: float) -> Outgoing:
        self._roster.remove(member, Presence.LEFT)
        self._stalls.report(member.id, [])
        if self.state == FORMING:
            self._survey = None
            self.reason = f"{self._roster.missing()} ({member.describe()} came and left: {reason or 'no reason given'})"
            if not self._roster.present():
                self._first_registration_s = None
            return []
        text = f"{member.describe()} has shut down" + (f": {reason}" if reason else "")
        workers = self._roster.workers()
        if self.state != RUNNING:
            return self._dismiss_servers() if member.is_worker else []
        if not workers:
            self.state, self.reason, self._over_s = ENDED, "all workers have left", now_s
            self._all_left = True
            return self._dismiss_servers()
        if not member.is_worker:
            return self._reassign(text, now_s)
        # Orderly: they raise it only if they still want something, so that at a normal end nobody sees it.
        self.reason = text
        self._farewell.gone(member.ranks)
        return to_each(workers, failure("PeerLostError", text, member.ranks)) + self._dismiss_workers()

    def _gone(self, member: MemberRecord, gone: pb.Gone) -> Outgoing:
        """Its ranks have ended and won't come back. To others that is no different from a worker that left."""
        if self.state != RUNNING:
            return self._too_early(member, "gone")
        if not gone.ranks or not set(gone.ranks) <= set(self._ranks_of(member)):
            raise ProtocolError(f"it says that {ranks_text(gone.ranks)} have shut down, which are not all its own")
        if set(gone.ranks) == set(member.ranks):
            count = len(gone.ranks)
            text = f"{member.describe()} has shut down: its {'rank has' if count == 1 else 'ranks have'} ended"
        else:
            text = f"{ranks_text(gone.ranks)} of {member.describe()} has shut down"
        others = [m for m in self._roster.workers() if m is not member]
        self._farewell.gone(gone.ranks)
        return to_each(others, failure("PeerLostError", text, gone.ranks)) + self._dismiss_workers()

    def _settled(self, member: MemberRecord, settled: pb.Gone) -> Outgoing:
        self._ranks_of(member)
        self._farewell.settled(member, settled.ranks)
        return self._dismiss_workers()

    def _dismiss_workers(self) -> Outgoing:
        """Those whose ranks have shut down, once no other machine needs what they have kept."""
        return to_each(self._farewell.free(self._roster.workers()), pb.SchedulerMessage(dismissed=pb.Dismissed()))

    def _sight(self, member: MemberRecord, sight: pb.Sight) -> Outgoing:
        if sight.rank not in self._ranks_of(member):
            raise ProtocolError(f"it says what rank {sight.rank} is doing, which is not its own")
        return to_each(self._roster.workers(), pb.SchedulerMessage(sight=sight))

    def _report(self, member: MemberRecord, report: pb.Report, now_s: float) -> Outgoing:
        error = report.error if report.error in BY_NAME else "CommunicationError"
        # A traceback may follow the sentence.
        first, *rest = report.message.split("\n", 1)
        text = "\n".join([f"{first} (reported by {member.describe()})", *rest])
        return self._fail(error, text, now_s, silent_for=member)

    # ---- helpers -----------------------------------------------------------------------------------------------

    def _too_early(self, member: MemberRecord, what: str) -> Outgoing:
        """Before the membership, ranks have no numbers to vote with; after the end, nobody needs the answer."""
        if self.state == FORMING:
            raise ProtocolError(f"sent {what} before the cluster was complete")
        return []

    def _ranks_of(self, member: MemberRecord) -> range:
        if not member.is_worker:
            raise ProtocolError("only communication services speak for ranks")
        return member.ranks

    def _lose(self, member: MemberRecord, why: str, now_s: float, tell_it_too: bool = False) -> Outgoing:
        self._roster.remove(member, Presence.LOST)
        self._stalls.report(member.id, [])
        if self.state not in (FORMING, RUNNING):
            return self._dismiss_servers() if member.is_worker else []
        text = f"lost {member.describe()}: {why}"
        if self.state == RUNNING and not member.is_worker:
            out = self._reassign(text, now_s)
            if tell_it_too:  # should it wake up
                sentence = f"this summation service was given up, and others sum what it did: {why}"
                out.append(refused(member.connection, "PeerLostError", sentence))
            return out
        out = self._fail("PeerLostError", text, now_s)
        if tell_it_too:
            out.append((member.connection, failure("PeerLostError", text)))
        return out

    def _reassign(self, why: str, now_s: float) -> Outgoing:
        """The summation services are others: let these have the keys."""
        try:
            membership = self._roster.reassign(why)
        except UsageError as error:
            return self._fail("PeerLostError", f"{why}; {error}", now_s)
        if membership is None:
            return []
        self._membership = membership
        self.reason = f"epoch {membership.epoch}, {count_text(len(membership.servers), 'summation service')}: {why}"
        return to_each(self._roster.present(), pb.SchedulerMessage(membership=membership))

    def _drain(self, member: MemberRecord, reason: str, now_s: float) -> Outgoing:
        if member.is_worker:
            raise ProtocolError("only a summation service can be drained")
        if self.state != RUNNING:
            return to_each([member], pb.SchedulerMessage(stop=pb.Stop(reason="it holds no keys")))
        if not any(m is not member for m in (*self._roster.cpu_servers(), *self._roster.gpu_servers())):
            return []  # the last one: better late than never
        member.is_draining = True
        out = self._reassign(f"{member.describe()} leaves: {reason or 'no reason given'}", now_s)
        return out + self._let_go()

    def _ready(self, member: MemberRecord, now_s: float) -> Outgoing:
        if not member.is_late:
            return []
        member.is_late = False
        return self._reassign(f"{member.describe()} has come", now_s)

    def scale(self, count: int, addresses: Iterable[str], now_s: float) -> Outgoing:
        """Drain these servers, and the last of all CPU machines' until at most ``count`` are left (-1: any number).

        Raises UsageError, and drains none, if an address is no server's, or the job does not run.
        """
        if self.state != RUNNING:
            raise UsageError(f"the job does not run: {self.reason}")
        servers = self._roster.cpu_servers()
        by_address = {member.facts.address.removeprefix("tcp://"): member for member in servers}
        if unknown := [address for address in addresses if address.removeprefix("tcp://") not in by_address]:
            known = ", ".join(by_address) or "there are none"
            raise UsageError(f"no CPU machine's server is at {', '.join(unknown)}; servers: {known}")
        chosen = [by_address[address.removeprefix("tcp://")] for address in addresses]
        rest = sorted((m for m in servers if m not in chosen), key=lambda m: m.id)
        chosen += rest[count:] if count >= 0 else []
        if len(chosen) == len(servers) and not self._roster.gpu_servers():
            raise UsageError("one summation service has to stay: GPU machines run none (BYTEPS_PLACEMENT=servers-only)")
        return [message for member in chosen for message in self._drain(member, "bps scale", now_s)]

    def _applied(self, member: MemberRecord, applied: pb.Applied) -> Outgoing:
        self._ranks_of(member)
        member.epoch = max(member.epoch, applied.epoch)
        return self._let_go() if self.state == RUNNING else []

    def _let_go(self) -> Outgoing:
        """Drained services may end once no machine needs them: all have gone over to an epoch without them."""
        if any(worker.epoch < self._roster.epoch for worker in self._roster.workers()):
            return []
        drained = [member for member in self._roster.present() if member.is_draining and not member.holds_keys]
        return to_each(drained, pb.SchedulerMessage(stop=pb.Stop(reason="its keys have moved")))

    def _unreachable(self, member: MemberRecord, unreachable: pb.Unreachable, now_s: float) -> Outgoing:
        self._ranks_of(member)
        servers = (m for m in self._roster.present() if not m.is_worker and m.id == unreachable.member_id)
        server = next(servers, None)
        if self.state != RUNNING or server is None:
            return []
        why = f"{member.describe()} can't reach it: {unreachable.reason}"
        return self._lose(server, why, now_s, tell_it_too=True)

    def _fail(self, error: str, text: str, now_s: float, silent_for: MemberRecord | None = None) -> Outgoing:
        if self._over_s is not None:
            return []  # the first failure explains the later ones
        self.state, self.reason, self._over_s = FAILED, text, now_s
        told = [m for m in self._roster.present() if m is not silent_for]
        return to_each(told, failure(error, text)) + self._dismiss_servers()

    def _dismiss_servers(self) -> Outgoing:
        """Servers of a job that is over stay as long as a worker does, and no longer."""
        if self._roster.workers():
            return []
        return to_each(self._roster.present(), pb.SchedulerMessage(stop=pb.Stop(reason=self.reason)))

    def _current_stalls(self) -> list[stalls.Stall]:
        size = sum(len(m.ranks) for m in self._roster.everyone)
        return self._stalls.stalls(size, self._declarations.undecided_voters, self._joining.ranks)

    def _slow(self) -> list[Slow]:
        return self._pace.slow([m.id for m in self._roster.present()]) if self.state == RUNNING else []

    def _slow_sentences(self, slow: list[Slow]) -> list[str]:
        if not slow:
            return []
        everyone = self._roster.everyone
        size = sum(len(m.ranks) for m in everyone)
        return slow_sentences(slow, self._who, {m.id: m.describe() for m in everyone if not m.is_worker}, size)

    def _who(self, ranks: Iterable[int]) -> str:
        wanted = set(ranks)
        return "; ".join(m.describe() for m in self._roster.everyone if wanted.intersection(m.ranks))
