"""From the first registration to the first epoch: which members are missing, and how fast the links are.

Pure: time is an argument.

Links are measured in turns. In a turn, a communication service sends to one summation service of another machine, which
sends everything back; no machine is in two such pairs at once. A pair reaches the rate of the slower of its two links,
so a machine's rate is the best that any of its pairs has reached.
"""

from __future__ import annotations

from collections.abc import Sequence

from byteps_py.placement.link_optimum import classes
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.job import FORMING, Job, Outgoing, ranks_of
from byteps_py.scheduler.roster import MemberRecord
from byteps_py.tuning import LOOPBACK_MBIT

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

    def settle(self, configured: Sequence[float]) -> list[float]:
        """The rates in Mbit/s to use: as configured; else as measured, with rates that hardly differ made equal; else,
        for machines whose partners did not answer, the fastest known."""
        measured = [0.0 if given else rate for given, rate in zip(configured, self.rates, strict=True)]
        evened = iter(classes([rate for rate in measured if rate]))
        rates = [given or (next(evened) if rate else 0.0) for given, rate in zip(configured, measured, strict=True)]
        return [rate or max(rates) or LOOPBACK_MBIT for rate in rates]


class Forming:
    """``rates``: Mbit/s of all links, CPU machines first; None until all members have registered and no link is left to
    be measured."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._roster = job.roster
        self._began_s: float | None = None
        self._survey: Survey | None = None  # while the links are being measured
        self.rates: list[float] | None = None

    def registered(self, now_s: float) -> Outgoing:
        """A process has registered."""
        if self._began_s is None:
            self._began_s = now_s
        self._job.reason = self._roster.missing()
        if self._job.reason:
            return []
        rates, config = self._roster.link_rates(), self._job.config
        if config.num_workers == 1 or all(rates):
            self.rates = rates
            return []
        self._survey = Survey(config.num_workers, config.num_servers, config.needs_gpu_machine_servers)
        return self._go_on(self._survey, now_s)

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
        return self._go_on(self._survey, now_s)

    def on_deadlines(self, now_s: float) -> Outgoing:
        """Fail the job if the cluster is not complete in time; begin the next turn if one has lasted too long."""
        if self._job.state != FORMING or self._began_s is None:
            return []
        if self._survey is not None:
            return self._go_on(self._survey, now_s)
        limit_s = self._job.config.start_timeout_s
        if now_s - self._began_s < limit_s:
            return []
        text = f"the cluster is not complete after {limit_s:g} s (BYTEPS_START_TIMEOUT_S): {self._job.reason}"
        return self._job.fail("RendezvousError", text, now_s)

    def _go_on(self, survey: Survey, now_s: float) -> Outgoing:
        """Begin the next turn once the one before is over; after the last one the job can start."""
        out: Outgoing = []
        workers, servers = self._roster.workers(), [*self._roster.cpu_servers(), *self._roster.gpu_servers()]
        while survey.is_turn_over(now_s):
            for worker, server in survey.next_turn(now_s):
                message = pb.Measure(turn=survey.turn, address=servers[server].facts.address)
                out.append((workers[worker].connection, pb.SchedulerMessage(measure=message)))
            if survey.is_over:
                self._survey, self.rates = None, survey.settle(self._roster.link_rates())
                return out
        self._job.reason = survey.sentence
        return out
