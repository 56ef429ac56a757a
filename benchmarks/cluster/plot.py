"""Draws what ``python -m benchmarks.cluster --json`` wrote: communication time against the number of CPU machines.
It is that of the first contender, for the largest size.

python -m benchmarks.cluster.plot RESULT.json PICTURE.svg     (needs matplotlib: pip install '.[benchmarks]')
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from byteps_py.placement.shares import Optimum


def main() -> None:
    source, target = map(Path, sys.argv[1:3])
    rows = json.loads(source.read_text())
    largest = max(row["bytes"] for row in rows)
    rows = [row for row in rows if row["bytes"] == largest]
    n, unit_s = rows[0]["n"], rows[0]["unit_s"]
    if not unit_s:
        raise SystemExit(f"{source} is of loopback, which has no rate to compare with: run it with --mbit")
    ks = [row["k"] for row in rows]
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    gloo = statistics.median(rows[0]["gloo_s"]) / unit_s
    axes.axhline(gloo, color="tab:gray", label="ring all-reduce (gloo), measured")
    only = [(row["k"], statistics.median(row["servers_only_s"]) / unit_s) for row in rows if row["servers_only_s"]]
    if only:  # the benchmark may have left them out
        label = "servers on CPU machines only, measured"
        axes.plot(*zip(*only, strict=True), "s-", color="tab:orange", label=label)
    ours = [statistics.median(row["ours_s"]) / unit_s for row in rows]
    axes.plot(ks, ours, "o-", color="tab:blue", label="byteps_py, measured")
    axes.plot(ks, [float(Optimum(n, k).time) for k in ks], "--", color="black", label="theory: 2n(n−1) / (n²+kn−2k)")
    axes.set_xlabel(f"CPU machines k, beside n = {n} GPU machines")
    axes.set_ylabel("time of a reduction, in M/B")
    axes.set_xticks(ks)
    axes.set_ylim(0, 1.1 * max(gloo, *(time for _, time in only)))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
