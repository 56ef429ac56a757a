"""Steps of small models on one core, beside what the simulator of `bps plan operators` says of them.

    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776 python -m benchmarks.operator_steps [--steps 20]

The variables keep memory that is freed: else page faults of new tensors take longer than elementwise operators. One
thread of torch computes in float32; times are processor time, medians of --steps. "by rates": each operator takes the
longer of its FLOPs and its bytes, at the rates of a large product and of a large sum, which are measured first. "by
operators": each takes as long as its forward pass was measured. The backward pass counts twice as long in both;
"backward" is the measured one over the forward pass. No optimizer steps: the simulator has none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from byteps_py.tools.plan.cluster import Cluster
from byteps_py.tools.plan.module_trace import InputSize, trace_model
from byteps_py.tools.plan.operators.operator_graph import OperatorGraph, OperatorGroups, graph_of
from byteps_py.tools.plan.operators.strategy import DeviceTopology, on_one_device
from byteps_py.tools.plan.operators.timeline import StepTimeline, TaskGraph

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
_LARGE = 1024  # rows of the product whose rate is measured
_LONG = 16 << 20  # elements of the sum


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = value.shape
        parts = self.qkv(value).view(rows, tokens, 3, self.heads, width // self.heads)
        query, key, values = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, values)
        return self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))  # type: ignore[no-any-return]


def gpt() -> nn.Module:
    from gpt import GPT

    return GPT(8192, 256, 256, 4, 8)  # type: ignore[no-any-return,no-untyped-call]


#: Each with the shape of its input, and whether these are tokens.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "three products": (lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3))), (256, 1024), False),
    "MLP": (lambda: nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)), (512, 512), False),
    "attention": (lambda: Attention(512, 8), (4, 256, 512), False),
    "norms and GELU": (lambda: nn.Sequential(nn.LayerNorm(1024), nn.GELU(), nn.LayerNorm(1024)), (2048, 1024), False),
    "GPT, 4 layers": (gpt, (4, 256), True),
}


class OperatorTimer(TorchDispatchMode):
    """``seconds``: of each operator that runs, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[tuple[str, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.process_time()
        found = func(*args, **(kwargs or {}))
        self.seconds.append((str(func), time.process_time() - began))
        return found


def median_s(call: Callable[[], object], count: int) -> float:
    call()
    times = []
    for _ in range(count):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return statistics.median(times)


def this_core(count: int) -> Cluster:
    """Its rates for large operators."""
    one, other = torch.rand(_LARGE, _LARGE), torch.rand(_LARGE, _LARGE)
    long = torch.rand(_LONG)
    product_s = median_s(lambda: one @ other, count)
    sum_s = median_s(lambda: torch.add(long, 1.0, out=long), count)
    return Cluster(1, 1, 100, 2 * _LARGE**3 / product_s / 1e12, 2 * 4 * _LONG / sum_s / 1e9, 1)


def simulated_s(graph: OperatorGraph, topology: DeviceTopology) -> float:
    return StepTimeline(TaskGraph(graph, topology).tasks(on_one_device(graph))).makespan_s


def measured_graph(
    graph: OperatorGraph, groups: dict[int, list[int]], seconds: list[float], cluster: Cluster
) -> OperatorGraph:
    """``graph``, each operator with as many FLOPs as its measured time has at the cluster's rate."""
    rate = cluster.peak_tflops * 1e12
    sums = [sum(seconds[place] for place in places) for places in groups.values()]
    return OperatorGraph(
        tuple(
            replace(one, flops=rate * took_s, moved_bytes=0) for one, took_s in zip(graph.operators, sums, strict=True)
        )
    )


def row_of(name: str, cluster: Cluster, count: int) -> dict[str, Any]:
    factory, shape, is_tokens = MODELS[name]
    costs = trace_model(factory, [InputSize(shape, torch.int64 if is_tokens else torch.float32)])
    graph, grouped = graph_of(costs, shape[0]), OperatorGroups(costs.operators)
    torch.manual_seed(0)
    model = factory()
    value = torch.randint(8192, shape) if is_tokens else torch.rand(shape, requires_grad=True)

    def forward() -> torch.Tensor:
        return model(value)  # type: ignore[no-any-return]

    output = forward()
    gradient = torch.rand_like(output)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        forward().backward(gradient)

    runs = []
    for _ in range(count):
        with OperatorTimer() as timer:
            forward()
        runs.append(timer.seconds)
    kinds = [kind for kind, _ in runs[0]]
    wanted, places = [one.kind for one in costs.operators], []
    for kind in wanted:  # what the trace leaves out are views
        places.append(next(place for place in range((places or [-1])[-1] + 1, len(kinds)) if kind in kinds[place]))
    seconds = [statistics.median(run[place][1] for run in runs) for place in places]
    members = {
        number: [place for place, group in grouped.group_of.items() if group == number] for number in grouped.members
    }
    step_s, forward_s = median_s(step, count), median_s(forward, count)
    by_rates = simulated_s(graph, DeviceTopology(cluster))
    by_operators = simulated_s(measured_graph(graph, members, seconds, cluster), DeviceTopology(cluster, launch_s=0.0))
    return {
        "model": name,
        "operators": len(graph.operators),
        "step_ms": 1e3 * step_s,
        "backward": step_s / forward_s - 1,
        "by_rates_ms": 1e3 * by_rates,
        "by_operators_ms": 1e3 * by_operators,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cluster = this_core(arguments.steps)
    print(f"one core: {1e3 * cluster.peak_tflops:.1f} GFLOP/s, {cluster.memory_gb_per_s:.1f} GB/s")
    print("| model | operators | step | backward | by rates | | by operators | |\n|---|---|---|---|---|---|---|---|")
    rows = []
    for name in MODELS:
        row = row_of(name, cluster, arguments.steps)
        rows.append(row)
        cells = [name, str(row["operators"]), f"{row['step_ms']:.1f} ms", f"{row['backward']:.2f}"]
        for kind in ("by_rates_ms", "by_operators_ms"):
            cells += [f"{row[kind]:.1f} ms", f"{row[kind] / row['step_ms'] - 1:+.0%}"]
        print("| " + " | ".join(cells) + " |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"cluster": str(cluster), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
