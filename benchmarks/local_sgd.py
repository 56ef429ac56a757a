"""Training over slow, long links: bytes and time of a step with gradients in 16 bits, and with bps.local.DiLoCo.

    python -m benchmarks.local_sgd [--machines 4] [--mbit 2] [--delay-ms 100] [--width 128] [--layers 4] [--every 30]
        [--contenders gloo fp16 diloco_int8 diloco_topk torchft torchft_int8] [--json FILE]
    python -m benchmarks.local_sgd --train 6000 [--width 64] [--layers 2] [--outer 1 0]
    python -m benchmarks.local_sgd --train 2000 --until 2.0 --machines 2 --contenders fp16 int8 topk onebit powersgd

Hosts are network namespaces with shaped links (root needed); a delay is that of one direction
(benchmarks/cluster/hosts.py). One rank on each trains the GPT of examples/gpt.py. "gloo" is torch's
DistributedDataParallel with its hook for 16 bits, "fp16" DistributedOptimizer with Compression.fp16; "diloco…" is
DiLoCo with that compression, and one outer step in ``--every`` steps. "torchft" is torchft's DiLoCo over gloo, in
"torchft_int8" with ``should_quantize``: pip install torchft. A turn is ``--slow-steps`` steps of the first
two, and two outer steps of the others, after as many that are not counted. "sent" is what a machine's link carries out
in a step, with headers and all else that its processes send, the largest of all machines.

With ``--train``, machines are processes of this one without links; each contender trains for so many steps, and the
loss of text that it has not seen is printed. With ``--until``, each trains until that loss is as low, which is looked
at every 50 steps, and for so many steps at most; "MB" is what a machine's coded gradients take until then, each way.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.cluster.contenders import Layout, our_job, torch_commands, torch_job
from benchmarks.cluster.hosts import Host, LoopbackHost, cluster
from benchmarks.local_sgd_rank import CONTEXT
from benchmarks.training_turn import turn
from benchmarks.turns import Command, Job, new_cost
from examples.gpt import GPT, read_text

ROOT = Path(__file__).parent.parent
#: Whose gradients travel in each step, and how much shorter than float32 (benchmarks/results/compression.md).
GRADIENTS = {
    "fp16": 2, "int8": 3.94, "float8": 3.94, "thc": 3.88, "dithering": 7.76, "onebit": 31.0, "topk": 78.8,
    "randomk": 99.9, "powersgd": 17.0,
}  # fmt: skip
CONTENDERS = ("gloo", *GRADIENTS, "diloco", "diloco_int8", "diloco_topk", "torchft", "torchft_int8")
DEFAULT_CONTENDERS = ["gloo", "fp16", "diloco_int8", "diloco_topk"]
_TRAINED_AT_ONCE, _LOOKED_AT_ONCE = 200, 50


def started(arguments: argparse.Namespace, name: str, hosts: list[Host], steps: int) -> Job:
    sizes = (arguments.width, arguments.layers, arguments.every, steps, *arguments.outer)
    program = ["-m", "benchmarks.local_sgd_rank", name, *map(str, sizes)]
    layout, variables = Layout(hosts, ranks=1), {"PYTHONPATH": str(ROOT)}
    if name in GRADIENTS:
        variables["BYTEPS_MIN_COMPRESS_BYTES"] = "0"
    if name.startswith("torchft"):
        commands = torch_commands(layout, program, variables)
        own = [{**each.variables, "OWN_ADDRESS": host.address} for each, host in zip(commands, hosts, strict=True)]
        return Job(name, len(hosts), [Command(each.words, given) for each, given in zip(commands, own, strict=True)])
    start = torch_job if name == "gloo" else our_job
    return start(name, layout, program, variables)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with cluster([arguments.mbit] * arguments.machines, arguments.delay_ms) as hosts:
        for name in arguments.contenders:
            steps = arguments.slow_steps if name in ("gloo", *GRADIENTS) else 2 * arguments.every
            cost = new_cost()
            job = started(arguments, name, hosts, steps)
            try:
                found = turn(job, hosts, len(hosts), steps, (cost, 1.0))
            finally:
                job.close()
            kb, ms = found["sent_mb"] * 1e3, found["ms"]
            cpu_s = cost["all"][0]
            rows.append({"contender": name, "ms": ms, "sent_kb": kb, "cpu_s_a_step": cpu_s, "load": os.getloadavg()[0]})
            first = rows[0]
            ratios = f"{first['ms'] / ms:.1f}", f"{first['sent_kb'] / kb:.0f}"
            print(f"| {name} | {ms:.0f} | {ratios[0]} | {kb:.2f} | {ratios[1]} | {cpu_s:.2f} |", flush=True)
    return rows


def train(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in arguments.contenders:
        hosts: list[Host] = [LoopbackHost(i) for i in range(arguments.machines)]
        job = started(arguments, name, hosts, _TRAINED_AT_ONCE)
        try:
            job.meet()
            began_s = time.monotonic()
            for _ in range(0, arguments.train, _TRAINED_AT_ONCE):
                job.tell("steps")
            seconds, losses = time.monotonic() - began_s, job.tell("loss")
        finally:
            job.close()
        loss = sum(losses) / len(losses)
        rows.append({"contender": name, "steps": arguments.train, "loss": loss, "seconds": seconds})
        ratio = loss / rows[0]["loss"]
        print(f"| {name} | {loss:.4f} | {ratio:.3f} | {seconds:.0f} |", flush=True)
    return rows


def train_until(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in arguments.contenders:
        hosts: list[Host] = [LoopbackHost(i) for i in range(arguments.machines)]
        job = started(arguments, name, hosts, _LOOKED_AT_ONCE)
        steps, loss, began_s = 0, float("inf"), 0.0
        try:
            job.meet()
            began_s = time.monotonic()
            while loss > arguments.until and steps < arguments.train:
                job.tell("steps")
                steps += _LOOKED_AT_ONCE
                losses = job.tell("loss")
                loss = sum(losses) / len(losses)
        finally:
            job.close()
        mb = steps * 4e-6 * parameters(arguments) / GRADIENTS.get(name, 2)
        rows.append({"contender": name, "steps": steps, "loss": loss, "mb": mb, "s": time.monotonic() - began_s})
        first = rows[0]
        ratio = f"{first['mb'] / mb:.1f}" if loss <= arguments.until else "–"
        print(f"| {name} | {loss:.3f} | {steps} | {steps / first['steps']:.2f} | {mb:.1f} | {ratio} |", flush=True)
    return rows


def parameters(arguments: argparse.Namespace) -> int:
    """How many the model has."""
    model = GPT(len(read_text()[0]), CONTEXT, arguments.width, arguments.layers, heads=4)
    return sum(param.numel() for param in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=2.0, help="of each link, each way")
    parser.add_argument("--delay-ms", type=float, default=100.0)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--every", type=int, default=30)
    parser.add_argument("--outer", type=float, nargs=2, default=[1.0, 0.0], metavar=("LR", "MOMENTUM"))
    parser.add_argument("--slow-steps", type=int, default=2, help="of a turn with gradients")
    parser.add_argument("--train", type=int, default=0, metavar="STEPS")
    parser.add_argument("--until", type=float, default=0.0, metavar="LOSS", help="with --train")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=DEFAULT_CONTENDERS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    outer = "SGD with lr={:g} and Nesterov momentum {:g}".format(*arguments.outer)
    print(f"{arguments.machines} machines, every={arguments.every}, outer {outer}, load {os.getloadavg()[0]:.1f}")
    if arguments.until:
        print(f"until a held-out loss of {arguments.until:g}, {arguments.train} steps at most")
        print("| contender | loss | steps | of the first | MB | × fewer |\n|---|---|---|---|---|---|")
        rows = train_until(arguments)
    elif arguments.train:
        print(f"{arguments.train} steps\n| contender | held-out loss | of the first | s |\n|---|---|---|---|")
        rows = train(arguments)
    else:
        print(f"{arguments.mbit:g} Mbit/s each way, {arguments.delay_ms:g} ms each way")
        print("| contender | ms a step | × less | KB sent a step | × fewer | CPU s a step |\n|---|---|---|---|---|---|")
        rows = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
