"""Every collective of torch.distributed: the backend "byteps" beside gloo, on one machine or over shaped links.

    python -m benchmarks.collectives [--ranks 2] [--rounds 3] [--sizes …] [--json FILE]
    python -m benchmarks.collectives --hosts 4 --mbit 400 --sizes 67108864 --collectives all_gather reduce_scatter

With --hosts, each rank is on a host of its own (a network namespace, so root is needed), and beside the time stands
what it is of the optimum: an all-gather, a reduce-scatter or an all-to-all of n machines can't take less than
(n−1)/n of the bytes over a link's bandwidth, a broadcast or a scatter not less than all the root has to send. The
contenders take turns, round after round, each in fresh processes; a figure is the median over the rounds of the
median call.
"""

from __future__ import annotations

import argparse
import contextlib
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

RANK = Path(__file__).with_name("collectives_rank.py")
BACKENDS = ("byteps", "gloo")
SIZES = [4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
_LIMIT_S = 600
#: Of one machine's link, in units of the size over the bandwidth.
OPTIMA = {
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "send_recv": lambda n: 2.0,
}

Seen = dict[tuple[str, str, int], list[float]]


def run(backend: str, ranks: int, hosts: Sequence[Host], program: Sequence[str], port: int) -> list[dict[str, Any]]:
    """One job; returns rank 0's lines. Raises SystemExit if a rank fails."""
    processes = []
    for rank in range(ranks):
        place = {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        command = [sys.executable, str(RANK), backend, *program]
        if hosts:
            host = hosts[rank]
            place = {
                "MASTER_ADDR": hosts[0].address, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank),
                "GROUP_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": host.interface, "DMLC_NODE_HOST": host.address,
                "BYTEPS_SECRET": "secret of the benchmark", "TORCH_CPP_LOG_LEVEL": "ERROR",
            }  # fmt: skip
            command = host.command(command)
        else:
            place |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
        torchrun = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
        torchrun["TORCHELASTIC_RUN_ID"] = f"collectives-{port}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **torchrun, **place}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        output = processes[0].communicate(timeout=_LIMIT_S)[0]
        codes = [process.wait(60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise SystemExit(f"{backend} failed: exit codes {codes}")
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def show(seen: Seen, ranks: int, mbit: float) -> list[dict[str, Any]]:
    rows = []
    over = f", 1 on each host, {mbit:g} Mbit/s each way" if mbit else " on one machine"
    print(f"{ranks} ranks{over}; time of one call, (spread over the rounds)")
    print(f"{'collective':16}{'bytes':>10}{'byteps':>24}{'gloo':>24}{'gloo / byteps':>15}" + " / optimum" * bool(mbit))
    for collective, nbytes in dict.fromkeys((name, size) for _, name, size in seen):
        row: dict[str, Any] = {"ranks": ranks, "mbit": mbit, "collective": collective, "bytes": nbytes}
        cells = []
        for backend in BACKENDS:
            times = seen[backend, collective, nbytes]
            row[backend] = statistics.median(times)
            row[f"{backend}_rounds_s"] = times
            cells.append(f"{row[backend] * 1e6:12.0f} µs (×{max(times) / min(times):4.2f})")
        line = f"{collective:16}{nbytes:10d}" + "".join(f"{cell:>24}" for cell in cells)
        line += f"{row['gloo'] / row['byteps']:15.2f}"
        if mbit and nbytes and collective in OPTIMA:
            row["optimum_s"] = OPTIMA[collective](ranks) * nbytes * 8 / (mbit * 1e6)
            line += f"{row['byteps'] / row['optimum_s']:10.3f}"
        print(line)
        rows.append(row)
    large = [row for row in rows if row["bytes"] >= 64 << 10 and not math.isnan(row["gloo"])]
    behind = [f"{row['collective']} {row['bytes']}" for row in large if row["byteps"] > row["gloo"]]
    print(f"behind gloo from 64 KB up: {', '.join(behind) or 'nowhere'}")
    return rows


def without_nan(found: Any) -> Any:
    """None instead of what a backend has not: JSON knows no NaN."""
    if isinstance(found, dict):
        return {key: without_nan(value) for key, value in found.items()}
    if isinstance(found, list):
        return [without_nan(value) for value in found]
    return None if isinstance(found, float) and math.isnan(found) else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=0, help="one rank on each, over shaped links")
    parser.add_argument("--mbit", type=float, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each collective and size, about")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--collectives", nargs="+")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ranks = arguments.hosts or arguments.ranks
    program = ["--seconds", str(arguments.seconds), "--sizes", *map(str, arguments.sizes)]
    if arguments.collectives:
        program += ["--collectives", *arguments.collectives]
    seen: Seen = defaultdict(list)
    shaped = cluster([arguments.mbit] * arguments.hosts) if arguments.hosts else contextlib.nullcontext([])
    with shaped as hosts:
        for round_ in range(arguments.rounds):
            for number, backend in enumerate(BACKENDS):
                port = 29_600 + 10 * round_ + number
                for line in run(backend, ranks, hosts, program, port):
                    seen[backend, line["collective"], line["bytes"]].append(line["median_s"])
    rows = show(seen, ranks, arguments.mbit if arguments.hosts else 0.0)
    if arguments.json:
        arguments.json.write_text(json.dumps(without_nan(rows), indent=1))


if __name__ == "__main__":
    main()
