"""FSDP2 on several machines: a step's time, its bytes between machines, and memory.

    python -m benchmarks.fsdp [--parameters 20] [--ranks 2] [--machines 2] [--mbit 1000] [--rounds 3] [--json FILE]

Hosts are network namespaces with shaped links (root needed). Contenders are fully_shard over gloo, over the backend
"byteps", and over that with bps.parallel.fsdp.cache_parameters ("kept"). Each layer is a matrix of a million
parameters of float32; --micro-batches N accumulates gradients over N forward and backward passes. Contenders take
turns, each in fresh processes. A step's time is the median, over the rounds, of the slowest rank's median step; "sent"
is what a machine's link carries out in a step, headers included, the largest of all machines; memory is the largest of
one rank's peaks, and what all processes of a machine have together at the end (shared memory once).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.cluster.contenders import Layout, our_job, torch_job
from benchmarks.cluster.hosts import cluster
from benchmarks.training_turn import turn
from benchmarks.turns import new_cost

ROOT = Path(__file__).parent.parent
CONTENDERS = ("gloo", "byteps", "kept")
STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=20, help="in millions")
    parser.add_argument("--ranks", type=int, default=2, help="on each machine")
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=1000, help="of each link, each way; 0: as fast as it goes")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    costs = {name: new_cost() for name in arguments.contenders}
    with cluster([arguments.mbit] * arguments.machines) as hosts:
        layout = Layout(hosts, ranks=arguments.ranks)
        for _ in range(arguments.rounds):
            for name in arguments.contenders:
                sizes = [str(each) for each in (arguments.parameters, arguments.micro_batches, STEPS)]
                program = ["-m", "benchmarks.fsdp_rank", name, *sizes]
                start = torch_job if name == "gloo" else our_job
                job = start(name, layout, program, {"PYTHONPATH": str(ROOT)})
                try:
                    for key, value in turn(job, hosts, len(hosts), STEPS, (costs[name], 1.0)).items():
                        seen[name][key].append(value)
                finally:
                    job.close()
    rate = f"{arguments.mbit:g} Mbit/s each way" if arguments.mbit else "unshaped links"
    print(
        f"{arguments.parameters} million parameters of float32, AdamW, {arguments.ranks} ranks on each of "
        f"{arguments.machines} machine(s), {arguments.micro_batches} micro-batch(es), {rate}"
    )
    print(f"{'':8}{'step, ms':>10}{'spread':>8}{'sent, MB':>10}{'rank, GB':>10}{'machine, GB':>13}{'CPU s a step':>14}")
    rows: list[dict[str, Any]] = []
    for name, found in seen.items():
        middle = {key: statistics.median(values) for key, values in found.items()}
        cpu_s = statistics.median(costs[name]["all"])
        print(
            f"{name:8}{middle['ms']:10.0f}{max(found['ms']) / min(found['ms']):8.2f}{middle['sent_mb']:10.1f}"
            f"{middle['rank_gb']:10.2f}{middle['machine_gb']:13.2f}{cpu_s:14.2f}"
        )
        rows.append({"contender": name, "cpu_s_a_step": cpu_s, "rounds": dict(found)})
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
