"""Elastic jobs: how long until the ranks that are left, or those that are there now, have completed a step together.

Each run is a job of its own. They commit after each step.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable

from benchmarks.recovery.job import START_S, Job, Step, running
from benchmarks.recovery.launcher import UnforeseenError, send
from benchmarks.recovery.rows import Row
from benchmarks.recovery.survived import History, middle_of_a_round


def regrouped(row: Row, repeat: int, ranks: int, act: Callable[[Job], None]) -> list[Row]:
    for _ in range(repeat):
        try:
            with running(ranks=ranks, is_elastic=True) as job:
                middle_of_a_round(job)
                act(job)
                check(job, row)
        except UnforeseenError as error:
            row.failures.append(str(error))
    return [row]


def check(job: Job, row: Row) -> None:
    """Whoever took a step in a group has the same weights after it as the others of the group."""
    seen: dict[tuple[int, int], set[str]] = {}
    for file in job.folder.glob("m*.jsonl"):
        for step in job.steps(file.stem):
            seen.setdefault((step.number, step.size), set()).add(step.weights)
    row.check(all(len(weights) == 1 for weights in seen.values()), "the ranks of a group differ")


def rank_killed(repeat: int, _: History) -> list[Row]:
    row = Row("elastic: a rank killed, until the others have done a step", 3.0)

    def act(job: Job) -> None:
        at_s = send(signal.SIGKILL, [job.until_note("m1.1", "ready")["pid"]])
        row.add(job.until_step(at_s, ("m0.0", "m0.1", "m1.0"), size=3) - at_s)

    return regrouped(row, repeat, 2, act)


def machine_killed(repeat: int, _: History) -> list[Row]:
    row = Row("elastic: a machine killed, until the others have done a step", 3.0)

    def act(job: Job) -> None:
        at_s = job.launchers["m1"].signal(signal.SIGKILL)
        row.add(job.until_step(at_s, ("m0.0", "m0.1"), size=2) - at_s)

    return regrouped(row, repeat, 2, act)


def machine_preempted(repeat: int, _: History) -> list[Row]:
    row = Row("elastic: a machine told to go (SIGTERM), until the others have done a step", 3.0)

    def act(job: Job) -> None:
        launcher = job.launchers["m1"].process
        at_s = send(signal.SIGTERM, [launcher.pid])
        done_s = job.until_step(at_s, ("m0.0", "m0.1"), size=2)
        row.check(launcher.wait(START_S) == 0, f"its launcher ended with status {launcher.returncode}")
        row.add(done_s - at_s, until_it_has_ended=time.monotonic() - at_s)

    return regrouped(row, repeat, 2, act)


def machine_joins(repeat: int, _: History) -> list[Row]:
    row = Row("elastic: a machine joins, from its init() to a step with it", 3.0)

    def act(job: Job) -> None:
        at_s = time.monotonic()
        job.add_machine(2)
        imported_s = job.until_note("m2.0", "imported", timeout_s=START_S)["at"]
        done_s = job.until_step(imported_s, ("m0.0", "m1.0", "m2.0"), size=3)
        ready_s = job.until_note("m2.0", "ready")["at"]
        pause_s = max(step.at - before.at for before, step in pairs(job) if step.at > at_s)
        row.add(
            done_s - imported_s,
            its_own_start=imported_s - at_s,
            init=ready_s - imported_s,
            longest_pause_of_the_others=pause_s,
        )

    return regrouped(row, repeat, 1, act)


def pairs(job: Job) -> list[tuple[Step, Step]]:
    return list(itertools.pairwise(job.steps()))
