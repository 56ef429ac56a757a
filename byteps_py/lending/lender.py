"""When a lender starts, drains and ends servers: the decisions on its machine. Pure: what has happened and the time
come in, actions go out. One thread.

    the owner's load     BUSY_AFTER_S above the limit: busy, all servers drain.  FREE_AFTER_S below it: free again
    a server             start ──► serves ──drain──► drains ──its process has ended──► gone
                           └─ its process ends by itself: the job is refused for RETRY_S
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from byteps_py.lending.pool import JobRequest, LendingOffer
from byteps_py.wording import count_text

#: A short rise of the owner's load is no reason to go, and a short pause none to come back.
BUSY_AFTER_S, FREE_AFTER_S = 3.0, 15.0
#: A job whose server has ended by itself has ended, or can't be served from here.
RETRY_S = 30.0


#: A server without tensors; of its part of the tensors, it keeps contributions and results.
_IDLE_BYTES, _COPIES = 300_000_000, 2


@dataclass(frozen=True, slots=True)
class Limits:
    """The resources that a machine lends. Each of ``slots`` jobs gets an equal part of cores, bytes and Mbit/s."""

    name: str
    slots: int
    cores: int
    memory_bytes: int
    mbit: float

    def describe(self) -> str:
        """The limits in words."""
        return (
            f"{count_text(self.cores, 'core')}, {self.memory_bytes / 1e9:g} GB and {self.mbit:g} Mbit/s of {self.name} "
            f"to {count_text(self.slots, 'job')} at a time"
        )

    def refusal(self, job: JobRequest) -> str:
        """Why the job can't be served within the limits; empty if it can.

        A server's share of the tensors is largest if it is the only one on a CPU machine (shares.py).
        """
        share = 2 / (job.workers + 2)
        needed = _IDLE_BYTES + _COPIES * share * job.tensor_bytes
        least = self.memory_bytes / self.slots
        if needed <= least:
            return ""
        return f"a server needs up to {needed / 1e9:.1f} GB for it, and {self.name} lends {least / 1e9:.1f} GB to a job"


@dataclass(frozen=True, slots=True)
class Told:
    """The pool says which jobs to serve."""

    jobs: Sequence[JobRequest]


@dataclass(frozen=True, slots=True)
class OwnerLoad:
    """``is_high``: the owner needs the machine."""

    is_high: bool
    text: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The machine can't serve a job, and why."""

    scheduler: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The server of a job has ended. ``status``: its exit status."""

    scheduler: str
    status: int


@dataclass(frozen=True, slots=True)
class StopLending:
    """The lender itself is to end."""


@dataclass(frozen=True, slots=True)
class StartServer:
    """Start a server for a job."""

    job: JobRequest


@dataclass(frozen=True, slots=True)
class DrainServer:
    """Let the server of a job leave it: its partitions move first."""

    scheduler: str


@dataclass(frozen=True, slots=True)
class Log:
    """Tell the owner."""

    text: str


@dataclass(frozen=True, slots=True)
class Exit:
    """All servers have ended: end this process."""


Event = Told | OwnerLoad | Refused | Ended | StopLending
Action = StartServer | DrainServer | Log | Exit


class LenderPolicy:
    """The servers of one machine, and whether its owner needs it."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._name, self._slots = limits, limits.name, limits.slots
        self._servers: dict[str, bool] = {}  # by scheduler: it drains
        self._refused: dict[str, tuple[str, float]] = {}  # by scheduler: why, and until when
        self._is_busy = self._is_leaving = False
        self._changed_s: float | None = None  # since when the load says something else than ``_is_busy``

    def offer(self, now_s: float) -> LendingOffer:
        """The report to the pool."""
        self._refused = {name: entry for name, entry in self._refused.items() if entry[1] > now_s}
        slots = 0 if self._is_busy or self._is_leaving else self._slots
        return LendingOffer(self._name, slots, {name: reason for name, (reason, _) in self._refused.items()})

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Return the actions that ``event`` requires."""
        match event:
            case Told(jobs):
                return self._told(jobs, now_s)
            case OwnerLoad(is_high, text):
                return self._loaded(is_high, text, now_s)
            case Refused(scheduler, reason):
                self._servers.pop(scheduler, None)
                self._refused[scheduler] = reason, now_s + RETRY_S
                return [Log(f"the job at {scheduler} is not served: {reason}")]
            case Ended(scheduler, status):
                return self._ended(scheduler, status, now_s)
            case StopLending():
                self._is_leaving = True
                return [Log("lending ends"), *self._drain_all(), *self._exit_if_empty()]

    def _told(self, jobs: Sequence[JobRequest], now_s: float) -> list[Action]:
        if self._is_busy or self._is_leaving:
            return []
        wanted = {job.scheduler for job in jobs}
        actions: list[Action] = []
        for scheduler, drains in self._servers.items():
            if scheduler not in wanted and not drains:
                self._servers[scheduler] = True
                actions += [Log(f"the job at {scheduler} needs this machine no more"), DrainServer(scheduler)]
        for job in jobs:
            # A server that drains still has a slot's cores.
            if job.scheduler in self._servers or job.scheduler in self._refused:
                continue
            if refusal := self._limits.refusal(job):
                actions += self.handle(Refused(job.scheduler, refusal), now_s)
            elif len(self._servers) < self._slots:
                self._servers[job.scheduler] = False
                actions += [Log(f"serving the job at {job.scheduler}"), StartServer(job)]
        return actions

    def _loaded(self, is_high: bool, text: str, now_s: float) -> list[Action]:
        if is_high == self._is_busy:
            self._changed_s = None
            return []
        if self._changed_s is None:
            self._changed_s = now_s
        if now_s - self._changed_s < (BUSY_AFTER_S if is_high else FREE_AFTER_S):
            return []
        self._is_busy, self._changed_s = is_high, None
        if not is_high:
            return [Log(f"this machine is free again: {text}")]
        return [Log(f"the owner needs this machine: {text}"), *self._drain_all()]

    def _ended(self, scheduler: str, status: int, now_s: float) -> list[Action]:
        drained = self._servers.pop(scheduler, True)
        actions: list[Action] = [Log(f"the server of the job at {scheduler} has ended with status {status}")]
        if not drained:
            self._refused[scheduler] = f"its server here has ended with status {status}", now_s + RETRY_S
        return actions + self._exit_if_empty()

    def _drain_all(self) -> list[Action]:
        draining: list[Action] = [DrainServer(scheduler) for scheduler, drains in self._servers.items() if not drains]
        self._servers = dict.fromkeys(self._servers, True)
        return draining

    def _exit_if_empty(self) -> list[Action]:
        return [Exit()] if self._is_leaving and not self._servers else []
