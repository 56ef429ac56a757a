"""Communication time across machines against the number of CPU machines: ours, servers only, gloo, theory.

    python -m benchmarks.cluster [--workers 4] [--servers 0 1 2 3 4] [--mbit 400] [--mb 32] [--rounds 3] [--json FILE]

Hosts are network namespaces with shaped links (root needed). Contenders take turns in the same hosts, round after
round. "t·B/M" is the time in units of the model's bytes over a link's bandwidth: the placement's optimum is
2n(n−1)/(n² + kn − 2k), a ring's 2(n−1)/n, the classical parameter server's n/k.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster.hosts import Host, cluster
from byteps_py.placement.models import load_model
from byteps_py.placement.shares import Optimum

RANK = Path(__file__).with_name("rank.py")
PORT = 9700


def counts_of(model: str, nbytes: int) -> list[int]:
    """Elements of each float32 tensor: one large tensor, or a model's list."""
    if model == "one":
        return [nbytes // 4]
    return [math.prod(shape) for _, shape in load_model(model)]


def start(host: Host, arguments: Sequence[str], variables: dict[str, str], **how: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(host.command(arguments), env=environment, text=True, **how)


def run_ours(workers: list[Host], servers: list[Host], counts: list[int], variables: dict[str, str]) -> list[float]:
    common = {
        "DMLC_PS_ROOT_URI": workers[0].address,
        "DMLC_PS_ROOT_PORT": str(PORT),
        "DMLC_NUM_WORKER": str(len(workers)),
        "DMLC_NUM_SERVER": str(len(servers)),
        "BYTEPS_LOCAL_SIZE": "1",
        "BYTEPS_SECRET": "benchmark",
        **variables,
    }
    launch = [sys.executable, "-m", "byteps_py.launch"]
    program = [sys.executable, str(RANK), "ours", "--counts", ",".join(map(str, counts))]
    services = [start(workers[0], launch, {**common, "DMLC_ROLE": "scheduler"})]
    services += [start(h, launch, {**common, "DMLC_ROLE": "server", "DMLC_NODE_HOST": h.address}) for h in servers]
    ranks = []
    for index, host in enumerate(workers):
        own = {**common, "DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(index), "DMLC_NODE_HOST": host.address}
        ranks.append(start(host, [*launch, *program], own, stdout=subprocess.PIPE))
    return finish(ranks, services)


def run_gloo(workers: list[Host], counts: list[int]) -> list[float]:
    program = [sys.executable, str(RANK), "gloo", "--counts", ",".join(map(str, counts))]
    ranks = []
    for index, host in enumerate(workers):
        own = {
            "RANK": str(index),
            "WORLD_SIZE": str(len(workers)),
            "MASTER_ADDR": workers[0].address,
            "MASTER_PORT": str(PORT + 1),
            "GLOO_SOCKET_IFNAME": host.interface,
        }
        ranks.append(start(host, program, own, stdout=subprocess.PIPE))
    return finish(ranks, [])


def finish(ranks: list[subprocess.Popen[str]], services: list[subprocess.Popen[str]]) -> list[float]:
    """The times that rank 0 printed. Raises SystemExit if anything failed."""
    try:
        output = ranks[0].communicate(timeout=300)[0]
        codes = [process.wait(60) for process in [*ranks, *services]]
    finally:
        for process in [*ranks, *services]:
            process.kill()
    if any(codes):
        raise SystemExit(f"a process failed: exit codes {codes}")
    times: list[float] = json.loads(output)["times_s"]
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--mbit", type=float, default=400)
    parser.add_argument("--mb", type=int, default=32, help="size of the one large tensor")
    parser.add_argument("--model", default="one", help="one (large tensor), or a model known to bps placement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--partition-bytes", type=int, help="default: as the product chooses")
    parser.add_argument("--credit", type=int, help="bytes in flight per worker machine; default: likewise")
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
                if k:
                    seen["servers only", k] += run_ours(
                        workers, spare[:k], counts, {**tuning, "BYTEPS_PLACEMENT": "servers-only"}
                    )
    gloo = statistics.median(seen["gloo", 0])
    print(
        f"n = {n}, {sum(counts) * 4 / 1e6:.0f} MB in {len(counts)} tensors, {arguments.mbit:g} Mbit/s each way; "
        + (", ".join(f"{name}={value}" for name, value in tuning.items()) or "default settings")
    )
    print(f"gloo {gloo:.3f} s = {gloo / unit_s:.3f} M/B (ring's optimum {2 * (n - 1) / n:.3f})")
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
        if k:
            only = statistics.median(seen["servers only", k])
            line += f" {only:18.3f} {only / ours:8.3f} ({float(optimum.gain_over_servers_only):.3f})"
        print(line)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
