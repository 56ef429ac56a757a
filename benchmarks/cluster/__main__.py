"""Communication time across machines against the number of CPU machines: ours, servers only, gloo, theory.

    python -m benchmarks.cluster [--workers 4] [--servers 0 1 2 3 4] [--mbit 400] [--mb 64] [--rounds 3] [--json FILE]

Hosts are network namespaces with shaped links (root needed). Contenders take turns in the same hosts, round after
round. "t·B/M" is the time in units of the model's bytes over a link's bandwidth: the placement's optimum is
2n(n−1)/(n² + kn − 2k), a ring's 2(n−1)/n, the classical parameter server's n/k.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.cluster.contenders import counts_of, run_gloo, run_ours
from benchmarks.cluster.hosts import cluster
from byteps_py.placement.shares import Optimum


def spread(times: list[float]) -> float:
    """The largest over the smallest."""
    return max(times) / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--mbit", type=float, default=400)
    parser.add_argument("--mb", type=int, default=64, help="size of the one large tensor")
    parser.add_argument("--model", default="one", help="one (large tensor), or a model known to bps placement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--partition-bytes", type=int, help="default: as the product chooses")
    parser.add_argument("--credit", type=int, help="bytes in flight per worker machine; default: likewise")
    parser.add_argument("--skip-servers-only", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    n = arguments.workers
    counts = counts_of(arguments.model, arguments.mb << 20)
    unit_s = sum(counts) * 4 * 8 / (arguments.mbit * 1e6)  # M/B
    given = {"BYTEPS_PARTITION_BYTES": arguments.partition_bytes, "BYTEPS_SCHEDULING_CREDIT": arguments.credit}
    tuning = {name: str(value) for name, value in given.items() if value is not None}
    seen: dict[tuple[str, int], list[float]] = defaultdict(list)
    with cluster([arguments.mbit] * (n + max(arguments.servers))) as hosts:
        workers, spare = hosts[:n], hosts[n:]
        for _ in range(arguments.rounds):
            seen["gloo", 0] += run_gloo(workers, counts)
            for k in arguments.servers:
                seen["ours", k] += run_ours(workers, spare[:k], counts, tuning)
                if k and not arguments.skip_servers_only:
                    seen["servers only", k] += run_ours(
                        workers, spare[:k], counts, {**tuning, "BYTEPS_PLACEMENT": "servers-only"}
                    )
    gloo = statistics.median(seen["gloo", 0])
    print(
        f"n = {n}, {sum(counts) * 4 / 1e6:.0f} MB in {len(counts)} tensors, {arguments.mbit:g} Mbit/s each way; "
        + (", ".join(f"{name}={value}" for name, value in tuning.items()) or "default settings")
    )
    print(f"gloo {gloo:.3f} s = {gloo / unit_s:.3f} M/B (ring's optimum {2 * (n - 1) / n:.3f})")
    print(
        f"spread of gloo's rounds ×{spread(seen['gloo', 0]):.3f}; ours, of each k: "
        + ", ".join(f"×{spread(seen['ours', k]):.3f}" for k in arguments.servers)
    )
    print(" k   ours s  t·B/M  optimum  ours/optimum  gain over gloo (theory)  servers only s  gain (theory)")
    rows = []
    for k in arguments.servers:
        optimum = Optimum(n, k)
        ours = statistics.median(seen["ours", k])
        row: dict[str, Any] = {
            "n": n, "k": k, "unit_s": unit_s, "ours_s": seen["ours", k], "gloo_s": seen["gloo", 0],
            "servers_only_s": seen["servers only", k],
        }  # fmt: skip
        rows.append(row)
        line = (
            f"{k:2d} {ours:8.3f} {ours / unit_s:6.3f} {float(optimum.time):8.3f} {ours / unit_s / optimum.time:13.3f}"
        )
        line += f" {gloo / ours:14.3f} ({float(optimum.gain_over_ring):.3f})"
        if seen["servers only", k]:
            only = statistics.median(seen["servers only", k])
            line += f" {only:18.3f} {only / ours:8.3f} ({float(optimum.gain_over_servers_only):.3f})"
        print(line)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
