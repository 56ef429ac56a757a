"""Training steps across machines with shaped links: how much of the communication hides behind computation.

    python -m benchmarks.cluster.overlap [--compute 0.5 1 2] [--rounds 2] [--mparams 32] [--json FILE]
    python -m benchmarks.cluster.overlap --contenders cross --partition-kb 64 1024 4096 --credit-kb 1024 16384
    python -m benchmarks.cluster.overlap --workers 4 --servers 2 --mbit 200 --model equal --large none --mparams 6
        --backward-s 1.2 --contenders ours machine machine-backward sharded sharded-backward

Hosts are network namespaces (root needed), four workers and four CPU machines unless told otherwise. The model:
ResNet-50's layers, or equal ones (and one four times as large), each computing (by waiting) equally long.
``--compute`` is the computation of a step in units of its optimum communication. A step can't take less than the longer
of the two. With ``--backward-s``, each contender also makes steps without computation, and the table says which share
of such a step hides behind a backward pass of so many seconds: 1 - (step with computation - computation) / step alone.
Contenders take turns: torch's DistributedDataParallel over gloo, DistributedOptimizer, the same with CrossBarrier,
and that with all gradients of one priority; hosted AdamW, without and with copies of its states on other machines
(``--contenders hosted shadow``); and hosted SGD with states on each machine and sharded, stepping in step() and under
the backward pass (``machine``, ``machine-backward`` …).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster.contenders import Layout, our_commands, run, torch_commands
from benchmarks.cluster.hosts import cluster
from benchmarks.cluster.overlap_rank import FORWARD
from byteps_py.placement.placement_plan import load_model
from byteps_py.placement.shares import Optimum

RANK = Path(__file__).with_name("overlap_rank.py")
NAMES = {
    "ddp": "torch DDP, gloo",
    "ours": "DistributedOptimizer",
    "cross": "+ CrossBarrier",
    "cross-flat": "+ CrossBarrier, one priority",
    "hosted": "hosted AdamW",
    "shadow": "hosted AdamW, shadowed",
    "machine": "hosted SGD, machine",
    "machine-backward": "+ step_in_backward",
    "sharded": "hosted SGD, sharded",
    "sharded-backward": "+ step_in_backward (sharded)",
}
_BY_DEFAULT = ["ddp", "ours", "cross", "cross-flat"]
#: Memory that a process frees it keeps: new gradients would cost page faults, a twelfth of the two cores that all hosts
#: share. A GPU's do not.
_KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
#: A model's tensors of fewer elements (norms, biases) belong to the layer before them.
SMALL = 1 << 13
EQUAL_LAYERS = 12
LARGE = 4  # times as large as an equal one
ALL_EQUAL_LAYERS = 24


def counts_of(elements: int, large: str) -> list[int]:
    """Elements of each layer, in order of the forward pass."""
    if large == "none":
        return [elements // ALL_EQUAL_LAYERS] * ALL_EQUAL_LAYERS
    equal = elements // (EQUAL_LAYERS + LARGE)
    one = [elements - EQUAL_LAYERS * equal]
    return one + [equal] * EQUAL_LAYERS if large == "first" else [equal] * EQUAL_LAYERS + one


def layers_of(model: str) -> list[int]:
    """Elements of each layer of a model known to bps placement."""
    counts: list[int] = []
    for _, shape in load_model(model):
        count = math.prod(shape)
        if counts and count < SMALL:
            counts[-1] += count
        else:
            counts.append(count)
    return counts


def steps_s(contender: str, layout: Layout, program: Sequence[str], tuning: dict[str, str]) -> list[float]:
    """The times of its steps. Every process runs on its host, as on a real machine."""
    words, variables = [str(RANK), contender, *program], {**_KEEPS_MEMORY, **tuning}
    if contender == "ddp":
        output = run(torch_commands(layout, words, variables))
    else:
        services, machines = our_commands(layout, words, variables)
        output = run(machines, services)
    times: list[float] = json.loads(output)["times_s"]
    return times


def tunings(partition_kb: Sequence[int], credit_kb: Sequence[int]) -> list[dict[str, str]]:
    """0 stands for the product's own choice."""
    names = "BYTEPS_PARTITION_BYTES", "BYTEPS_SCHEDULING_CREDIT"
    return [
        {name: str(kb << 10) for name, kb in zip(names, pair, strict=True) if kb}
        for pair in itertools.product(partition_kb, credit_kb)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=400)
    parser.add_argument("--model", default="resnet50", help="known to bps placement; or equal: layers, see --large")
    parser.add_argument("--mparams", type=float, default=32, help="of equal layers: millions of float32 parameters")
    parser.add_argument(
        "--large", choices=["first", "last", "none"], default="last", help="which of 13 equal ones is large; none: 24"
    )
    parser.add_argument("--compute", type=float, nargs="+", default=[0.5, 1, 2])
    parser.add_argument("--backward-s", type=float, help="in place of --compute: what hides behind such a pass")
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=_BY_DEFAULT)
    parser.add_argument("--partition-kb", type=int, nargs="+", default=[0], help="0: the product's own choice")
    parser.add_argument("--credit-kb", type=int, nargs="+", default=[0], help="likewise")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    n, k = arguments.workers, arguments.servers
    equal = arguments.model == "equal"
    counts = counts_of(int(arguments.mparams * 1e6), arguments.large) if equal else layers_of(arguments.model)
    # One machine communicates only if its states are shadowed: then its link carries the gradients once.
    optimum_s = float(Optimum(n, k).time or 1) * sum(counts) * 4 * 8 / (arguments.mbit * 1e6)
    units = arguments.compute
    if arguments.backward_s is not None:
        units = [0.0, arguments.backward_s / (1 - FORWARD) / optimum_s]
    cases = [
        (compute, contender, tuning)
        for compute in units
        for contender in arguments.contenders
        for tuning in (tunings(arguments.partition_kb, arguments.credit_kb) if contender != "ddp" else [{}])
    ]
    seen: dict[int, list[float]] = defaultdict(list)
    with cluster([arguments.mbit] * (n + k)) as hosts:
        for _, (index, (compute, contender, tuning)) in itertools.product(range(arguments.rounds), enumerate(cases)):
            program = ["--counts", ",".join(map(str, counts)), "--compute-s", str(compute * optimum_s)]
            program += ["--steps", str(arguments.steps)]
            seen[index] += steps_s(contender, Layout(hosts[:n], hosts[n:]), program, tuning)
            print(contender, compute, tuning, [round(s, 2) for s in seen[index]], file=sys.stderr, flush=True)
    print(
        f"n = {n}, k = {k}, {arguments.mbit:g} Mbit/s each way, {sum(counts) * 4 / 1e6:.0f} MB of gradients in "
        f"{len(counts)} layers ({arguments.model}); optimum communication {optimum_s:.2f} s"
    )
    print("compute s  contender                    step s (min to max)  step / max(compute, optimum)  hidden  settings")
    alone_s = {
        (contender, str(tuning)): statistics.median(seen[index])
        for index, (compute, contender, tuning) in enumerate(cases)
        if not compute
    }
    rows: list[dict[str, Any]] = []
    for index, (compute, contender, tuning) in enumerate(cases):
        compute_s, step_s = compute * optimum_s, statistics.median(seen[index])
        ratio = step_s / max(compute_s, optimum_s)
        settings = ", ".join(f"{name}={value}" for name, value in tuning.items()) or "default"
        spread = f"{step_s:.2f} ({min(seen[index]):.2f} to {max(seen[index]):.2f})"
        alone = alone_s.get((contender, str(tuning))) if compute else None
        hidden = 1 - (step_s - compute_s) / alone if alone else None
        share = f"{hidden:7.2f}" if hidden is not None else " " * 7
        print(f"{compute_s:9.2f}  {NAMES[contender]:28s} {spread:>20s} {ratio:27.3f} {share}  {settings}")
        rows.append(
            {
                "n": n, "k": k, "mbit": arguments.mbit, "bytes": sum(counts) * 4, "model": arguments.model,
                "optimum_s": optimum_s, "compute_s": compute_s, "contender": contender, "tuning": tuning,
                "steps_s": seen[index], "step_s": step_s, "ratio": ratio, "hidden": hidden,
            }
        )  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
