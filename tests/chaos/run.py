"""One run: a job, a fault in each stretch of its training, and the report at its end."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from support.breaking import Job, launch
from support.clusters import ROOT

PROGRAM = ROOT / "tests" / "programs" / "recovery.py"
STEPS = 8
OPTIONS = "-np 1 --machines 3 --servers 2"
ENVIRON = {"BYTEPS_PARTITION_BYTES": "16384", "BYTEPS_LOG_LEVEL": "WARNING", "PS_HEARTBEAT_TIMEOUT": "2"}
_DIGEST = re.compile(r"digest (\w{64})")
_LONGEST = re.compile(r"longest step of stretch \d+: (\S+) s")
#: A server needs so long to start and to load its kernels; before that it is none to rely on.
_READY_S = 8.0
FAULTS = ("kill", "kill", "kill", "freeze", "kill the scheduler")


@dataclass
class Report:
    """``longest_s``: of each stretch, its longest step, whatever happened in it."""

    digests: set[str] = field(default_factory=set)
    longest_s: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        done = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items())) or "none"
        ordered = sorted(self.longest_s)
        middle, last = ordered[len(ordered) // 2], ordered[-1]
        return [
            f"faults: {done}",
            f"longest step of a stretch: median {middle:.2f} s, 95 % below {ordered[int(len(ordered) * 0.95)]:.2f} s, "
            f"longest {last:.2f} s",
        ]


class Chaos:
    """Faults of one job, as ``seed`` decides."""

    def __init__(self, job: Job, seed: int) -> None:
        self._job = job
        self._random = random.Random(seed)
        self._frozen: int | None = None
        self.counts: dict[str, int] = {}

    def strike(self) -> None:
        self._wake()
        fault = self._random.choice(FAULTS)
        time.sleep(self._random.random() * 0.3)  # somewhere in the middle of a round
        if fault == "kill the scheduler":
            self._signal(self._named("byteps_py.scheduler")[0], signal.SIGKILL)
        else:
            ready = [pid for pid in self._named("byteps_py.server") if _age_s(pid) > _READY_S]
            if len(ready) < 2:  # the last one has to stay
                return
            victim = self._random.choice(ready)
            self._signal(victim, signal.SIGSTOP if fault == "freeze" else signal.SIGKILL)
            self._frozen = victim if fault == "freeze" else None
        self.counts[fault] = self.counts.get(fault, 0) + 1

    def _wake(self) -> None:
        if self._frozen is not None:
            self._signal(self._frozen, signal.SIGCONT)
            self._frozen = None

    def end(self) -> None:
        self._wake()

    @staticmethod
    def _signal(pid: int, signum: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)

    def _named(self, word: str) -> list[int]:
        found = []
        for pid in sorted(self._job.pids()):
            with contextlib.suppress(OSError):
                if word in Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0"):
                    found.append(pid)
        return found


def _age_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    return 0.0


@functools.cache
def calm(stretches: int, options: str = OPTIONS) -> Report:
    """Train without any fault. Servers and their number have no say in the weights."""
    return run(stretches, None, options)


def run(stretches: int, seed: int | None, options: str = OPTIONS) -> Report:
    """Train; ``seed`` None: without any fault. Raises AssertionError if the job does not end well."""
    limit_s = 120 + 20 * stretches
    with launch(options, str(stretches), str(STEPS), program=PROGRAM, limit_s=limit_s, **ENVIRON) as job:
        chaos = Chaos(job, seed or 0)
        assert job.process.stdin is not None
        for stretch in range(stretches):
            if f"stretch {stretch}" not in job.said:
                job.until(f"stretch {stretch}")
            job.process.stdin.write("go on\n")
            job.process.stdin.flush()
            if seed is not None and 0 < stretch < stretches - 1:
                chaos.strike()
            job.until("longest step of stretch")
        chaos.end()
        status = job.end()
        assert status == 0, job.text
        report = Report(set(_DIGEST.findall(job.text)), [float(s) for s in _LONGEST.findall(job.text)], chaos.counts)
        assert len(report.digests) == 1, job.text
        return report
