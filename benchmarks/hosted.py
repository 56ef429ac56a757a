"""A step with the optimizer's states in different places: time and memory.

    python -m benchmarks.hosted [--parameters 100] [--ranks 2] [--machines 1] [--mbit 1000] [--rounds 5]
        [--json FILE]

A model of matrices, whose backward pass only writes gradients, so that a step is communication and AdamW. Contenders:
"on ranks" is bps.DistributedOptimizer, "hosted" the same with hosted=True, "hosted, step in backward" with
step_in_backward=True, too; "zero1" is torch's ZeroRedundancyOptimizer with DistributedDataParallel, and "fsdp2"
fully_shard with CPUOffloadPolicy, both over the backend "byteps".
They take turns, each in fresh processes, because all together would not fit into memory. A step's time is the median,
over the rounds, of the slowest rank's median step; memory is the largest of one rank's peaks, and what all processes of
a machine have together at the end (shared memory once). "sent" is what a machine's link carries out in a step, headers
included, the largest of all machines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.cluster.contenders import Layout, our_job
from benchmarks.cluster.hosts import cluster
from benchmarks.training_turn import turn
from benchmarks.turns import launch, new_cost

RANK = Path(__file__).with_name("hosted_rank.py")
CONTENDERS = ("on ranks", "hosted", "hosted, step in backward", "zero1", "fsdp2")
STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100, help="in millions")
    parser.add_argument("--ranks", type=int, default=2, help="on each machine")
    parser.add_argument("--machines", type=int, default=1, help="several: network namespaces (root needed)")
    parser.add_argument("--mbit", type=float, default=1000, help="of links between several; 0: as fast as it goes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    costs = {name: new_cost() for name in CONTENDERS}
    with contextlib.ExitStack() as stack:
        several = arguments.machines > 1
        hosts = stack.enter_context(cluster([arguments.mbit] * arguments.machines)) if several else []
        for _ in range(arguments.rounds):
            for name in CONTENDERS:
                program = [str(RANK), name, str(arguments.parameters), str(STEPS)]
                if several:
                    job = our_job(name.replace(" ", "-"), Layout(hosts, ranks=arguments.ranks), program)
                else:
                    job = launch(name.replace(" ", "-"), arguments.ranks, 1, program)
                try:
                    cost = costs[name], arguments.parameters * 4e-3
                    for key, value in turn(job, hosts, arguments.machines, STEPS, cost).items():
                        seen[name][key].append(value)
                finally:
                    job.close()
    print(
        f"{arguments.parameters} million parameters of float32, AdamW, {arguments.ranks} ranks on each of "
        f"{arguments.machines} machine(s)"
    )
    heads = {
        "step, ms": 10,
        "spread": 8,
        "/ on ranks": 12,
        "sent, MB": 10,
        "rank, GB": 10,
        "machine, GB": 13,
        "CPU s/GB": 10,
    }
    print(" " * 26 + "".join(f"{head:>{width}}" for head, width in heads.items()))
    rows: list[dict[str, Any]] = []
    for name, found in seen.items():
        middle = {key: statistics.median(values) for key, values in found.items()}
        cpu_s = statistics.median(costs[name]["all"])
        spread = max(found["ms"]) / min(found["ms"])
        over = middle["ms"] / statistics.median(seen["on ranks"]["ms"])
        print(
            f"{name:26}{middle['ms']:10.0f}{spread:8.2f}{over:12.2f}{middle['sent_mb']:10.1f}"
            f"{middle['rank_gb']:10.2f}{middle['machine_gb']:13.2f}{cpu_s:10.2f}"
        )
        rows.append({"contender": name, "cpu_s_per_gb": cpu_s, "rounds": dict(found)})
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
