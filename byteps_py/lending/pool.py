"""Which lender serves which job: the decisions of a pool. Pure: requests and the time come in, answers go out.

Decisions stand: a server moves only if its lender is busy, silent or refuses the job, or if the job has ended or
wants fewer. The job with the fewest servers, of those that want more, gets the next free server, from the lender that
has the most room. One thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from byteps_py.errors import UsageError
from byteps_py.wording import count_text

#: A lender or job that is silent for so long is forgotten. Requests come every second.
LEASE_S = 10.0
#: Variables that a server must have as the other members of its job have them.
SHARED = (
    "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "BYTEPS_JOB_ID", "BYTEPS_PARTITION_BYTES", "BYTEPS_ELASTIC",
    "BYTEPS_PLACEMENT", "PS_HEARTBEAT_INTERVAL", "PS_HEARTBEAT_TIMEOUT", "BYTEPS_HEARTBEAT_TIMEOUT_MAX_S",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job that runs, and how many servers it would like. ``scheduler``: HOST:PORT, which names it. With ``workers``
    GPU machines, no more servers than that are of use. ``tensor_bytes``: of all its tensors. ``variables``: those of
    SHARED that all its members have."""

    scheduler: str
    workers: int
    servers: int
    tensor_bytes: int = 0
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def wanted(self) -> int:
        """The number of servers that are of use."""
        return max(0, min(self.servers, self.workers)) if self.workers > 1 else 0


@dataclass(frozen=True, slots=True)
class LendingOffer:
    """A lender as it is now. ``slots``: how many jobs it can serve; 0 while its owner needs the machine. ``refused``:
    schedulers of jobs that it can't serve, and why."""

    name: str
    slots: int
    refused: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BorrowAnswer:
    """To a job. ``lenders``: the names of those that serve it; ``reason``: why it has not more, or that it has all."""

    lenders: tuple[str, ...]
    reason: str


class LendingPool:
    """Jobs, lenders, and who serves whom."""

    def __init__(self) -> None:
        self._jobs: dict[str, tuple[JobRequest, float]] = {}  # by scheduler; until when they count
        self._offers: dict[str, tuple[LendingOffer, float]] = {}  # by name; the same
        self._serving: dict[str, list[str]] = {}  # by lender: schedulers
        self._scaled: dict[str, int] = {}  # by scheduler: the number of servers that `bps scale` has set

    def lend(self, offer: LendingOffer, now_s: float) -> tuple[JobRequest, ...]:
        """A lender says how it is. Returns the jobs that it is to serve."""
        self._offers[offer.name] = offer, now_s + LEASE_S
        self._assign(now_s)
        return tuple(self._jobs[scheduler][0] for scheduler in self._serving[offer.name])

    def leave(self, name: str, now_s: float) -> None:
        """A lender will lend no more."""
        self._offers.pop(name, None)
        self._assign(now_s)

    def borrow(self, job: JobRequest, now_s: float) -> BorrowAnswer:
        """A job says what it would like."""
        job = replace(job, servers=self._scaled.get(job.scheduler, job.servers))
        self._jobs[job.scheduler] = job, now_s + LEASE_S
        self._assign(now_s)
        lenders = self._lenders_of(job.scheduler)
        return BorrowAnswer(lenders, self._reason(job, lenders))

    def scale(self, scheduler: str, servers: int, now_s: float) -> BorrowAnswer:
        """From now on the job would like so many servers. Raises UsageError if it does not use this pool."""
        if scheduler not in self._jobs:
            known = ", ".join(sorted(self._jobs)) or "none"
            raise UsageError(f"no job at {scheduler} asks this pool for servers (it knows {known}): bpslaunch --pool")
        self._scaled[scheduler] = servers
        return self.borrow(self._jobs[scheduler][0], now_s)

    def end(self, scheduler: str, now_s: float) -> None:
        """A job needs no servers any more."""
        self._jobs.pop(scheduler, None)
        self._scaled.pop(scheduler, None)
        self._assign(now_s)

    def status(self, now_s: float) -> dict[str, object]:
        """Lenders and jobs as plain values."""
        self._assign(now_s)
        return {
            "lenders": [
                {"name": name, "slots": offer.slots, "serves": list(self._serving[name]), "refuses": offer.refused}
                for name, (offer, _) in sorted(self._offers.items())
            ],
            "jobs": [
                {
                    "scheduler": scheduler,
                    "wants": job.wanted,
                    "lenders": list(self._lenders_of(scheduler)),
                    "reason": self._reason(job, self._lenders_of(scheduler)),
                }
                for scheduler, (job, _) in sorted(self._jobs.items())
            ],
        }

    # ---- decisions -------------------------------------------------------------------------------------------

    def _assign(self, now_s: float) -> None:
        self._jobs = {name: entry for name, entry in self._jobs.items() if entry[1] > now_s}
        self._offers = {name: entry for name, entry in self._offers.items() if entry[1] > now_s}
        self._serving = {name: self._kept(name) for name in self._offers}
        while (pair := self._next()) is not None:
            lender, scheduler = pair
            self._serving[lender].append(scheduler)

    def _kept(self, name: str) -> list[str]:
        """The jobs that this lender goes on serving: as many as it has slots, the oldest first."""
        offer, _ = self._offers[name]
        kept = [each for each in self._serving.get(name, ()) if each in self._jobs and each not in offer.refused]
        stays = []
        for scheduler in kept:
            others = sum(scheduler in served for lender, served in self._serving.items() if lender < name)
            if others < self._jobs[scheduler][0].wanted:
                stays.append(scheduler)
        return stays[: offer.slots]

    def _next(self) -> tuple[str, str] | None:
        """A lender, and the job to which its next free slot goes. None: nothing more can be given."""
        lacking = [
            (len(self._lenders_of(scheduler)), scheduler)
            for scheduler, (job, _) in self._jobs.items()
            if len(self._lenders_of(scheduler)) < job.wanted
        ]
        for _, scheduler in sorted(lacking):
            free = [
                (len(self._serving[name]) - offer.slots, name)
                for name, (offer, _) in self._offers.items()
                if len(self._serving[name]) < offer.slots
                and scheduler not in self._serving[name]
                and scheduler not in offer.refused
            ]
            if free:
                return min(free)[1], scheduler
        return None

    def _lenders_of(self, scheduler: str) -> tuple[str, ...]:
        return tuple(sorted(name for name, served in self._serving.items() if scheduler in served))

    def _reason(self, job: JobRequest, lenders: tuple[str, ...]) -> str:
        if job.workers < 2:
            return "a job of one GPU machine sends nothing, and needs no servers"
        if len(lenders) >= job.wanted:
            if job.servers > job.workers:
                return (
                    f"it has {count_text(len(lenders), 'server')}: more would hold nothing, with as many GPU machines"
                )
            return "it has all that it wants"
        refused = [
            f"{name} refuses it: {offer.refused[job.scheduler]}"
            for name, (offer, _) in sorted(self._offers.items())
            if job.scheduler in offer.refused
        ]
        busy = sum(not offer.slots for offer, _ in self._offers.values())
        text = f"of {count_text(len(self._offers), 'lender')}, {busy} lend nothing now, and no other has a slot for it"
        return "; ".join([text, *refused])
