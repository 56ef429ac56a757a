"""Turns of contenders on hosts: how long their calls take, and what the calls cost of all their processes."""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cluster.contenders import Layout, our_job, torch_job
from benchmarks.cluster.rank import SMALL_BYTES
from benchmarks.turns import Cost, Job, charged, new_cost

ROOT = Path(__file__).parent.parent.parent
_PROGRAM = ("-m", "benchmarks.cluster.rank")
_SMALL_CALLS_BYTES = 64 << 20  # so many bytes of small calls make up a turn
_MOST_CALLS = 100
_GB = 1e9


@dataclass
class Found:
    """Of one contender's calls: their times, and for each turn CPU seconds per GB of tensor and machine, by kind."""

    times_s: list[float] = field(default_factory=list)
    cpu_s_per_gb: Cost = field(default_factory=new_cost)

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)

    def cpu(self, kind: str = "all") -> float:
        return statistics.median(self.cpu_s_per_gb[kind])


class Turns:
    """A job, told to prepare a call once and to carry it out in turns."""

    def __init__(self, job: Job, machines: int, repeats: int) -> None:
        self._job, self._machines, self._repeats = job, machines, repeats
        self._prepared: set[tuple[str, str]] = set()

    def take(self, name: str, counts: Sequence[int], found: Found) -> None:
        listed = ",".join(map(str, counts))
        if (name, listed) not in self._prepared:
            self._job.tell(f"prepare {name} {listed}")
            self._prepared.add((name, listed))
        nbytes = 4 * sum(counts)
        is_small = nbytes <= SMALL_BYTES
        repeats = max(self._repeats, min(_MOST_CALLS, _SMALL_CALLS_BYTES // nbytes)) if is_small else self._repeats
        with charged(self._job, found.cpu_s_per_gb, repeats * nbytes * self._machines / _GB):
            answers = self._job.tell(f"time {name} {listed} {repeats} {int(not is_small)}")
        (times,) = [answer for answer in answers if answer is not None]
        found.times_s += times


@contextlib.contextmanager
def turns(kind: str, layout: Layout, repeats: int, variables: Mapping[str, str] | None = None) -> Iterator[Turns]:
    """A job of "ours", of "gloo", or of an "echo" between the first two workers, alive until the block ends."""
    if kind == "echo":
        layout = Layout(layout.workers[:2])
    if kind == "ours":
        job = our_job(kind, layout, [*_PROGRAM, kind], {"PYTHONPATH": str(ROOT), **(variables or {})})
    else:
        job = torch_job(kind, layout, [*_PROGRAM, kind], {"PYTHONPATH": str(ROOT)})
    with contextlib.closing(job):
        job.meet()
        yield Turns(job, len(layout.workers), repeats)


Seen = dict[tuple[str, int, int], Found]  # by contender, number of CPU machines, and bytes


def new_seen() -> Seen:
    return defaultdict(Found)
