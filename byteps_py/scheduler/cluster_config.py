"""What the scheduler knows of its cluster before any member registers. Pure; any thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from byteps_py.placement.link_optimum import LinkOptimum
from byteps_py.settings import SLOW_FACTOR, Settings

#: Version of the control protocol; a member with another version is refused.
PROTOCOL_VERSION = 7


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """``num_workers`` GPU machines (n), ``num_servers`` CPU machines (k); times in seconds.

    ``partition_bytes`` is not among them: the scheduler moves no tensors, so the first member that registers decides.
    """

    num_workers: int
    num_servers: int = 0
    servers_only: bool = False  # GPU machines sum nothing, whatever share the formula gives them
    job: str = ""
    start_timeout_s: float = 60.0
    heartbeat_interval_s: float = 0.2
    heartbeat_timeout_s: float = 1.0
    heartbeat_timeout_max_s: float | None = None
    stall_warn_s: float = 60.0
    straggler: float = 5.0
    elastic: bool = False
    min_ranks: int = 1
    max_ranks: int = 0
    elastic_timeout_s: float = 600.0
    reset_limit: int = 0

    @classmethod
    def from_settings(cls, settings: Settings) -> ClusterConfig:
        """The configuration of the job that a scheduler with these settings serves."""
        return cls(
            num_workers=settings.num_workers,
            num_servers=settings.num_servers,
            servers_only=settings.placement == "servers-only",
            job=settings.job,
            start_timeout_s=settings.start_timeout_s,
            heartbeat_interval_s=settings.heartbeat_interval_s,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            heartbeat_timeout_max_s=settings.heartbeat_timeout_max_s,
            stall_warn_s=settings.stall_warn_s,
            straggler=settings.straggler,
            elastic=settings.elastic,
            min_ranks=settings.min_ranks,
            max_ranks=settings.max_ranks,
            elastic_timeout_s=settings.elastic_timeout_s,
            reset_limit=settings.reset_limit,
        )

    @property
    def patience_s(self) -> float:
        """As in ``Settings``."""
        return self.heartbeat_timeout_max_s or SLOW_FACTOR * self.heartbeat_timeout_s

    @property
    def needs_gpu_machine_servers(self) -> bool:
        """True when the placement gives GPU machines a share: there is a network, and k < n."""
        return self.num_workers > 1 and self.num_servers < self.num_workers and not self.servers_only

    def weights(self, cpu_mbit: Sequence[float], gpu_mbit: Sequence[float]) -> tuple[int, ...]:
        """The share of the keys that each machine gets, relative to the others, for links of these rates: CPU machines
        first, then GPU machines; 0 for none. One GPU machine adds all of its gradients itself; CPU machines beside it
        share the copies of its optimizers' states. Raises UsageError if no machine could hold any."""
        if len(gpu_mbit) == 1:
            return (*(1 for _ in cpu_mbit), 0)
        return LinkOptimum(cpu_mbit, gpu_mbit, not self.servers_only and len(cpu_mbit) < len(gpu_mbit)).weights
