"""A step with the optimizer's states in different places: time and memory.

    python -m benchmarks.hosted [--parameters 100] [--ranks 2] [--machines 1] [--rounds 5] [--json FILE]

A model of matrices, whose backward pass only writes gradients, so that a step is communication and AdamW. Contenders:
"on ranks" is bps.DistributedOptimizer, "hosted" the same with hosted=True, "hosted, step in backward" with
step_in_backward=True, too; "zero1" is torch's ZeroRedundancyOptimizer
with DistributedDataParallel, and "fsdp2" fully_shard, both over the backend "byteps", with gradients and states cut.
They take turns, each in fresh processes, because all together would not fit into memory. A step's time is the median,
over the rounds, of the slowest rank's median step; memory is the largest of one rank's peaks, and what all processes of
a machine have together at the end (shared memory once).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.turns import charged, launch, new_cost

RANK = Path(__file__).with_name("hosted_rank.py")
CONTENDERS = ("on ranks", "hosted", "hosted, step in backward", "zero1", "fsdp2")
STEPS = 4


def pss_bytes(pid: int) -> int:
    """A process's memory, its share of what is shared."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100, help="in millions")
    parser.add_argument("--ranks", type=int, default=2, help="on each machine")
    parser.add_argument("--machines", type=int, default=1, help="emulated on this one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    costs = {name: new_cost() for name in CONTENDERS}
    for _ in range(arguments.rounds):
        for name in CONTENDERS:
            program = [str(RANK), name, str(arguments.parameters), str(STEPS)]
            job = launch(name.replace(",", "").replace(" ", "-"), arguments.ranks, arguments.machines, program)
            try:
                job.meet()
                job.tell("steps")  # the first ones make memory
                with charged(job, costs[name], STEPS * arguments.parameters * 4e-3):
                    answers = job.tell("steps")
                seen[name]["ms"].append(max(answer["ms"] for answer in answers))
                seen[name]["rank_gb"].append(max(answer["peak_gb"] for answer in answers))
                seen[name]["all_gb"].append(sum(pss_bytes(pid) for pid in job.pids) / 1e9 / arguments.machines)
            finally:
                job.close()
    print(
        f"{arguments.parameters} million parameters of float32, AdamW, {arguments.ranks} ranks on each of "
        f"{arguments.machines} machine(s)"
    )
    print(f"{'':26}{'step, ms':>10}{'spread':>8}{'/ on ranks':>12}{'rank, GB':>10}{'machine, GB':>13}{'CPU s/GB':>10}")
    rows: list[dict[str, Any]] = []
    for name, found in seen.items():
        middle = {key: statistics.median(values) for key, values in found.items()}
        cost = statistics.median(costs[name]["all"])
        spread = max(found["ms"]) / min(found["ms"])
        over = middle["ms"] / statistics.median(seen["on ranks"]["ms"])
        print(
            f"{name:26}{middle['ms']:10.0f}{spread:8.2f}{over:12.2f}{middle['rank_gb']:10.2f}{middle['all_gb']:13.2f}"
            f"{cost:10.2f}"
        )
        rows.append({"contender": name, "cpu_s_per_gb": cost, "rounds": dict(found)})
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
