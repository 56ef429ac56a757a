"""A training step with small tensors, few and many: this project's optimizer beside DDP's buckets over gloo.

    python benchmarks/many_tensors.py [--ranks 2] [--rounds 3] [--steps 40] [--json FILE]

The model only has parameters (six of 9 KB in all; 1,000 of 1 KB; ResNet-50's 161): backward writes each gradient
once, so that a step is communication, its book-keeping and plain SGD. The contenders take turns, round after round,
each in fresh processes; a figure is the median over the rounds of the median step. The same step without any
communication stands beside them: what is left above it is the communication's. So does the step with
BYTEPS_NONFINITE=raise.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTENDERS = {
    "ours": "ours", "checked": "ours, NaN looked for", "ddp": "DDP over gloo", "alone": "no communication",
}  # fmt: skip
_OURS = ("ours", "checked")
MODELS = ("6 of 9 KB", "1000 x 1 KB", "resnet50")
#: Two hidden layers of 32.
_FEW: list[tuple[int, ...]] = [(32, 32), (32,), (32, 32), (32,), (1, 32), (1,)]
_SHORT = 10  # so many steps of these for one of the others


# ---- one rank --------------------------------------------------------------------------------------------------------


def rank(contender: str, steps: int) -> None:
    import torch

    from byteps_py.placement.placement_plan import load_model

    class Bare(torch.nn.Module):
        """Its loss is the sum of all parameters, so that a gradient costs one write."""

        def __init__(self, shapes: list[tuple[int, ...]]) -> None:
            super().__init__()
            self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for shape in shapes)

        def forward(self) -> torch.Tensor:
            return torch.stack([parameter.sum() for parameter in self.all]).sum()

    torch.set_num_threads(1)
    barrier: Callable[[], object] = _nothing
    finish: Callable[[], object] = _nothing
    is_first = True
    if contender in _OURS:
        import byteps_py as bps

        bps.init()
        barrier, finish, is_first = bps.barrier, bps.shutdown, bps.rank() == 0
    elif contender == "ddp":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        barrier, finish, is_first = dist.barrier, dist.destroy_process_group, dist.get_rank() == 0
    for name in MODELS:
        shapes = {MODELS[0]: _FEW, MODELS[1]: [(256,)] * 1000}.get(name) or [tuple(s) for _, s in load_model(name)]
        model: torch.nn.Module = Bare(shapes)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        if contender in _OURS:
            named = [(f"{name}.{key}", parameter) for key, parameter in model.named_parameters()]
            optimizer = bps.DistributedOptimizer(optimizer, named)
        elif contender == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        times = []
        for _ in range((steps + 5) * (_SHORT if shapes is _FEW else 1)):
            barrier()
            began = time.perf_counter()
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            times.append(time.perf_counter() - began)
        if is_first:
            line = {"model": name, "tensors": len(shapes), "median_s": statistics.median(times[5:])}
            print(json.dumps(line), flush=True)
    barrier()
    finish()


def _nothing() -> None:
    pass


# ---- the comparison --------------------------------------------------------------------------------------------------


def run(contender: str, ranks: int, steps: int) -> list[dict[str, Any]]:
    """One job; returns its first rank's lines."""
    program = [str(Path(__file__)), "--as", contender, "--steps", str(steps)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launch = ["-m", "byteps_py.launch", "--no-tag-output", "-np", str(ranks), sys.executable]
    starters = {
        "ours": launch,
        "checked": launch,
        "ddp": ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", port],
        "alone": [],
    }
    command = [sys.executable, *starters[contender], *program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["BYTEPS_NONFINITE"] = "raise" if contender == "checked" else "allow"
    # Without communication as many processes compute at the same time: they share cores and memory alike.
    jobs = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(ranks if contender == "alone" else 1)
    ]
    answers = [job.communicate() for job in jobs]
    for job, (_, errors) in zip(jobs, answers, strict=True):
        if job.returncode:
            raise SystemExit(f"{contender} with {ranks} ranks failed:\n{errors}")
    return [json.loads(line) for line in answers[0][0].splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as", dest="contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        rank(arguments.contender, arguments.steps)
        return
    seen: dict[tuple[str, str], list[float]] = defaultdict(list)
    tensors: dict[str, int] = {}
    for _ in range(arguments.rounds):
        for contender in CONTENDERS:
            for line in run(contender, arguments.ranks, arguments.steps):
                seen[line["model"], contender].append(line["median_s"])
                tensors[line["model"]] = line["tensors"]
    rows = []
    print(f"{arguments.ranks} ranks on one machine; time of one step, (spread over the rounds)")
    print(f"{'model':14}{'tensors':>8}" + "".join(f"{title:>24}" for title in CONTENDERS.values()) + "   DDP / ours")
    for name, count in tensors.items():
        medians = {contender: statistics.median(seen[name, contender]) for contender in CONTENDERS}
        spreads = {contender: max(seen[name, contender]) / min(seen[name, contender]) for contender in CONTENDERS}
        cells = [f"{medians[c] * 1e3:10.3f} ms (×{spreads[c]:4.2f})" for c in CONTENDERS]
        print(f"{name:14}{count:8d}" + "".join(f"{c:>24}" for c in cells) + f"{medians['ddp'] / medians['ours']:13.2f}")
        rows.append({"model": name, "tensors": count, "median_s": medians, "spread": spreads})
    if arguments.json:
        arguments.json.write_text(json.dumps({"ranks": arguments.ranks, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
