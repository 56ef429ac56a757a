"""``python -m tests.simulator --seeds A:B``: run these seeds, print each one that breaks an invariant."""

from __future__ import annotations

import argparse
import os
import sys
import time

from . import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", metavar="A:B")
    parser.add_argument("--tail", type=int, default=60, help="lines of the log to print of a failing seed")
    parser.add_argument("--failures", type=int, default=5, help="stop after so many failing seeds")
    arguments = parser.parse_args()
    first, _, end = arguments.seeds.partition(":")
    seeds = range(int(first), int(end or int(first) + 1))
    began_s = time.monotonic()
    failed, events, faults, trials = 0, 0, 0, 0
    for seed in seeds:
        report = run(seed)
        events += report.events
        faults += bool(report.fault)
        trials += len(report.trials)
        if report.violation:
            failed += 1
            print("".join(report.log.splitlines(keepends=True)[-arguments.tail :]))
            print(f"seed {seed} ({report.shape}; {report.fault or 'no fault'}; {'; '.join(report.trials)}):")
            print(f"{report.violation}\n")
            if failed >= arguments.failures:
                break
        if (seed - seeds.start + 1) % 1000 == 0:
            print(f"{seed + 1 - seeds.start} seeds, {failed} failed, {time.monotonic() - began_s:.0f} s", flush=True)
    print(
        f"{seed + 1 - seeds.start} seeds ({faults} with a fault, {trials} trials), {events} events, {failed} failed, "
        f"{time.monotonic() - began_s:.1f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    os.nice(10)
    sys.exit(main())
