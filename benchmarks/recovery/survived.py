"""Faults of one job that goes on: summation servers and the scheduler. The weights stay those of a calm run.

Such a job is hit ``repeat`` times. What is timed is, if nothing else is said, from the fault until every rank has
completed a step that it began after the fault: for this the keys of a lost server must have moved.
"""

from __future__ import annotations

import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.recovery.job import CALM_STEPS, COMPUTE_S, WAIT_S, Job, running
from benchmarks.recovery.launcher import Launcher, UnforeseenError, send, started_s
from benchmarks.recovery.rows import Row

RANKS = ("m0.0", "m1.0")
_MOVED = r"epoch \d+: .*moved .*lost"
_SERVER, _SCHEDULER = "byteps_py.server", "byteps_py.scheduler"


@dataclass
class History:
    """The weights after each step of each job that went on: all are to be alike, and like those of a calm job."""

    calm_s: float = 0.0
    weights: dict[int, str] = field(default_factory=dict)
    jobs: list[tuple[dict[int, str], list[Row]]] = field(default_factory=list)

    def add(self, job: Job, rows: list[Row]) -> None:
        by_number: dict[int, str] = {}
        for rank in RANKS:
            for step in job.steps(rank):
                if by_number.setdefault(step.number, step.weights) != step.weights:
                    rows[0].failures.append(f"the ranks differ after step {step.number}")
        self.jobs.append((by_number, rows))

    def compare(self) -> None:
        """Run as many steps in peace as the longest of the jobs took."""
        if not self.jobs:
            return
        last = max(max(weights) for weights, _ in self.jobs)
        with running() as job:
            job.until(f"step {last} in peace", lambda: (job.steps()[-1].number >= last) or None, timeout_s=1800)
            job.end()
            self.weights = {step.number: step.weights for step in job.steps()}
            self.calm_s = statistics.median(step.at - step.began for step in job.steps())
        for weights, rows in self.jobs:
            for row in rows:
                is_same = all(self.weights[number] == digest for number, digest in weights.items())
                row.same_bits = is_same and row.same_bits is not False


def survive(history: History, rows: list[Row], repeat: int, hit: Callable[[Job], None], **how: Any) -> None:
    """Hit a job so often while it trains, then let it end well. After something unforeseen, go on with another job."""
    left = repeat
    while left > 0:
        before = left
        try:
            with running(**how) as job:
                while left:
                    left -= 1
                    hit(job)
                job.end()
                history.add(job, rows)
        except UnforeseenError as error:
            rows[0].failures.append(str(error))
            left -= left == before  # it did not even start


def calm_step_s(job: Job) -> float:
    """The median of the last few steps."""
    return statistics.median(step.at - step.began for step in job.steps()[-CALM_STEPS:])


def longest_step_s(job: Job, since: float) -> float:
    """Of those that were not complete by then."""
    return max(step.at - step.began for rank in RANKS for step in job.steps(rank) if step.at > since)


def middle_of_a_round(job: Job) -> None:
    """Return at a random moment of the communication of a step."""
    round_s = calm_step_s(job) - COMPUTE_S
    done = len(job.steps())
    job.until("another step", lambda: len(job.steps()) > done or None)
    time.sleep(COMPUTE_S + random.random() * round_s)


def settle(job: Job) -> None:
    """Calm steps once more, before the next fault."""
    job.until_step(time.monotonic() + 1.0, RANKS, CALM_STEPS)


def went_on(job: Job, row: Row, fault: Callable[[], float], until_back: Callable[[float], object]) -> None:
    """Time a fault, which returns when it was; then wait until what was lost is back."""
    middle_of_a_round(job)
    calm_s = calm_step_s(job)
    at_s = fault()
    took_s = job.until_step(at_s, RANKS) - at_s
    longest_s = longest_step_s(job, at_s)
    moved = re.search(r"moved (\d+)", job.until_said("m0", _MOVED, at_s).text)
    until_back(at_s)
    settle(job)
    partitions = int(moved[1]) if moved else 0
    row.check(partitions > 0, "it had no partitions")
    row.add(took_s, longest_step=longest_s, calm_step=calm_s, partitions=partitions)


def server_killed(repeat: int, history: History) -> list[Row]:
    return [_server_killed("CPU", "s0", repeat, history), _server_killed("GPU", "m1", repeat, history)]


def _server_killed(kind: str, machine: str, repeat: int, history: History) -> Row:
    row = Row(f"server of a {kind} machine killed, until a step is done", 3.0)

    def hit(job: Job) -> None:
        went_on(
            job,
            row,
            lambda: job.launchers[machine].signal(signal.SIGKILL, _SERVER),
            lambda at_s: job.until_said("m0", "has come", at_s),
        )

    survive(history, [row], repeat, hit)
    return row


def all_but_one_killed(repeat: int, history: History) -> list[Row]:
    row = Row("all servers but the last killed at once, until a step is done", 3.0)

    def kill(job: Job) -> float:
        return max(job.launchers[name].signal(signal.SIGKILL, _SERVER) for name in ("s0", "m1"))

    def until_back(job: Job, at_s: float) -> None:
        first = job.until_said("m0", "has come", at_s)
        job.until_said("m0", "has come", first.at + 1e-9)

    def hit(job: Job) -> None:
        went_on(job, row, lambda: kill(job), lambda at_s: until_back(job, at_s))

    survive(history, [row], repeat, hit)
    return [row]


def server_frozen(repeat: int, history: History) -> list[Row]:
    row = Row("server frozen (SIGSTOP), until a step is done", 1.5)

    def hit(job: Job) -> None:
        frozen = job.launchers["s0"].pids(_SERVER)

        def wake(at_s: float) -> None:
            """What it says now is refused, and it learns that it was given up. Then it is started again."""
            send(signal.SIGCONT, frozen)
            job.until_said("s0", "this summation service was given up, and others have taken over its keys", at_s)
            job.until_said("m0", "has come", at_s)

        went_on(job, row, lambda: send(signal.SIGSTOP, frozen), wake)

    survive(history, [row], repeat, hit)
    return [row]


def scale(job: Job) -> None:
    """Take all CPU machines' servers back."""
    command = [sys.executable, "-m", "byteps_py.cli", "scale", "0"]
    done = subprocess.run(command, env=job.environ, stdout=subprocess.DEVNULL, check=False, timeout=WAIT_S)
    if done.returncode:
        raise UnforeseenError(f"bps scale ended with status {done.returncode}")


def server_comes_and_goes(repeat: int, history: History) -> list[Row]:
    """A CPU machine is added and taken back, by ``bps scale`` and by SIGTERM to its server in turns."""
    added = Row("CPU machine added: longest step over a calm one", 1.0)
    scaled = Row("CPU machine removed (bps scale): the same", 1.0)
    stopped = Row("CPU machine preempted (SIGTERM): the same", 1.0)

    def pause(job: Job, row: Row, begin: Callable[[], object], done: Callable[[float], dict[str, float]]) -> None:
        calm_s = calm_step_s(job)
        middle_of_a_round(job)
        at_s = time.monotonic()
        begin()
        more = done(at_s)
        job.until_step(time.monotonic(), RANKS, 3)
        row.add(max(0.0, longest_step_s(job, at_s) - calm_s), **more, calm_step=calm_s)
        settle(job)

    def hit(job: Job) -> None:
        for row in (scaled, stopped):
            name = f"s{len(job.launchers)}"

            def come(at_s: float) -> dict[str, float]:
                return {"until_it_has_keys": job.until_said("m0", "has come", at_s).at - at_s}

            pause(job, added, lambda name=name: job.add_server(name), come)
            launcher = job.launchers[name]

            def gone(at_s: float, launcher: Launcher = launcher) -> dict[str, float]:
                if status := job.until("the end of a server that was told to leave", launcher.process.poll):
                    raise UnforeseenError(f"a server that was told to leave ended with status {status}")
                ended_s = time.monotonic()
                moved_s = job.until_said("m0", "leaves: ", at_s).at
                steps = sum(at_s < step.at < moved_s for step in job.steps())
                return {"until_its_keys_move": moved_s - at_s, "ended": ended_s - at_s, "steps_until_then": steps}

            if row is stopped:
                pause(job, row, lambda launcher=launcher: launcher.signal(signal.SIGTERM, _SERVER), gone)
            else:
                pause(job, row, lambda: scale(job), gone)

    survive(history, [added, scaled, stopped], repeat, hit, servers=0)
    return [added, scaled, stopped]


def scheduler_killed(repeat: int, history: History) -> list[Row]:
    back = Row("scheduler killed: from its next start until all are back", 3.0)
    meanwhile = Row("the same: longest step until then over a calm one", None)

    def hit(job: Job) -> None:
        calm_s = calm_step_s(job)
        middle_of_a_round(job)
        scheduler = job.launchers["scheduler"]
        at_s = scheduler.signal(signal.SIGKILL, _SCHEDULER)

        def start() -> float | None:
            return next((found for pid in scheduler.pids(_SCHEDULER) if (found := started_s(pid)) > at_s - 0.02), None)

        next_s = job.until("the scheduler's next process", start)
        back_s = max(job.until_said(name, "is back after", at_s).at for name in ("m0", "m1"))
        job.until_step(back_s, RANKS, 3)
        back.add(back_s - next_s, from_the_kill=back_s - at_s)
        meanwhile.add(max(0.0, longest_step_s(job, at_s) - calm_s), calm_step=calm_s)
        settle(job)

    survive(history, [back, meanwhile], repeat, hit)
    return [back, meanwhile]
