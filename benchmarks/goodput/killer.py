"""Kills processes of a job, at times and of kinds that a seed decides."""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.goodput.notes import Notes
from benchmarks.recovery.launcher import Launcher, UnforeseenError, read_list, send

_MODULES = {
    "communication service": "byteps_py.worker",
    "summation server": "byteps_py.server",
    "scheduler": "byteps_py.scheduler",
}
_LIMIT_S = 60.0  # for one of a kind to be there: it may have been killed just before


@dataclass(frozen=True)
class Kill:
    at: float
    kind: str
    processes: Sequence[str]


def times(rng: random.Random, per_hour: float) -> Iterator[float]:
    """Seconds after the first step: one time in each interval, uniformly. So a short run has its share, too."""
    interval_s = 3600 / per_hour
    return ((number + rng.random()) * interval_s for number in itertools.count())


def kinds(rng: random.Random, of: Sequence[str]) -> Iterator[str]:
    """Each one as often as the others, in random order."""
    while True:
        yield from rng.sample(of, len(of))


def kill(rng: random.Random, kind: str, job: Launcher, notes: Notes) -> Kill:
    """Kill one of a kind. If there is none for the moment, wait for it."""
    deadline_s = time.monotonic() + _LIMIT_S
    while not (choices := _choices(kind, job, notes)):
        if time.monotonic() > deadline_s:
            raise UnforeseenError(f"no {kind} came back within {_LIMIT_S:g} s")
        time.sleep(0.01)
        notes.read()
    pids = rng.choice(choices)
    names = [_name(pid) for pid in pids]
    return Kill(send(signal.SIGKILL, pids), kind, names)


def _choices(kind: str, job: Launcher, notes: Notes) -> list[list[int]]:
    if kind in _MODULES:
        return [[pid] for pid in job.pids(_MODULES[kind])]
    if kind == "rank":
        alive = set(job.pids())
        return [[pid] for pid in notes.pids() if pid in alive]
    of_machine: dict[str, list[int]] = {}
    for pid in job.pids():
        machine = _environ(pid).get("BYTEPS_MACHINE_ID", "")
        if machine.startswith("m"):  # one with ranks; a CPU machine has its summation server only
            of_machine.setdefault(machine, []).append(pid)
    return [of_machine[machine] for machine in sorted(of_machine)]


def _environ(pid: int) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in read_list(pid, "environ") if "=" in entry)


def _name(pid: int) -> str:
    words = read_list(pid, "cmdline")
    what = words[words.index("-m") + 1] if "-m" in words[:-1] else Path(words[1]).name if words[1:] else "?"
    return f"{what} of {_environ(pid).get('BYTEPS_MACHINE_ID', 'the machine')}, process {pid}"
