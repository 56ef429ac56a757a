"""Useful time of a training in which processes and machines are killed, at some rates, beside others.

    python -m benchmarks.goodput --kills-per-hour 6 30 120 --minutes 10 [--contenders in-place mesh checkpoint torchft]

A small GPT trains a fixed number of steps: as many as take so many minutes if nobody disturbs. A step takes about a
second, because each rank rests for --compute-s, as it would while a GPU computes. Meanwhile SIGKILL goes to ranks,
communication services, summation servers, the scheduler and whole machines, each as often as the others; of contenders
that only survive the loss of ranks, to ranks. There are no kills before the first step is finished and in the last two.

    goodput       the steps after the first one, times the step time of the same contender's run without kills, over
                  the time from the first finished step to the last one
    to next step  from a kill until the next new step is finished by all ranks: the median, the longest
    start         of a process: until it has imported torch; of those that were started again
    again         bodies of the loop that a rank began once more; beyond: of these, of steps before the one under way
    lost, twice   samples that no step has used, or more than one
    bits          the weights at the end: those of the run without kills
    CPU           processor seconds of all processes for each step, with those that were started again
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.goodput.contenders import CONTENDERS, KINDS, Contender, Place, environment
from benchmarks.goodput.killer import Kill, kill, kinds, times
from benchmarks.goodput.notes import Notes
from benchmarks.goodput.outcome import Outcome, row_of
from benchmarks.goodput.training import Task
from benchmarks.recovery.launcher import Launcher, UnforeseenError
from benchmarks.turns import process_cpu_s

_LAST = 2  # steps without kills, at the end
_POLL_S = 0.02
_SILENCE_S = 300.0  # the longest time without a step


def run(contender: Contender, place: Place, task: Task, per_hour: float, seed: int, only: Sequence[str]) -> Outcome:
    """One job, to its end. Raises UnforeseenError if it fails or stands still, with what it said."""
    rng = random.Random(seed)
    due = times(rng, per_hour) if per_hour else iter([math.inf])
    of_kind = kinds(rng, [kind for kind in contender.kinds if kind in only])
    notes, kills, cpu_s = Notes(task), list[Kill](), _children_cpu_s()
    job = Launcher(contender.command(place, task), environment(), f"goodput-{os.getpid()}-{time.monotonic_ns()}")
    try:
        next_s, first_s, latest_s, steps = math.inf, 0.0, time.monotonic(), 0
        while job.process.poll() is None:
            time.sleep(_POLL_S)
            notes.read()
            finished = notes.finished()
            if len(finished) > steps:
                steps, latest_s = len(finished), time.monotonic()
            elif time.monotonic() > latest_s + _SILENCE_S:
                raise UnforeseenError(f"no step for {_SILENCE_S:g} s after step {steps - 1}, {_said(job)}")
            if finished and not first_s and len(finished) > 1:  # all ranks have made the first one
                first_s = finished[0]
                cpu_s += sum(map(_cpu_s, job.pids()))
                next_s = first_s + next(due)
            if time.monotonic() >= next_s and steps < task.steps - _LAST:
                kills.append(kill(rng, next(of_kind), job, notes))
                next_s = max(first_s + next(due), time.monotonic())
        notes.read()
        if job.process.returncode or len(notes.finished()) < task.steps:
            raise UnforeseenError(f"the job ended with status {job.process.returncode}, {_said(job)}")
    finally:
        job.close()
        Path(task.folder, "said.txt").write_text("\n".join(f"{line.at:.3f} {line.text}" for line in job.lines))
    return Outcome(task, dict(notes.of), notes.finished(), kills, _children_cpu_s() - cpu_s)


def _said(job: Launcher) -> str:
    return "having said:\n" + "\n".join(line.text for line in job.lines[-40:])


def _children_cpu_s() -> float:
    """Of all processes that have ended, also of children's children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _cpu_s(pid: int) -> float:
    try:
        return process_cpu_s(pid)
    except OSError:  # it has ended
        return 0.0


def line_of(row: dict[str, Any]) -> str:
    took = row["to_next_step_s"]
    spread = f"{statistics.median(took):6.2f}{max(took):7.2f}" if took else f"{'-':>6}{'-':>7}"
    again = f"{row['bodies_repeated']} ({row['bodies_repeated_beyond']} beyond)"
    return (
        f"{row['contender']:24}{row['kills_per_hour']:7g}{sum(row['kills'].values()):6d}{row['goodput'] * 100:9.1f}"
        f"{row['step_s']:8.3f} {spread}{row['start_s']:7.2f}{again:>17}{row['samples_lost']:6d}"
        f"{row['samples_doubled']:6d} {'same' if row['same_bits'] else 'OTHER':6}{row['cpu_s_per_step']:6.2f}"
    )


HEADER = (
    f"{'':24}{'kills/h':>7}{'kills':>6}{'goodput%':>9}{'step s':>8} {'to next step':>13}{'start':>7}{'again':>17}"
    f"{'lost':>6}{'twice':>6} {'bits':6}{'CPU':>6}"
)


def measure(name: str, options: argparse.Namespace, place: Place, folder: Path) -> list[dict[str, Any]]:
    """A contender at all rates: the rows, which are also printed."""
    contender, rows = CONTENDERS[name], list[dict[str, Any]]()
    if reason := contender.why_not(place):
        print(f"{contender.name:24}not measured: {reason}", flush=True)
        return [{"contender": contender.name, "not_measured": reason}]
    steps = max(_LAST + 2, round(options.minutes * 60 / options.step_s))
    calm: Outcome | None = None
    for per_hour in sorted({0.0, *options.kills_per_hour}):
        runs_folder = folder / f"{name}-{per_hour:g}"
        runs_folder.mkdir(parents=True)
        task = Task(
            str(runs_folder), place.ranks, contender.copies(place), steps, options.compute_s,
            checkpoint_every=max(1, round(options.checkpoint_s / options.step_s)),
        )  # fmt: skip
        load = os.getloadavg()[0]
        try:
            outcome = run(contender, place, task, per_hour, options.seed, options.kinds)
        except UnforeseenError as error:
            print(f"{contender.name:24}{per_hour:7g} FAILED: {error}", flush=True)
            rows.append({"contender": contender.name, "kills_per_hour": per_hour, "failed": str(error)})
            if calm is None:
                break
            continue
        calm = calm or outcome
        row = row_of(contender.name, per_hour, outcome, calm)
        rows.append({**row, "load": [load, os.getloadavg()[0]], "remark": contender.remark})
        print(line_of(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills-per-hour", type=float, nargs="+", default=[6, 30, 120])
    parser.add_argument("--minutes", type=float, default=5, help="of each run, if nobody disturbs")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what is killed")
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2, help="on each machine")
    parser.add_argument("--servers", type=int, default=2, help="CPU machines")
    parser.add_argument("--compute-s", type=float, default=0.9, help="of each step: the processor rests")
    parser.add_argument("--step-s", type=float, default=1.0, help="of a step, about: says how many steps to make")
    parser.add_argument("--checkpoint-s", type=float, default=10, help="between checkpoints, where there are some")
    parser.add_argument("--launcher-options", default="", help="more options of bpslaunch")
    parser.add_argument("--torchft-python", default="", help="an interpreter with torchft==0.2.0 and xxhash")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep what the ranks wrote and the jobs said there")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    place = Place(
        options.machines, options.ranks, options.servers, options.launcher_options.split(), options.torchft_python
    )
    print(f"{place.ranks} ranks on {place.machines} machines, {place.servers} CPU machines, seed {options.seed}")
    print(HEADER)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="goodput-") as temporary:
        for name in options.contenders:
            rows += measure(name, options, place, options.folder or Path(temporary))
    for name in options.contenders:
        print(f"{CONTENDERS[name].name}: {CONTENDERS[name].remark}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if any("failed" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
