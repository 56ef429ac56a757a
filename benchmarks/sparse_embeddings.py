"""Steps of a large embedding table over slow links: bytes and time with sparse gradients, beside dense ones, and torch.

    python -m benchmarks.sparse_embeddings [--machines 4] [--ranks 1] [--mbit 100] [--rows 1000000] [--width 64]
        [--lookups 8192] [--zipf 1.0] [--steps 5] [--contenders rows gathered gloo dense gloo_dense] [--json FILE]

Hosts are network namespaces with shaped links (root needed). Each rank looks rows of a float32 table up, drawn by
Zipf's law: the row of rank k in 1/k**ZIPF of the lookups, and other rows in each step. "rows" is DistributedOptimizer
with sparse gradients, "gathered" the same with every rank's rows to all ranks, which is what it does with few rows;
"gloo" is torch's sparse all-reduce, which DistributedDataParallel uses. "dense" is DistributedOptimizer with dense
gradients, "gloo_dense" DistributedDataParallel over gloo with them: one step each. The optimizer is SGD. A turn is as
many steps as are counted, before them. "sent" is what a machine's link carries out in a step, with all headers, the
largest of all machines.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.cluster.contenders import Layout, our_job, torch_job
from benchmarks.cluster.hosts import cluster
from benchmarks.training_turn import turn
from benchmarks.turns import new_cost

ROOT = Path(__file__).parent.parent
CONTENDERS = ("rows", "gathered", "gloo", "dense", "gloo_dense")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with cluster([arguments.mbit] * arguments.machines) as hosts:
        for name in arguments.contenders:
            steps = 1 if "dense" in name else arguments.steps
            numbers = (arguments.rows, arguments.width, arguments.lookups, arguments.zipf, steps)
            program = ["-m", "benchmarks.sparse_embeddings_rank", name, *map(str, numbers)]
            start, cost = torch_job if name.startswith("gloo") else our_job, new_cost()
            job = start(name, Layout(hosts, ranks=arguments.ranks), program, {"PYTHONPATH": str(ROOT)})
            try:
                found = turn(job, hosts, len(hosts), steps, (cost, 1.0))
            finally:
                job.close()
            row = {"contender": name, "ms": found["ms"], "sent_mb": found["sent_mb"], "cpu_s": cost["all"][0]}
            rows.append({**row, "load": os.getloadavg()[0]})
            first = rows[0]
            print(
                f"| {name} | {row['ms']:.0f} | {row['ms'] / first['ms']:.2f} | {row['sent_mb']:.2f} "
                f"| {row['sent_mb'] / first['sent_mb']:.2f} | {row['cpu_s']:.2f} |",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1, help="on each machine")
    parser.add_argument("--mbit", type=float, default=100.0, help="of each link, each way")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lookups", type=int, default=8192, help="of each rank in a step")
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS[:4]))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(
        f"{arguments.machines} machines, ranks={arguments.ranks}, {arguments.mbit:g} Mbit/s each way, "
        f"{arguments.rows} rows of {arguments.width}, {arguments.lookups} lookups a rank, zipf={arguments.zipf:g}, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print("| contender | ms a step | of the first | MB sent a step | of the first | CPU s a step |")
    print("|---|---|---|---|---|---|")
    rows = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
