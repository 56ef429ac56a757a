"""One contender's turn in a benchmark of training: a step's time, its bytes between machines, memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.cluster.hosts import Host
from benchmarks.turns import Cost, Job, charged


def pss_bytes(pid: int) -> int:
    """A process's memory, its share of what is shared."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def bytes_out(host: Host) -> int:
    """The bytes that the host has sent so far: the other end of its link has received them."""
    return int(Path(f"/sys/class/net/{host.outside}/statistics/rx_bytes").read_text())


def turn(job: Job, hosts: Sequence[Host], machines: int, steps: int, cost: tuple[Cost, float]) -> dict[str, float]:
    """``steps`` steps of a job, after as many that make memory. ``hosts``: with links between them; none on one
    machine. ``cost``: where processor seconds are added, for so many units in each step."""
    job.meet()
    job.tell("steps")
    before = [bytes_out(host) for host in hosts]
    with charged(job, cost[0], steps * cost[1]):
        answers = job.tell("steps")
    sent = [bytes_out(host) - was for host, was in zip(hosts, before, strict=True)]
    return {
        "ms": max(answer["ms"] for answer in answers),
        "sent_mb": max(sent, default=0) / steps / 1e6,
        "rank_gb": max(answer["peak_gb"] for answer in answers),
        "machine_gb": sum(map(pss_bytes, job.pids)) / 1e9 / machines,
    }
