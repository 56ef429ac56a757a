"""From the first registration until the first epoch can be opened: who is missing, how fast the links are. Pure."""

from __future__ import annotations

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.job import FORMING, Job, ranks_of
from byteps_py.scheduler.member import MemberRecord
from byteps_py.scheduler.outgoing import Outgoing
from byteps_py.scheduler.survey import Survey


class Forming:
    """``rates``: Mbit/s of all links, CPU machines first, once all are there and nothing is left to be measured."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._roster = job.roster
        self._began_s: float | None = None
        self._survey: Survey | None = None  # all are there, and their links are being measured
        self.rates: list[float] | None = None

    def came(self, now_s: float) -> Outgoing:
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
        """Its place is free again."""
        self._survey = None
        because = reason or "no reason given"
        self._job.reason = f"{self._roster.missing()} ({member.describe()} came and left: {because})"
        if not self._roster.present():
            self._began_s = None

    def measured(self, member: MemberRecord, measured: pb.Measured, now_s: float) -> Outgoing:
        if self._survey is None:
            return []
        ranks_of(member)
        self._survey.measured(member.facts.machine_index, measured.turn, measured.mbit)
        return self._go_on(self._survey, now_s)

    def on_deadlines(self, now_s: float) -> Outgoing:
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
