"""One member of the cluster, from its registration to its end, and how sentences name it. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from byteps_py.failure_detector import FailureDetector
from byteps_py.proto import control_pb2 as pb
from byteps_py.wording import ranks_text


def describe(facts: pb.Register, ranks: range = range(0)) -> str:
    """Who registers, or has registered, in words."""
    place = f"host {facts.host or '?'}, pid {facts.pid}"
    if facts.role == pb.ROLE_COMMUNICATION:
        return f"worker {facts.machine_index} ({f'{ranks_text(ranks)}, ' if ranks else ''}{place})"
    if facts.kind == pb.MACHINE_KIND_GPU:
        return f"the summation service of GPU machine {facts.machine_index} ({place}, {facts.address})"
    return f"server {facts.address} ({place})"


class Presence(enum.Enum):
    """Where a member's life stands. PRESENT is left once, for LEFT or for LOST, and never entered again."""

    PRESENT = "present"
    LEFT = "left"  # it said so
    LOST = "lost"  # its stream ended without a word, or it was silent for too long, or it broke the protocol


@dataclass(slots=True, eq=False)
class MemberRecord:
    id: int
    connection: int
    facts: pb.Register
    last_seen_s: float
    first_rank: int = -1  # CS: set when the cluster is complete
    weight: int = 0  # SS: its part of the keys; set when the cluster is complete
    link_mbit: float = 0.0  # of its machine's link; set when the cluster is complete
    presence: Presence = Presence.PRESENT
    is_draining: bool = False  # it is to go: an SS gets no keys, a CS of an elastic job is in no further group
    is_ready: bool = False  # its kernels are loaded and, of a CS, all its ranks have come
    is_late: bool = False  # SS: it came while the job ran, and is not ready for keys yet
    epoch: int = 0  # CS: the one to whose placement it has gone over
    detector: FailureDetector | None = None  # of its heartbeats; see silence.py
    statistics: pb.Statistics = field(default_factory=pb.Statistics)
    home: tuple[str, int] = ("", -1)  # what the processes of one GPU machine have in common, as they registered

    def __post_init__(self) -> None:
        facts, self.facts = self.facts, pb.Register()
        self.facts.CopyFrom(facts)  # elastic jobs number machines anew
        self.home = (facts.machine_id, facts.machine_index)

    @property
    def is_present(self) -> bool:
        return self.presence is Presence.PRESENT

    @property
    def is_worker(self) -> bool:
        """True for a communication service."""
        return self.facts.role == pb.ROLE_COMMUNICATION

    @property
    def can_hold_keys(self) -> bool:
        return not (self.is_worker or self.is_draining or self.is_late)

    @property
    def is_cpu_server(self) -> bool:
        return not self.is_worker and self.facts.kind == pb.MACHINE_KIND_CPU

    @property
    def is_gpu_server(self) -> bool:
        return not self.is_worker and self.facts.kind == pb.MACHINE_KIND_GPU

    @property
    def holds_keys(self) -> bool:
        """True for a summation service that reductions depend on."""
        return self.weight > 0

    @property
    def ranks(self) -> range:
        """Global ranks of a CS of a complete cluster; empty for others."""
        if self.first_rank < 0:
            return range(0)
        return range(self.first_rank, self.first_rank + self.facts.local_size)

    def describe(self) -> str:
        """Who it is, for messages: ``worker 1 (ranks 2-3, host gpu1, pid 42)``."""
        return describe(self.facts, self.ranks)

    def to_message(self) -> pb.Member:
        facts = self.facts
        return pb.Member(
            member_id=self.id,
            role=facts.role,
            kind=facts.kind,
            machine_id=facts.machine_id,
            machine_index=facts.machine_index,
            address=facts.address,
            local_address=facts.local_address,
            local_size=facts.local_size,
            first_rank=max(0, self.first_rank),
            host=facts.host,
            pid=facts.pid,
            weight=self.weight,
            link_mbit=self.link_mbit,
        )

    def to_status(self, now_s: float, doubt: str = "") -> pb.MemberStatus:
        return pb.MemberStatus(
            member=self.to_message(),
            alive=self.is_present,
            heartbeat_age_s=max(0.0, now_s - self.last_seen_s),
            statistics=self.statistics,
            doubt=doubt,
        )
