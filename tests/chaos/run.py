"""One run: a job, a fault in each stretch of its training, and the report at its end."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from support.breaking import launch
from support.clusters import ROOT

from .strikes import Chaos

PROGRAM = ROOT / "tests" / "programs" / "recovery.py"
STEPS = 8
OPTIONS = "-np 1 --machines 3 --servers 2"
ENVIRON = {"BYTEPS_PARTITION_BYTES": "16384", "BYTEPS_LOG_LEVEL": "WARNING", "PS_HEARTBEAT_TIMEOUT": "2"}
PEACE = "nothing"
_DIGEST = re.compile(r"digest (\w{64})")
_LONGEST = re.compile(r"longest step of stretch \d+: (\S+) s")


@dataclass
class Report:
    """``longest_s``: the longest step of each stretch, by what happened in it."""

    digests: set[str] = field(default_factory=set)
    longest_s: dict[str, list[float]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        told = [f"weights: {', '.join(self.digests)}", "longest step of a stretch, seconds:"]
        for what, longest_s in sorted(self.longest_s.items()):
            ordered = sorted(longest_s)
            told.append(
                f"  {what:20} {len(ordered):5} times, median {ordered[len(ordered) // 2]:.2f}, "
                f"95 % up to {ordered[int(len(ordered) * 0.95)]:.2f}, longest {ordered[-1]:.2f}"
            )
        return told


@functools.cache
def calm(stretches: int, options: str = OPTIONS, steps: int = STEPS, compression: str = "") -> Report:
    """Train without any fault. Servers and their number have no say in the weights."""
    return run(stretches, None, options, steps, compression=compression)


def run(
    stretches: int,
    seed: int | None,
    options: str = OPTIONS,
    steps: int = STEPS,
    hosted: bool = False,
    compression: str = "",
    progress: Callable[[int], None] = lambda done: None,
) -> Report:
    """Train, ``steps`` in each stretch; ``seed`` None: without any fault. ``hosted``: the services have states;
    ``compression``: of gradients, by its name in the program. ``progress``: called with the number of stretches that
    are done. Raises AssertionError if the job does not end well."""
    limit_s = 120 + 20 * stretches
    environ = {**ENVIRON, "TEST_HOSTED": "1"} if hosted else {**ENVIRON}
    if compression:
        environ |= {"TEST_COMPRESSION": compression, "BYTEPS_MIN_COMPRESS_BYTES": "0"}
    with launch(options, str(stretches), str(steps), program=PROGRAM, limit_s=limit_s, **environ) as job:
        chaos = Chaos(job, seed or 0)
        assert job.process.stdin is not None
        report = Report()
        for stretch in range(stretches):
            progress(stretch)
            if f"stretch {stretch}" not in job.said:
                job.until(f"stretch {stretch}")
            strike = chaos.next() if seed is not None and 0 < stretch < stretches - 1 else None
            job.process.stdin.write("go on\n")
            job.process.stdin.flush()
            if strike is not None:
                strike()
            took = _LONGEST.search(job.until("longest step of stretch"))
            assert took is not None, job.text
            what = PEACE if strike is None else chaos.done[-1]
            report.longest_s.setdefault(what, []).append(float(took[1]))
        chaos.end()
        status = job.end()
        assert status == 0, job.text
        report.digests = set(_DIGEST.findall(job.text))
        assert len(report.digests) == 1, job.text
        return report
