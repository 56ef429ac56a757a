"""Many kills in real jobs: whatever is killed, the weights at the end are those of a job that nobody disturbed.

    python -m benchmarks.kill_soak --kills 500 --folder DIR

Jobs of benchmarks/goodput (a small GPT, 8 ranks on 4 emulated machines, 2 CPU machines; copies of the whole model, or
PP 2 x TP 2 x DP 2), with short steps, one after another. In each job, SIGKILL goes to ranks, communication services,
summation servers, the scheduler and whole machines, each as often as the others. A kill comes some steps after the one
before; or, of a share of them, within a second, while the job still recovers. Only the loss of all copies of the
optimizer's states together with ranks, which ends a run, does not happen: there are two copies, and servers with both
are not killed at once.

Each job's weights are compared with those of the same job without kills, which is made first. A job has also failed if
a sample was left out or used twice, if a step before the one under way was made again, or if it stands still. Other
jobs are made nevertheless, and --folder keeps what the ranks of a job that failed wrote, and what the job said.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.goodput.contenders import CONTENDERS, KINDS, Contender, Place, environment
from benchmarks.goodput.killer import Kill, kill, kinds
from benchmarks.goodput.notes import Notes
from benchmarks.goodput.outcome import Outcome
from benchmarks.goodput.training import Task
from benchmarks.recovery.launcher import Launcher, UnforeseenError

LAYOUTS = ("in-place", "mesh")
_POLL_S = 0.02
_SILENCE_S = 180.0  # the longest time without a step
_MOST_STEPS = 4  # between two kills
_WITHIN_STEP_S = 0.3  # a kill comes at any time of a step
_SLACK_STEPS = 3  # … that it takes until it comes
_OVERLAP_S = 1.0
_SERVER = "summation server"  # it has copies, which are made again within the most steps
_LAST = 4  # steps without kills, at the end


@dataclass(frozen=True)
class NextKill:
    """``steps``: so many are made after the kill before; 0: the job still recovers. ``delay_s``: after these."""

    kind: str
    steps: int
    delay_s: float


def plan(rng: random.Random, kills: int, of: Sequence[str], overlapping: float, copies: int) -> Iterator[NextKill]:
    """Of one job. ``overlapping``: the share of kills that come while the job recovers from the one before.
    ``copies``: of the optimizer's states. Servers with all of them are never killed together, or with a rank."""
    kind, together = kinds(rng, of), list[str]()
    for _ in range(kills):
        one = next(kind)
        is_held = [*together, one].count(_SERVER) < copies
        if together and is_held and rng.random() < overlapping:
            together.append(one)
            yield NextKill(one, 0, rng.uniform(0, _OVERLAP_S))
        else:
            steps = _MOST_STEPS if _SERVER in together else rng.randint(1, _MOST_STEPS)
            together = [one]
            yield NextKill(one, steps, rng.uniform(0, _WITHIN_STEP_S))


def steps_for(kills: int) -> int:
    """The length of a job that has room for so many."""
    return 2 + kills * (_MOST_STEPS + _SLACK_STEPS) + _LAST


def faults_of(outcome: Outcome, calm: Outcome) -> list[str]:
    """The faults of a job, compared with ``calm``, the one without kills."""
    (_, beyond), (lost, doubled) = outcome.repeated(), outcome.lost_and_doubled()
    same = outcome.weights() == calm.weights() and len(calm.weights()) == outcome.task.ranks
    found = [
        (not same, "other weights"),
        (beyond, f"{beyond} bodies of steps before the one under way were made again"),
        (lost, f"{lost} samples were left out"),
        (doubled, f"{doubled} samples were used twice"),
    ]
    return [what for is_so, what in found if is_so]


class SoakJob:
    """One job, which ``command`` starts. ``copies``: of the optimizer's states."""

    def __init__(self, command: Sequence[str], task: Task, copies: int) -> None:
        self._command, self._task = command, task
        more = {"BYTEPS_SHADOW_COPIES": str(copies), "BYTEPS_JOURNAL_DIR": task.folder}  # kept if the job fails
        self._environment = {**environment(), **more}
        self._notes, self.kills, self.folder = Notes(task), list[Kill](), Path(task.folder)
        self._latest_s, self._made = time.monotonic(), 0

    def run(self, rng: random.Random, planned: Iterator[NextKill]) -> Outcome:
        """To its end. Raises UnforeseenError if it fails or stands still."""
        self.folder.mkdir(parents=True)
        job = Launcher(self._command, self._environment, f"kill-soak-{os.getpid()}-{time.monotonic_ns()}")
        try:
            made = 1  # of all ranks: no step can be gone back to before
            for each in planned:
                while self._is_running(job) and self._made < made + each.steps:
                    pass
                time.sleep(each.delay_s)
                if not self._is_running(job) or self._made > self._task.steps - _LAST:
                    break
                made = self._made
                self.kills.append(kill(rng, each.kind, job, self._notes))
            while self._is_running(job):
                pass
            self._notes.read()
            if job.process.returncode or len(self._notes.finished()) < self._task.steps:
                raise UnforeseenError(f"the job ended with status {job.process.returncode}")
        finally:
            job.close()
            said = [(line.at, line.text) for line in job.lines]
            said += [(one.at, f"KILL of a {one.kind}: {', '.join(one.processes)}") for one in self.kills]
            (self.folder / "said.txt").write_text("".join(f"{at:.3f} {text}\n" for at, text in sorted(said)))
        return Outcome(self._task, dict(self._notes.of), self._notes.finished(), self.kills, cpu_s=0.0)

    def _is_running(self, job: Launcher) -> bool:
        """Look again, some time later. Raises UnforeseenError if it stands still."""
        time.sleep(_POLL_S)
        self._notes.read()
        of_ranks = (self._notes.of.get(rank, []) for rank in range(self._task.ranks))
        made = min(max((note["step"] + 1 for note in notes if note["what"] == "step"), default=0) for notes in of_ranks)
        if made > self._made:
            self._made, self._latest_s = made, time.monotonic()
        elif time.monotonic() > self._latest_s + _SILENCE_S:
            raise UnforeseenError(f"no step for {_SILENCE_S:g} s after {self._made} steps")
        return job.process.poll() is None


class Soak:
    """Jobs of one layout, each with ``options.kills_per_job`` kills."""

    def __init__(self, layout: str, options: argparse.Namespace, folder: Path) -> None:
        self._contender: Contender = CONTENDERS[layout]
        self._options, self._folder = options, folder / layout
        self._place = Place(options.machines, options.ranks, options.servers, options.launcher_options.split())
        self._steps = steps_for(options.kills_per_job)
        self._calm: Outcome | None = None
        self._jobs = 0

    def next_job(self) -> dict[str, Any]:
        """One job, as a row of the table. Raises UnforeseenError if the job without kills fails."""
        if self._calm is None:
            self._calm = self._job("calm").run(random.Random(), iter(()))
        self._jobs += 1
        options, name = self._options, f"{self._contender.name} {self._jobs}"
        rng = random.Random(f"{options.seed} {name}")
        job, began_s = self._job(str(self._jobs)), time.monotonic()
        try:
            planned = plan(rng, options.kills_per_job, options.kinds, options.overlapping, options.copies)
            outcome = job.run(rng, planned)
            faults, wall_s = faults_of(outcome, self._calm), outcome.wall_s
            to_next_s = statistics.median(outcome.to_next_step_s())
        except UnforeseenError as error:
            faults, wall_s, to_next_s = [str(error)], math.nan, math.nan
        if not faults:
            shutil.rmtree(job.folder)
        return {
            "job": name,
            "kills": Counter(kill.kind for kill in job.kills),
            "took_s": time.monotonic() - began_s,
            "calm_step_s": self._calm.step_s,
            "step_s": wall_s / (self._steps - 1),
            "to_next_step_s": to_next_s,
            "faults": faults,
        }

    def _job(self, name: str) -> SoakJob:
        place, folder = self._place, self._folder / name
        task = Task(str(folder), place.ranks, self._contender.copies(place), self._steps, self._options.compute_s)
        return SoakJob(self._contender.command(place, task), task, self._options.copies)


def line_of(row: dict[str, Any]) -> str:
    kills = " ".join(f"{row['kills'].get(kind, 0):4d}" for kind in KINDS)
    faults = "; ".join(row["faults"]) or "same bits"
    return f"{row['job']:14}{kills}{row['took_s']:8.0f}{row['step_s']:8.3f}{row['to_next_step_s']:8.2f}  {faults}"


HEADER = f"{'':14}{' '.join(f'{kind[:4]:>4}' for kind in KINDS)}{'took s':>8}{'step s':>8}{'to next':>8}"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    total = sum((Counter(row["kills"]) for row in rows), Counter[str]())
    of_kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(total.items()))
    failed = [row["job"] for row in rows if row["faults"]]
    said = f"failed: {', '.join(failed)}" if failed else "each job has the weights of the job without kills"
    return f"{sum(total.values())} kills ({of_kinds}) in {len(rows)} jobs; {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500, help="of all jobs")
    parser.add_argument("--kills-per-job", type=int, default=25)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="taken in turn")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what is killed")
    parser.add_argument("--overlapping", type=float, default=0.2, help="share of kills while the job still recovers")
    parser.add_argument("--copies", type=int, default=2, help="of the optimizer's states: BYTEPS_SHADOW_COPIES")
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2, help="on each machine")
    parser.add_argument("--servers", type=int, default=2, help="CPU machines")
    parser.add_argument("--compute-s", type=float, default=0.05, help="of each step: the processor rests")
    parser.add_argument("--launcher-options", default="", help="more options of bpslaunch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keeps jobs that failed; it must not exist")
    parser.add_argument("--json", type=Path, help="rows, one a line")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with the job that runs
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="kill-soak-") as temporary:
        soaks = [Soak(layout, options, options.folder or Path(temporary)) for layout in options.layouts]
        print(
            f"{'':14}{' '.join(f'{kind[:4]:>4}' for kind in KINDS)}{'took s':>8}{'step s':>8}{'to next':>8}", flush=True
        )
        for soak in itertools.cycle(soaks):
            if sum(sum(row["kills"].values()) for row in rows) >= options.kills:
                break
            rows.append(soak.next_job())
            print(line_of(rows[-1]), flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print(summary(rows))
    sys.exit(any(row["faults"] for row in rows))


if __name__ == "__main__":
    main()
