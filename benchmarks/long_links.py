"""All-reduces over links that are long and lose packets, beside gloo: what part of the link's rate is used.

    python -m benchmarks.long_links [--delays-ms 0 50 100] [--losses 0 0.1 1] [--mbit 1000] [--mb 64] [--rounds 3]
        [--workers 2] [--calls all_reduce push_pull_inplace] [--json FILE]

Hosts are network namespaces with shaped links (root needed). A delay is that of one direction, and a round trip takes
twice as long; of each packet that a host sends, a loss is the chance, in percent, that it is lost on its way
(benchmarks/cluster/delay_line.c). The system's algorithm is CUBIC, as on most machines.

"ours" is byteps_py as it is installed; "one" has BYTEPS_CONNECTIONS_PER_LINK=1 and BYTEPS_CONGESTION_CONTROL=system.
all_reduce goes from rank to rank, push_pull through the services. All jobs are alive at once and take turns, round
after round. A figure is the median call. Where packets are lost, gloo and "one" sum ``--lossy-mb`` instead, as they
take minutes for more (at most 8 MB would be summed many times over); their rates are a little flattered by that.

"share" is of the link's rate: with n machines, each sends 2(n-1)/n of the tensor. A first call of each is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.cluster.contenders import Layout, counts_of
from benchmarks.cluster.hosts import cluster
from benchmarks.cluster.measure import Found, turns

_ONE = {"BYTEPS_CONNECTIONS_PER_LINK": "1", "BYTEPS_CONGESTION_CONTROL": "system"}


@dataclass
class Row:
    """``share``: of the link's rate. ``cpu_s_per_gb``: of all processes of a machine, per GB of tensor."""

    delay_ms: float
    loss_percent: float
    contender: str
    call: str
    mb: int
    median_s: float
    slowest_s: float
    mbit: float
    share: float
    cpu_s_per_gb: float
    load: float


def measure(arguments: argparse.Namespace, delay_ms: float, loss_percent: float) -> list[Row]:
    n = arguments.workers
    contenders = [(name, call) for call in arguments.calls for name in arguments.contenders if name != "gloo"]
    contenders += [("gloo", "gloo")] if "gloo" in arguments.contenders else []
    found = {each: Found() for each in contenders}
    slow_mb = arguments.lossy_mb if loss_percent else arguments.mb
    sizes = {each: arguments.mb if each[0] == "ours" else slow_mb for each in contenders}
    with cluster([arguments.mbit] * n, delay_ms, loss_percent) as hosts, contextlib.ExitStack() as stack:
        jobs = {}
        for name in arguments.contenders:
            kind, own = ("gloo", None) if name == "gloo" else ("ours", _ONE if name == "one" else None)
            jobs[name] = stack.enter_context(turns(kind, Layout(hosts), arguments.repeats, own))
        for number in range(arguments.rounds + 1):
            for name, call in contenders:
                into = found[name, call] if number else Found()
                jobs[name].take(call, counts_of("one", sizes[name, call] << 20), into)
    rows = []
    for (name, call), seen in found.items():
        megabits = sizes[name, call] * 8 * 1.048576 * 2 * (n - 1) / n
        mbit = megabits / seen.median_s
        rows.append(
            Row(
                delay_ms, loss_percent, name, call, sizes[name, call], seen.median_s, max(seen.times_s), mbit,
                mbit / arguments.mbit, statistics.median(seen.cpu_s_per_gb["all"]), os.getloadavg()[0],
            )
        )  # fmt: skip
    return rows


def show(rows: Sequence[Row]) -> None:
    for row in rows:
        print(
            f"| {row.delay_ms:g} | {row.loss_percent:g} | {row.contender}: {row.call} | {row.mb} | {row.median_s:.2f} "
            f"| {row.slowest_s:.2f} | {row.mbit:.0f} | {100 * row.share:.0f} % | {row.cpu_s_per_gb:.1f} "
            f"| {row.load:.1f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delays-ms", type=float, nargs="+", default=[0.0, 50.0, 100.0])
    parser.add_argument("--losses", type=float, nargs="+", default=[0.0, 0.1, 1.0])
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--lossy-mb", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1, help="calls of a turn")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--calls", nargs="+", default=["all_reduce", "push_pull_inplace"])
    parser.add_argument("--contenders", nargs="+", default=["ours", "one", "gloo"], choices=["ours", "one", "gloo"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"{arguments.workers} machines, {arguments.mbit:g} Mbit/s each way, load {os.getloadavg()[0]:.1f}")
    print("| delay ms | loss % | what | MB | median s | slowest | Mbit/s | share | CPU s/GB | load |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    rows: list[Row] = []
    for delay_ms in arguments.delays_ms:
        for loss_percent in arguments.losses:
            found = measure(arguments, delay_ms, loss_percent)
            show(found)
            rows += found
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
