"""Forms the membership of a job and changes it: links are measured, the first epoch opens, services come and go.

Pure: time is an argument. How the ranks of an elastic job form groups: elastic.py.

Links are measured in turns. In a turn, a communication service sends to one summation service of another machine, which
sends everything back; no machine is in two such pairs at once. A pair reaches the rate of the slower of its two links,
so a machine's rate is the best that any of its pairs has reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from byteps_py.config.tuning import LOOPBACK_MBIT
from byteps_py.errors import UsageError
from byteps_py.placement.link_optimum import classes
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.elastic import Elastic, GroupState
from byteps_py.scheduler.job import FORMING, Job, MessageHandler, Outgoing, ranks_of, to_each
from byteps_py.scheduler.roster import MemberRecord
from byteps_py.wording import count_text

#: (index of the GPU machine that sends, position of the other: CPU machines 0..k−1, then GPU machines k..k+n−1)
Pair = tuple[int, int]

TURNS = 4
#: A turn lasts a fraction of a second. Reports that are missing after this time are not waited for.
TURN_LIMIT_S = 5.0


def pairs_of(turn: int, n: int, k: int, gpu_machines_sum: bool) -> list[Pair]:
    """The pairs of one turn; each turn has other pairs, as far as possible. In every second turn GPU machines pair up
    with each other: a single slow CPU machine must not be their only partner.

    >>> [pairs_of(turn, 4, 2, True) for turn in range(3)]
    [[(0, 0), (1, 1), (2, 5)], [(0, 3), (2, 5)], [(1, 0), (2, 1), (0, 5)]]
    """
    count = 0 if gpu_machines_sum and turn % 2 else min(n, k)
    shift = turn // 2 if gpu_machines_sum else turn
    pairs = [((shift + place) % n, (shift * count + place) % k) for place in range(count)]
    busy = {worker for worker, _ in pairs}
    free = [worker for worker in range(n) if worker not in busy]
    if gpu_machines_sum:
        pairs += [(one, k + other) for one, other in _tournament(free, turn)]
    return pairs


def _tournament(players: Sequence[int], turn: int) -> list[tuple[int, int]]:
    """One round of a round-robin tournament: the first player keeps its place, the others move on by one."""
    rest: list[int | None] = [*players[1:]]
    if len(players) % 2:
        rest.append(None)  # its partner has no pair in this turn
    ring = [*players[:1], *rest[turn % len(rest) :], *rest[: turn % len(rest)]] if rest else []
    met = [(ring[place], ring[-1 - place]) for place in range(len(ring) // 2)]
    return [(one, other) for one, other in met if one is not None and other is not None]


class Survey:
    """The measurement of all links of ``n`` GPU and ``k`` CPU machines. ``rates``: Mbit/s, CPU machines first; 0: not
    known."""

    def __init__(self, n: int, k: int, gpu_machines_sum: bool) -> None:
        self._n, self._k, self._gpu_machines_sum = n, k, gpu_machines_sum
        self._turns = TURNS * max(1, -(-k // n))
        self._waiting: dict[int, Pair] = {}  # by the GPU machine that reports
        self._turn_began_s = 0.0
        self.turn = -1
        self.rates = [0.0] * (k + n)

    @property
    def is_over(self) -> bool:
        """True once all turns are over."""
        return self.turn >= self._turns

    @property
    def sentence(self) -> str:
        """The progress, as a reason for the status."""
        return f"all members have registered: measuring their links, turn {self.turn + 1} of {self._turns}"

    def next_turn(self, now_s: float) -> Sequence[Pair]:
        """Begin the next turn, if there is one. Returns its pairs."""
        self.turn += 1
        self._turn_began_s = now_s
        pairs = [] if self.is_over else pairs_of(self.turn, self._n, self._k, self._gpu_machines_sum)
        self._waiting = {pair[0]: pair for pair in pairs}
        return pairs

    def measured(self, worker: int, turn: int, mbit: float) -> None:
        """GPU machine ``worker`` reports (0: its partner did not answer)."""
        if turn != self.turn or worker not in self._waiting:
            return  # it came too late
        _, partner = self._waiting.pop(worker)
        for machine in (self._k + worker, partner):
            self.rates[machine] = max(self.rates[machine], mbit)

    def is_turn_over(self, now_s: float) -> bool:
        """True once all pairs have reported, or have had the time to."""
        return not self._waiting or now_s - self._turn_began_s >= TURN_LIMIT_S

    def final_rates(self, configured: Sequence[float]) -> list[float]:
        """The rates in Mbit/s to use: as configured; else as measured, with rates that hardly differ made equal; else,
        for machines whose partners did not answer, the fastest known."""
        measured = [0.0 if given else rate for given, rate in zip(configured, self.rates, strict=True)]
        evened = iter(classes([rate for rate in measured if rate]))
        rates = [given or (next(evened) if rate else 0.0) for given, rate in zip(configured, measured, strict=True)]
        return [rate or max(rates) or LOOPBACK_MBIT for rate in rates]


_FEW, _TELL_S = 64, 0.5


class Forming:
    """The time from the first registration to the first epoch. ``rates``: Mbit/s of all links, CPU machines first; None
    until all members have registered and no link is left to be measured."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._roster = job.roster
        self._began_s: float | None = None
        self._survey: Survey | None = None  # while the links are being measured
        self.rates: list[float] | None = None
        self._told_s, self._is_untold = -_TELL_S, False

    def registered(self, now_s: float) -> Outgoing:
        """A process has registered."""
        if self._began_s is None:
            self._began_s = now_s
        if not self._roster.is_complete:
            self._tell(now_s)
            return []
        self._job.reason = ""
        rates, config = self._roster.link_rates(), self._job.config
        if config.num_workers == 1 or all(rates):
            self.rates = rates
            return []
        self._survey = Survey(config.num_workers, config.num_servers, config.needs_gpu_machine_servers)
        return self._advance(self._survey, now_s)

    def _tell(self, now_s: float) -> None:
        """Say who is missing. That takes a look at all members: not with each one, where there are very many."""
        self._is_untold = len(self._roster.present()) > _FEW and now_s - self._told_s < _TELL_S
        if not self._is_untold:
            self._job.reason, self._told_s = self._roster.missing(), now_s

    def left(self, member: MemberRecord, reason: str) -> None:
        """A member has left; its place is free again."""
        self._survey = None
        because = reason or "no reason given"
        self._job.reason = f"{self._roster.missing()} ({member.describe()} registered and left: {because})"
        if not self._roster.present():
            self._began_s = None

    def measured(self, member: MemberRecord, measured: pb.Measured, now_s: float) -> Outgoing:
        """A CS reports the rate that it has measured. Raises ProtocolError for another kind of member."""
        if self._survey is None:
            return []
        ranks_of(member)
        self._survey.measured(member.facts.machine_index, measured.turn, measured.mbit)
        return self._advance(self._survey, now_s)

    def on_deadlines(self, now_s: float) -> Outgoing:
        """Fail the job if the cluster is not complete in time; begin the next turn if one has lasted too long."""
        if self._job.state != FORMING or self._began_s is None:
            return []
        if self._survey is not None:
            return self._advance(self._survey, now_s)
        if self._is_untold:
            self._tell(now_s)
        limit_s = self._job.config.start_timeout_s
        if now_s - self._began_s < limit_s:
            return []
        text = f"the cluster is not complete after {limit_s:g} s (BYTEPS_START_TIMEOUT_S): {self._job.reason}"
        return self._job.fail("RendezvousError", text, now_s)

    def _advance(self, survey: Survey, now_s: float) -> Outgoing:
        """Begin the next turn once the one before is over; after the last one the job can start."""
        out: Outgoing = []
        workers, servers = self._roster.workers(), [*self._roster.cpu_servers(), *self._roster.gpu_servers()]
        while survey.is_turn_over(now_s):
            for worker, server in survey.next_turn(now_s):
                message = pb.Measure(turn=survey.turn, address=servers[server].facts.address)
                out.append((workers[worker].connection, pb.SchedulerMessage(measure=message)))
            if survey.is_over:
                self._survey, self.rates = None, survey.final_rates(self._roster.link_rates())
                return out
        self._job.reason = survey.sentence
        return out


#: The time that the job waits for a service: one that is started again needs seconds, many on a busy machine.
SUCCESSOR_S = 20.0


class SummationServices:
    """The summation services of a running job: they join, leave and die, and the others take over their keys.
    ``membership``: that of the latest epoch; ``none_since_s``: since then none is left, None if there is one.
    SchedulerCore calls a method for each step of a service's life.

        registers (late) ──ready──► holds keys ──drain──► holds none ──all machines have applied a later epoch──► exits
                                         └──dies──► the others take over its keys; the job waits for one if none is left
    """

    def __init__(self, job: Job, elastic: Elastic | None) -> None:
        self._job, self._elastic = job, elastic
        self._roster = job.roster
        self.none_since_s: float | None = None
        self._why_none = ""
        self.membership = pb.Membership()

    def opened(self, membership: pb.Membership) -> None:
        """An epoch is open, with these services."""
        self.membership, self.none_since_s = membership, None

    def reassign(self, why: str, now_s: float) -> Outgoing:
        """The services have changed: open an epoch in which the present ones share the keys."""
        if self._elastic is not None and self._elastic.state is GroupState.BROKEN:
            return []  # the next group begins with the services of that moment
        if not self._roster.has_services():
            return self.await_one(why, now_s)
        membership = self._roster.reassign(why)
        if membership is None:
            return []
        self.opened(membership)
        count = count_text(len(membership.servers), "summation service")
        self._job.reason = f"epoch {membership.epoch}, {count}: {why}"
        return to_each(self._roster.present(), pb.SchedulerMessage(membership=membership))

    def wait_anew(self, now_s: float) -> None:
        """A service that is waited for has all of its time from now on."""
        if self.none_since_s is not None:
            self.none_since_s = now_s

    def await_one(self, why: str, now_s: float) -> Outgoing:
        """The ranks need a service and none is left: wait for one that is started again, then fail."""
        if self.none_since_s is None:
            self.none_since_s, self._why_none = now_s, f"{why}; no summation service is left"
            self._job.reason = f"{self._why_none}: waiting up to {SUCCESSOR_S:g} s for one"
            slow = pb.SchedulerMessage(slow=pb.Slow(message=self._job.reason, unserved=True))
            return to_each(self._roster.workers(), slow)
        if now_s - self.none_since_s < SUCCESSOR_S:
            return []
        return self._job.fail("PeerLostError", f"{self._why_none}, and none registered within {SUCCESSOR_S:g} s", now_s)

    def on_deadlines(self, now_s: float) -> Outgoing:
        """Fail the job if no summation service has registered in time."""
        return [] if self.none_since_s is None else self.await_one(self._why_none, now_s)

    def ready(self, member: MemberRecord, now_s: float) -> Outgoing:
        """The member has started. A service that registered while the job runs can sum from now on."""
        member.is_ready = True
        if not member.is_late:
            return []
        self._roster.set_late(member, False)
        return self.reassign(f"{member.describe()} has joined", now_s)

    def drain(self, member: MemberRecord, reason: str, now_s: float) -> Outgoing:
        """A service is to leave, once its keys have moved. The last one stays: the ranks need it."""
        if not self._job.is_running:
            return to_each([member], pb.SchedulerMessage(stop=pb.Stop(reason="it holds no keys")))
        if not self._roster.has_services(without=member):
            return []
        self._roster.drain(member)
        out = self.reassign(f"{member.describe()} leaves: {reason or 'no reason given'}", now_s)
        return out + self.release_drained()

    def scale(self, count: int, addresses: Iterable[str], now_s: float) -> Outgoing:
        """Drain the servers at these addresses, and then the latest of all CPU machines until at most ``count`` are
        left (-1: any number).

        Raises UsageError, and drains none, if no server has one of the addresses, if no server would be left, or if the
        job does not run.
        """
        if not self._job.is_running:
            raise UsageError(f"the job is not running: {self._job.reason}")
        servers = self._roster.cpu_servers()
        by_address = {member.facts.address.removeprefix("tcp://"): member for member in servers}
        if unknown := [address for address in addresses if address.removeprefix("tcp://") not in by_address]:
            known = ", ".join(by_address) or "none"
            raise UsageError(f"no server of a CPU machine has the address {', '.join(unknown)}; servers: {known}")
        chosen = [by_address[address.removeprefix("tcp://")] for address in addresses]
        rest = sorted((m for m in servers if m not in chosen), key=lambda m: m.id)
        chosen += rest[count:] if count >= 0 else []
        if len(chosen) == len(servers) and len(self._roster.workers()) > 1 and not self._roster.gpu_servers():
            raise UsageError("one summation service must stay: GPU machines run none (BYTEPS_PLACEMENT=servers-only)")
        return [message for member in chosen for message in self.drain(member, "bps scale", now_s)]

    def message_handlers(self) -> Mapping[str, MessageHandler]:
        """The handlers, by kind, of messages that a communication service sends of its servers."""
        return {"applied": self._applied}

    def _applied(self, member: MemberRecord, applied: pb.Applied, now_s: float) -> Outgoing:
        """A machine has applied the placement of an epoch."""
        ranks_of(member)
        member.epoch = max(member.epoch, applied.epoch)
        return self.release_drained() if self._job.is_running else []

    def release_drained(self) -> Outgoing:
        """Let drained services exit, once all machines have applied an epoch without them."""
        if any(worker.epoch < self._roster.epoch for worker in self._roster.workers()):
            return []
        servers = (member for member in self._roster.present() if not member.is_worker)
        drained = [server for server in servers if server.is_draining and not server.holds_keys]
        return to_each(drained, pb.SchedulerMessage(stop=pb.Stop(reason="its keys have moved")))

    def accused(self, member: MemberRecord, unreachable: pb.Unreachable) -> tuple[MemberRecord | None, Outgoing]:
        """A machine can't reach a service. Returns the service if that is sure and the service is a member; else the
        question for the machine, which may be cut off itself."""
        ranks_of(member)
        servers = (m for m in self._roster.present() if not m.is_worker and m.id == unreachable.member_id)
        server = next(servers, None) if self._job.is_running else None
        if server is None or unreachable.is_sure:
            return server, []
        return None, to_each([member], pb.SchedulerMessage(still=pb.Still(member_id=server.id)))
