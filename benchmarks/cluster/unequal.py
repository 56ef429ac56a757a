"""Unequal links: shares by the linear program beside the formula's, which takes all links to be equal, and gloo.

    python -m benchmarks.cluster.unequal [--workers 400 400 400 200] [--servers 400 100] [--mb 64] [--json FILE]

By default one worker has half, and one CPU machine a quarter of the others' rate. "ours, measured" finds that out
by itself; "ours, told equal" is told that every link has the first one's rate, and so uses the fixed formula.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

from benchmarks.cluster.contenders import Layout, counts_of
from benchmarks.cluster.hosts import cluster
from benchmarks.cluster.measure import Found, turns
from byteps_py.placement.link_optimum import LinkOptimum
from byteps_py.placement.shares import Optimum

REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=float, nargs="+", default=[400.0, 400.0, 400.0, 200.0], metavar="MBIT")
    parser.add_argument("--servers", type=float, nargs="*", default=[400.0, 100.0], metavar="MBIT")
    parser.add_argument("--mb", type=int, default=64, help="size of the one tensor")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    n, k = len(arguments.workers), len(arguments.servers)
    counts = counts_of("one", arguments.mb << 20)
    megabits = sum(counts) * 32 / 1e6
    best = LinkOptimum(arguments.servers, arguments.workers)
    theory = {
        "ours, measured": float(best.time) * megabits,
        "ours, told equal": float(best.time_of(Optimum(n, k).shares)) * megabits,
        # Every machine sends and receives 2(n−1)/n of the model: the slowest decides.
        "gloo (ring)": float(Fraction(2 * (n - 1), n) / Fraction(min(arguments.workers))) * megabits,
    }
    seen: dict[str, Found] = defaultdict(Found)
    with cluster([*arguments.workers, *arguments.servers]) as hosts:
        workers, servers = hosts[:n], hosts[n:]
        equal = dict.fromkeys(hosts, arguments.workers[0])
        cases = {
            "ours, measured": ("ours", "session", Layout(workers, servers)),
            "ours, told equal": ("ours", "session", Layout(workers, servers, told_mbit=equal)),
            "gloo (ring)": ("gloo", "gloo", Layout(workers)),
        }
        for _ in range(arguments.rounds):
            for name, (kind, call, layout) in cases.items():
                with turns(kind, layout, REPEATS, {"BYTEPS_REBALANCE_LINKS": "0"}) as contender:
                    contender.take(call, counts, seen[name])
    print(f"{arguments.mb} MB; workers {arguments.workers}, CPU machines {arguments.servers} Mbit/s each way")
    print("shares, CPU machines first: " + ", ".join(f"{float(share):.3f}" for share in best.shares))
    print(f"{'':18} {'s (min to max)':>26}  {'theory s':>8}  {'over theory':>11}  {'over optimum':>12}")
    optimum = theory["ours, measured"]
    for name, limit in theory.items():
        times = seen[name].times_s
        median = statistics.median(times)
        spread = f"{median:.3f} ({min(times):.3f} to {max(times):.3f})"
        print(f"{name:18} {spread:>26}  {limit:8.3f}  {median / limit:11.3f}  {median / optimum:12.3f}")
    if arguments.json:
        rows = {name: {"times_s": seen[name].times_s, "theory_s": limit} for name, limit in theory.items()}
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
