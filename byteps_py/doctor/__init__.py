"""The checks of `bps doctor`: of this machine and this installation, and of the ways to a job's members.

machine_checks  versions, cores, limits, ports, clock, GPUs and links of this machine
link_checks     latency and rate to each member of a job

Each check gives Findings. They are pure; any thread.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum

#: Numbers and names that a program can use: `bps plan` makes a cluster of them.
Figures = dict[str, int | float | str]


class Level(StrEnum):
    """How bad it is. Only FAIL makes `bps doctor` exit with 1."""

    OK = "ok"
    WARN = "warn"  # a job runs, but slower, or not in every case
    FAIL = "fail"  # a job will not start, or will fail


@dataclass(frozen=True, slots=True)
class Finding:
    """``subject``: what was looked at, a word or two. ``text``: what is there. ``remedy``: what to change, one line;
    empty if there is nothing to change. ``figures``: in the text, with their units in their names."""

    subject: str
    level: Level
    text: str
    remedy: str = ""
    figures: Figures = field(default_factory=dict)

    def as_json(self) -> dict[str, str | Figures]:
        """The finding as plain values."""
        return {**asdict(self), "level": str(self.level)}


def ok(subject: str, text: str, figures: Figures | None = None) -> Finding:
    """Nothing is to be changed."""
    return Finding(subject, Level.OK, text, "", figures or {})


def warn(subject: str, text: str, remedy: str, figures: Figures | None = None) -> Finding:
    """A job runs all the same."""
    return Finding(subject, Level.WARN, text, remedy, figures or {})


def fail(subject: str, text: str, remedy: str) -> Finding:
    """Something will fail."""
    return Finding(subject, Level.FAIL, text, remedy)
