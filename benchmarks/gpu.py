"""Training on GPUs: a step of a Transformer whose gradients byteps_py or gloo adds, and sums of one tensor.

    python -m benchmarks.gpu [--ranks 2] [--machines 1] [--rounds 5] [--json FILE]

Contenders: "alone" trains without communication, "byteps" with bps.DistributedOptimizer, "byteps ddp" and "gloo ddp"
with DistributedDataParallel. All are alive, and take turns, round after round. Ranks share GPUs if there are fewer. The
floor of a sum is what its bytes take from the device to page-locked memory and back, one way after the other.
``--device cpu`` shows that the benchmark runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.turns import Job, charged, launch, new_cost

RANK = Path(__file__).with_name("gpu_rank.py")
CONTENDERS = ("alone", "byteps", "byteps ddp", "gloo ddp")


def measure(jobs: dict[str, Job], rounds: int, gigabytes: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Milliseconds, by word and contender, of the slowest rank in each round; processor seconds per GB of gradients."""
    times: dict[str, Any] = {word: defaultdict(list) for word in ("step", "sum")}
    costs = {name: new_cost() for name in jobs}
    for _ in range(rounds):
        for word, seen in times.items():
            for name, job in jobs.items():
                with charged(job, costs[name], gigabytes) if word == "step" else contextlib.nullcontext():
                    answers = job.tell(word)
                if None not in answers:
                    seen[name].append(max(answers))
    return times, costs


def show(times: dict[str, Any], costs: dict[str, Any], facts: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    print(f"{facts['ranks']} ranks on {facts['machines']} machine(s), {facts['device']}")
    print(f"a page-locked copy: {facts['to_host']:.1f} GB/s to the host, {facts['to_device']:.1f} GB/s back")
    print(f"{'':14}{'contender':>12}{'ms':>10}{'spread':>8}{'/ alone':>9}{'CPU s/GB':>10}")
    for word, seen in times.items():
        what = f"step, {facts['model_mb']:.0f} MB" if word == "step" else f"sum, {facts['sum_mb']:.0f} MB"
        for name, rounds in seen.items():
            middle = statistics.median(rounds)
            row = {"what": word, "contender": name, "ms": middle, "rounds_ms": rounds}
            line = f"{what:14}{name:>12}{middle:10.1f}{max(rounds) / min(rounds):8.2f}"
            if word == "step":
                row["cpu_s_per_gb"] = statistics.median(costs[name]["all"])
                line += f"{middle / statistics.median(seen['alone']):9.2f}{row['cpu_s_per_gb']:10.2f}"
            print(line)
            rows.append(row)
    floor = facts["sum_mb"] / facts["to_host"] + facts["sum_mb"] / facts["to_device"]
    print(f"floor of the sum: {floor:.1f} ms for one rank's two copies")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="on each machine")
    parser.add_argument("--machines", type=int, default=1, help="emulated on this one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sum-mb", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    program = [str(RANK), arguments.device, *map(str, (arguments.width, arguments.layers, arguments.sum_mb))]
    with contextlib.ExitStack() as stack:
        jobs: dict[str, Job] = {}
        for name in CONTENDERS:
            job = launch(name.replace(" ", "-"), arguments.ranks, arguments.machines, [*program, name])
            stack.callback(job.close)
            jobs[name] = job
        facts = {name: job.meet()[0] for name, job in jobs.items()}["alone"]
        facts |= {"ranks": arguments.ranks, "machines": arguments.machines}
        for job in jobs.values():
            job.tell("step")  # warm
            job.tell("sum")
        times, costs = measure(jobs, arguments.rounds, facts["steps"] * facts["model_mb"] * 1e-3)
    rows = show(times, costs, facts)
    if arguments.json:
        arguments.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
