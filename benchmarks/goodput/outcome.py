"""What a run has come to, by what its ranks have written down."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from benchmarks.goodput.killer import Kill
from benchmarks.goodput.training import Task


@dataclass(frozen=True)
class Outcome:
    task: Task
    notes: dict[int, list[dict[str, Any]]]
    finished: dict[int, float]
    kills: Sequence[Kill]
    cpu_s: float  # of all processes, after the first step

    @property
    def wall_s(self) -> float:
        return max(self.finished.values()) - self.finished[0]

    @property
    def step_s(self) -> float:
        return self.wall_s / (self.task.steps - 1)

    def to_next_step_s(self) -> list[float]:
        """From each kill until the next step is finished that was not finished before."""
        times = sorted(self.finished.values())
        return [next((at for at in times if at > kill.at), times[-1]) - kill.at for kill in self.kills]

    def start_s(self) -> list[float]:
        """Of each process that is a rank: from its start until it has imported torch. Of those that were started again,
        if there are any: at first all start at once."""
        first, later = [], []
        for notes in self.notes.values():
            starts = [note["import_s"] for note in notes if note["what"] == "ready"]
            first += starts[:1]
            later += starts[1:]
        return later or first

    @cached_property
    def _begins(self) -> list[tuple[float, int, int, list[int]]]:
        """In order: (when, rank, step, samples)."""
        return sorted(
            (note["at"], rank, note["step"], note["samples"])
            for rank, notes in self.notes.items()
            for note in notes
            if note["what"] == "begin"
        )

    def repeated(self) -> tuple[int, int]:
        """(bodies that a rank began once more, of these: bodies of a step after which a rank had begun another one)"""
        seen: set[tuple[int, int]] = set()
        again = too_late = latest = 0
        for _, rank, step, _ in self._begins:
            if (rank, step) in seen:
                again += 1
                too_late += step < latest
            seen.add((rank, step))
            latest = max(latest, step)
        return again, too_late

    def lost_and_doubled(self) -> tuple[int, int]:
        """Samples that are in no step, and those that are in more than one. Of a body that was repeated, the last one
        counts; of a rank that did not make a step, none."""
        made = {(rank, note["step"]) for rank, notes in self.notes.items() for note in notes if note["what"] == "step"}
        used = {(rank, step): samples for _, rank, step, samples in self._begins if (rank, step) in made}
        count = Counter(sample for samples in used.values() for sample in samples)
        return self.task.samples - len(count), sum(n > 1 for n in count.values())

    def weights(self) -> dict[int, str]:
        """At the end, of each rank."""
        return {rank: note["weights"] for rank, notes in self.notes.items() for note in notes if note["what"] == "end"}


def row_of(contender: str, per_hour: float, outcome: Outcome, calm: Outcome) -> dict[str, Any]:
    """One line of the table. ``calm``: the same contender's run without a kill."""
    to_next, starts = outcome.to_next_step_s(), outcome.start_s()
    repeated, beyond = outcome.repeated()
    lost, doubled = outcome.lost_and_doubled()
    return {
        "contender": contender,
        "kills_per_hour": per_hour,
        "steps": outcome.task.steps,
        "kills": Counter(kill.kind for kill in outcome.kills),
        "goodput": (outcome.task.steps - 1) * calm.step_s / outcome.wall_s,
        "step_s": outcome.step_s,
        "wall_s": outcome.wall_s,
        "to_next_step_s": to_next,
        "start_s": statistics.median(starts),
        "bodies_repeated": repeated,
        "bodies_repeated_beyond": beyond,
        "samples_lost": lost,
        "samples_doubled": doubled,
        "same_bits": outcome.weights() == calm.weights() and len(calm.weights()) == outcome.task.ranks,
        "cpu_s_per_step": outcome.cpu_s / (outcome.task.steps - 1),
        "each_kill": [
            {**asdict(kill), "at": kill.at - outcome.finished[0], "to_next_step_s": took}
            for kill, took in zip(outcome.kills, to_next, strict=True)
        ],
    }
