"""``python -m tests.simulator --seeds A:B``: run these seeds, print each one that breaks an invariant."""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time

from . import KINDS, Cluster, run
from .all_mutations import ALL_MUTATIONS
from .parts import Parts


def main() -> int:
    known = {mutation.__name__: mutation for mutation in ALL_MUTATIONS}
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", metavar="A:B")
    parser.add_argument("--tail", type=int, default=60, help="lines of the log to print of a failing seed")
    parser.add_argument("--failures", type=int, default=5, help="stop after so many failing seeds")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the seeds; 0: one per core")
    parser.add_argument("--kind", choices=KINDS, default="fixed", help="of job: see KINDS")
    parser.add_argument("--mutation", choices=sorted(known), default="", help="run a core that is broken so")
    arguments = parser.parse_args()
    first, _, end = arguments.seeds.partition(":")
    seeds = range(int(first), int(end or int(first) + 1))
    jobs = arguments.jobs or len(os.sched_getaffinity(0))
    if jobs > 1 and len(seeds) > 1:
        options = ["--tail", str(arguments.tail), "--failures", str(arguments.failures)]
        options += ["--kind", arguments.kind]
        if arguments.mutation:
            options += ["--mutation", arguments.mutation]
        return _share(seeds, jobs, options)
    parts = known.get(arguments.mutation, Parts)
    return _run(seeds, KINDS[arguments.kind], parts, arguments.tail, arguments.failures)


def _share(seeds: range, jobs: int, options: list[str]) -> int:
    bounds = [seeds.start + len(seeds) * i // jobs for i in range(jobs + 1)]
    command = [sys.executable, "-m", __spec__.parent or "", *options]
    slices = [f"{bounds[i]}:{bounds[i + 1]}" for i in range(jobs) if bounds[i] < bounds[i + 1]]
    processes = [subprocess.Popen([*command, "--seeds", each]) for each in slices]
    return max(process.wait() for process in processes)


def _run(seeds: range, kind: type[Cluster], parts: type[Parts], tail: int, failures: int) -> int:
    began_s = time.monotonic()
    failed, events, faults, trials, done = 0, 0, 0, 0, 0
    gc.disable()  # a run leaves few cycles, and collecting them takes a tenth of the time
    for seed in seeds:
        report = run(seed, kind, parts)
        done += 1
        events += report.events
        faults += bool(report.fault)
        trials += len(report.trials)
        if report.violation:
            failed += 1
            print("".join(report.log.splitlines(keepends=True)[-tail:]))
            print(f"seed {seed} ({report.shape}; {report.fault or 'no fault'}; {'; '.join(report.trials)}):")
            print(f"{report.violation}\n", flush=True)
            if failed >= failures:
                break
        if done % 50 == 0:
            gc.collect()
        if done % 1000 == 0:
            print(f"{done} seeds, {failed} failed, {time.monotonic() - began_s:.0f} s", flush=True)
    print(
        f"{done} seeds ({faults} with a fault, {trials} trials), {events} events, {failed} failed, "
        f"{time.monotonic() - began_s:.1f} s, {time.process_time():.1f} s of processor"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    os.nice(5)
    sys.exit(main())
