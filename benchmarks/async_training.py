"""Asynchronous training beside synchronous, with one machine that is slower than the others.

    python -m benchmarks.async_training [--slow 10] [--step-ms 25] [--seconds 15] [--rounds 2] [--contenders …]
    python -m benchmarks.async_training --mbit 400 --width 1400 --steps 20     the cost of an exchange

Four machines and two CPU machines, which are processes of this one, or with ``--mbit`` network namespaces with shaped
links (root needed). A rank's step takes ``--step-ms`` beside communication, asleep, as a rank whose GPU computes; that
of the last machine takes ``--slow`` times as long. "gloo" is torch's DistributedDataParallel, "sync" is
DistributedOptimizer, "async" AsyncOptimizer, "async_16" the same with staleness=16. Each contender trains a network of
three layers on the outputs of another one, from the same start, for ``--seconds``, in turn; or it makes ``--steps``
without pauses. "steps/s" are of the fastest and the slowest machine, "samples/s" of all; "loss" is of samples that are
not trained on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cluster.contenders import Layout, our_job, torch_job
from benchmarks.cluster.hosts import Host, LoopbackHost, cluster
from benchmarks.turns import charged, new_cost

ROOT = Path(__file__).parent.parent
CONTENDERS = ("gloo", "sync", "async", "async_16")
MACHINES, SERVERS, SAMPLES = 4, 2, 64


@contextlib.contextmanager
def hosts_of(mbit: float) -> Iterator[list[Host]]:
    if mbit:
        with cluster([mbit] * (MACHINES + SERVERS)) as hosts:
            yield list(hosts)
    else:
        yield [LoopbackHost(i) for i in range(MACHINES + SERVERS)]


def turn(arguments: argparse.Namespace, name: str, hosts: list[Host]) -> dict[str, Any]:
    step_s = 0.0 if arguments.steps else arguments.step_ms / 1e3
    sizes = (arguments.width, step_s, step_s * arguments.slow, arguments.seconds, arguments.steps)
    program = ["-m", "benchmarks.async_training_rank", name, *map(str, sizes)]
    variables = {"PYTHONPATH": str(ROOT)}
    if name == "gloo":
        job = torch_job(name, Layout(hosts[:MACHINES]), program, variables)
    else:
        job = our_job(name, Layout(hosts[:MACHINES], hosts[MACHINES:]), program, variables)
    cost = new_cost()
    try:
        job.meet()
        job.tell("begin")
        before = statistics.mean(job.tell("loss"))
        with charged(job, cost, 1.0):
            answers = job.tell("steps")
        loss = statistics.mean(job.tell("loss"))
    finally:
        job.close()
    rates = [made / seconds for made, seconds in answers]
    total = sum(made for made, _ in answers)
    return {
        "contender": name,
        "fastest": max(rates),
        "slowest": min(rates),
        "samples": SAMPLES * sum(rates),
        "loss": loss / before,
        "cpu_ms_a_step": cost["all"][0] * 1e3 / total,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", type=float, default=10.0)
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--steps", type=int, default=0, help="of all, as quick as they are; 0: see --seconds")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--mbit", type=float, default=0.0, help="of each link; 0: no links")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with hosts_of(arguments.mbit) as hosts:
        for _ in range(arguments.rounds):
            rows += [turn(arguments, name, hosts) for name in arguments.contenders]
    links = f"links of {arguments.mbit:g} Mbit/s" if arguments.mbit else "no links"
    speeds = "no pauses" if arguments.steps else f"one {arguments.slow:g} × slower"
    print(f"4 machines, {speeds}, 2 CPU machines, {links}, {arguments.rounds} rounds")
    print("| contender | steps/s, fastest | slowest | samples/s | × more | loss, of the start | CPU ms a step |")
    print("|---|---|---|---|---|---|---|")
    first = None
    for name in arguments.contenders:
        mine = [row for row in rows if row["contender"] == name]
        found = {key: statistics.median(row[key] for row in mine) for key in mine[0] if key != "contender"}
        first = first or found["samples"]
        print(
            f"| {name} | {found['fastest']:.1f} | {found['slowest']:.1f} | {found['samples']:.0f} "
            f"| {found['samples'] / first:.2f} | {found['loss']:.4f} | {found['cpu_ms_a_step']:.1f} |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
