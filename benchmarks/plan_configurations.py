"""Twenty configurations on small clusters with shaped links, beside what `bps plan layout` says of them.

    python -m benchmarks.plan_configurations [--only 3 4 15] [--mbit 400] [--steps 3] [--json FILE]

Machines are network namespaces (root needed) with a rank each: four, without CPU machines or with two. The model is the
small Llama of examples/, trained with parallelize_model, AdamW and autocast. Its blocks compute by waiting: as long as
parameters and tokens say at a rate that is the same for all, as on a GPU; what they really compute is hidden in it.

The planner's constants come from a profile of the cluster (the rate of a large sum, a small message, AdamW on a core)
and from that rate of computing; nothing is fitted to the configurations. "memory" is the most bytes of tensors of the
fullest rank at a time: parameters, gradients, the optimizer's states, and what a step allocates. A "pick" is the
configuration of a cluster that is predicted to be the fastest, and how much slower it is than the fastest one.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.cluster.contenders import Layout, our_job
from benchmarks.cluster.hosts import cluster
from benchmarks.turns import Job, orders
from byteps_py.placement.shares import Optimum
from byteps_py.tools.plan.calibration import FEATURES, SEVERAL_MACHINES, Fit, Residual, StepTimeModel
from byteps_py.tools.plan.cluster import Cluster
from byteps_py.tools.plan.layout_cost import JobLayout, PlanJob, rank_memory, step_times
from byteps_py.tools.plan.layout_plan import mesh_of, options_of
from byteps_py.tools.plan.sizing_job import ModelShape
from byteps_py.tools.plan.step_time import constants

MODEL = ModelShape(layers=8, hidden=256, heads=4, kv_heads=2, ffn=768, vocabulary=1024)
SEQUENCES, SEQUENCE = 16, 32
MACHINES = 4
#: What a block's forward pass of one sequence takes.
FORWARD_S = 0.015
_PROFILED = 3  # sums; and so many small messages
_MESSAGES = 30


class Configuration(NamedTuple):
    servers: int
    layout: JobLayout


def _configurations() -> Iterator[Configuration]:
    data, half = functools.partial(JobLayout, 1, 1, 1, 4, 2, 2), functools.partial(JobLayout, 1, 1, 2, 2, 2, 4)
    pipe = functools.partial(JobLayout, 1, 1, 4, 1, 2, 8)
    for layout in (
        data(), data("zero1"), data("zero2"), data("zero3"), data(hosted="machine"), data(hosted="sharded"),
        half(), half(schedule="gpipe"), half(hosted="machine"), pipe(), pipe(schedule="gpipe"),
        pipe(schedule="chimera"),
    ):  # fmt: skip
        yield Configuration(0, layout)
    for layout in (
        data(), data("zero1"), data(hosted="sharded"), data(hosted="machine"), half(), half(hosted="sharded"),
        data(hosted="sharded", shadow=True), data(hosted="machine", shadow=True),
    ):  # fmt: skip
        yield Configuration(2, layout)


CONFIGURATIONS = tuple(_configurations())


# ---- a rank --------------------------------------------------------------------------------------------------------


class _Clock:
    """When the pass that runs began."""

    began_s = 0.0

    def __init__(self, forward_s: float) -> None:
        self.forward_s = forward_s

    def begin(self) -> None:
        self.began_s = time.perf_counter()

    def wait(self, seconds: float) -> None:
        time.sleep(max(0.0, self.began_s + seconds - time.perf_counter()))


class _Enter(torch.autograd.Function):
    """Before a block: its forward pass begins, its backward pass ends."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, clock: _Clock) -> torch.Tensor:
        ctx.clock = clock
        clock.begin()
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        rows = len(gradients[0])
        ctx.clock.wait(2 * rows * ctx.clock.forward_s)
        return gradients[0], None


class _Leave(torch.autograd.Function):
    """After a block."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, clock: _Clock) -> torch.Tensor:
        ctx.clock = clock
        clock.wait(len(value) * clock.forward_s)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.clock.begin()
        return gradients[0], None


class Timed(nn.Module):
    """A layer that takes ``forward_s`` for each sequence, and twice as long backward."""

    def __init__(self, layer: nn.Module, forward_s: float) -> None:
        super().__init__()
        self.layer, self.clock = layer, _Clock(forward_s)

    def forward(self, state: tuple[torch.Tensor, torch.Tensor]) -> Any:
        entered = _Enter.apply(state[0], self.clock), state[1]  # type: ignore[no-untyped-call]
        found = self.layer(entered)
        if isinstance(found, tuple):
            return _Leave.apply(found[0], self.clock), found[1]  # type: ignore[no-untyped-call]
        return _Leave.apply(found, self.clock)  # type: ignore[no-untyped-call]


class TensorMemory(TorchDispatchMode):
    """``most``: the most bytes at a time of storages that operators have made since it was entered, and of
    ``resized``, whose owner gives them memory and takes it away."""

    def __init__(self, resized: Sequence[torch.UntypedStorage]) -> None:
        super().__init__()
        self._resized = list(resized)
        self._held: dict[int, int] = {}
        self._bytes = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        before = {one.untyped_storage().data_ptr() for one in _tensors((args, kwargs))}
        before.update(storage.data_ptr() for storage in self._resized)
        for one in _tensors(found):
            storage = one.untyped_storage()
            address = storage.data_ptr()
            if storage.nbytes() and address not in before and address not in self._held:
                self._held[address] = storage.nbytes()
                self._bytes += storage.nbytes()
                weakref.finalize(storage, self._gone, address)
        self.most = max(self.most, self._bytes + sum(storage.nbytes() for storage in self._resized))
        return found

    def _gone(self, address: int) -> None:
        self._bytes -= self._held.pop(address, 0)


def gathered_storages(module: nn.Module) -> list[torch.UntypedStorage]:
    """Those of FSDP2's whole parameters. They are empty while it holds only this rank's part."""
    layers = module.modules() if isinstance(module, nn.Module) else ()  # the plan has no pipeline of these
    parts = [each._get_fsdp_state()._fsdp_param_group for each in layers if isinstance(each, FSDPModule)]
    found = [tensor for part in parts if part for one in part.fsdp_params for tensor in one.all_gather_outputs]
    return [tensor.untyped_storage() for tensor in found]


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    for one in tree_leaves(tree):
        if isinstance(one, torch.Tensor) and one.layout == torch.strided:
            local = getattr(one, "_local_tensor", one)  # of a DTensor
            yield local


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Of their storages, once each."""
    storages = [one.untyped_storage() for tensor in tensors for one in _tensors(tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def trained(layout: JobLayout, steps: int) -> tuple[float, float]:
    """(the median time of a step, the most bytes of tensors)"""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from llama_model import Groups, LlamaOptions, llama, token_loss

    from byteps_py.parallel import Mesh, ParallelOptions, parallelize_model

    options = LlamaOptions(MODEL.vocabulary, MODEL.hidden, MODEL.layers, MODEL.heads, MODEL.kv_heads, MODEL.ffn)
    mesh = Mesh(**mesh_of(layout))
    embedding, *blocks, head = llama(options, Groups())
    head_s = FORWARD_S * MODEL.vocabulary * MODEL.hidden / MODEL.layer_parameters
    model = nn.Sequential(embedding, *(Timed(one, FORWARD_S) for one in blocks), Timed(head, head_s))
    how = ParallelOptions(autocast=torch.bfloat16, **options_of(layout))
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    training = parallelize_model(model, mesh, token_loss(options, Groups()), optimizer, how)
    ids = torch.randint(MODEL.vocabulary, (SEQUENCES // layout.dp, SEQUENCE + 1))
    inputs, targets = ids[:, :-1], ids[:, 1:]
    for _ in range(2):  # DistributedDataParallel makes its buckets anew at the second
        training.step(inputs, targets)
    parameters = list(training.module.parameters())
    if not any(one.grad is not None and one.grad._is_view() for one in parameters):
        training.optimizer.zero_grad()  # gradients that are left are in memory of a backend, which no operator makes
    inner = getattr(training.optimizer, "optim", training.optimizer)  # of zero1: the states of this rank's parameters
    states = [one for each in inner.state.values() for one in _tensors(each)]
    before = bytes_of([*parameters, *states, *(one.grad for one in parameters if one.grad is not None)])
    with TensorMemory(gathered_storages(training.module)) as memory:
        training.step(inputs, targets)
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        training.step(inputs, targets)
        times.append(time.perf_counter() - began)
    return statistics.median(times), float(before + memory.most)


def profile() -> dict[str, float]:
    """Seconds of a sum of the model's gradients, of a small message, and of AdamW for a parameter."""
    from torch import distributed as dist

    import byteps_py.torch as bps

    large, small, sums, messages = torch.ones(MODEL.parameters), torch.ones(SEQUENCE * MODEL.hidden), [], []
    for turn in range(_PROFILED + 1):
        began = time.perf_counter()
        bps.allreduce(large, name="profile")
        sums += [time.perf_counter() - began] if turn else []
    for turn in range(_MESSAGES if dist.get_rank() < 2 else 0):
        began = time.perf_counter()
        for sender in (0, 1):
            (dist.send if dist.get_rank() == sender else dist.recv)(small, 1 - dist.get_rank())
        messages += [(time.perf_counter() - began) / 2] if turn else []
    weight = nn.Parameter(torch.ones(1 << 20))
    weight.grad = torch.ones_like(weight)
    optimizer, steps = torch.optim.AdamW([weight]), []
    for _ in range(_PROFILED + 1):
        began = time.perf_counter()  # all ranks at once, as in a step
        optimizer.step()
        steps.append(time.perf_counter() - began)
    found = {"sum_s": statistics.median(sums), "step_s": statistics.median(steps) / weight.numel()}
    return found | ({"message_s": statistics.median(messages)} if messages else {})


def serve(steps: int) -> None:
    from torch import distributed as dist

    import byteps_py.torch as bps

    torch.set_num_threads(1)
    bps.init()
    dist.init_process_group("byteps")
    with orders() as words:
        for word, answer in words:
            if word == "profile":
                answer(profile())
            else:
                answer(trained(JobLayout(**json.loads(word)), steps))
                gc.collect()
    dist.destroy_process_group()
    bps.shutdown()  # servers do not keep states for a job that is started again


# ---- the planner ---------------------------------------------------------------------------------------------------


def planned_job(servers: int, mbit: float, shadow: bool) -> PlanJob:
    return PlanJob(MODEL, Cluster(MACHINES, 1, 100, 1, 10, 10, mbit / 8e3, servers), SEQUENCES, SEQUENCE, int(shadow))


def profiled_model(job: PlanJob, found: dict[str, float]) -> StepTimeModel:
    """The planner's formulas with the constants of this cluster; what a core does not have takes no time."""
    hardware, servers = job.cluster.hardware, job.cluster.servers
    values = {one.name: 1e-12 if one.name.endswith("_s") else 1e-9 for one in constants(hardware)}
    values |= {name: 1e30 for name in values if name.endswith(("_per_s", "_flops"))}
    gradients = 4 * MODEL.parameters * float(Optimum(MACHINES, servers).time)
    values |= {
        "product_flops": 6 * SEQUENCE * MODEL.layer_parameters / (3 * FORWARD_S),
        "memory_bytes_per_s": hardware.memory_bytes_per_s,
        "optimizer_bytes": found["step_s"] * hardware.memory_bytes_per_s,
        "network_gradient_bytes_per_s": gradients / found["sum_s"],
        "hop_latency_s": found["message_s"],
        "exposed_hops": 0.5,
    }
    residual = Residual(np.zeros((1, len(FEATURES))), np.zeros(1), np.ones(len(FEATURES)), 0.0)
    logarithms = np.log([values[one.name] for one in constants(hardware)])
    return StepTimeModel(hardware, {SEVERAL_MACHINES: Fit(logarithms, residual, ())})


def compared(numbers: Sequence[int], mbit: float, steps: int) -> list[dict[str, Any]]:
    """Configurations of one cluster, in one job."""
    servers, layouts = CONFIGURATIONS[numbers[0]].servers, [CONFIGURATIONS[number].layout for number in numbers]
    rows = []
    with cluster([mbit] * (MACHINES + servers)) as hosts:
        program = [str(Path(__file__)), "--rank", "--steps", str(steps)]
        paths = {"PYTHONPATH": str(Path(__file__).parents[1])}
        job: Job = our_job("plan", Layout(hosts[:MACHINES], hosts[MACHINES:]), program, paths)
        try:
            job.meet()
            answers: list[dict[str, float]] = job.tell("profile")
            found = {name: statistics.median(one[name] for one in answers if name in one) for name in (
                "sum_s", "step_s", "message_s")}  # fmt: skip
            for number, layout in zip(numbers, layouts, strict=True):
                planned = planned_job(servers, mbit, layout.shadow)
                parts = step_times(planned, [layout], profiled_model(planned, found))
                said = job.tell(json.dumps(asdict(layout)))
                rows.append({
                    "number": number, "servers": servers, "layout": str(layout),
                    "step_s": max(step_s for step_s, _ in said), "bytes": max(most for _, most in said),
                    "parts_ms": {name: float(part[0]) for name, part in parts.items()}, "profile": found,
                    "planned_s": sum(float(part[0]) for part in parts.values()) / 1e3,
                    "planned_bytes": rank_memory(planned, layout).total,
                })  # fmt: skip
                show(rows[-1])
        finally:
            job.close()
    return rows


def show(row: dict[str, Any]) -> None:
    step, memory = row["planned_s"] / row["step_s"] - 1, row["planned_bytes"] / row["bytes"] - 1
    cells = [str(row["number"]), str(row["servers"]), row["layout"], f"{row['step_s']:.3f} s"]
    cells += [f"{row['planned_s']:.3f} s", f"{step:+.1%}", f"{row['bytes'] / 1e6:.1f} MB", f"{memory:+.1%}"]
    print("| " + " | ".join(cells) + " |", flush=True)


def jobs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Those that share a job: with as many CPU machines, and without a shadow."""
    groups: dict[tuple[int, int], list[int]] = {}
    for number in numbers:
        servers, layout = CONFIGURATIONS[number]
        groups.setdefault((servers, number if layout.shadow else -1), []).append(number)
    return list(groups.values())


def summary(rows: Sequence[dict[str, Any]]) -> str:
    errors = [abs(row["planned_s"] / row["step_s"] - 1) for row in rows]
    memory = [abs(row["planned_bytes"] / row["bytes"] - 1) for row in rows]
    lines = [
        f"{len(rows)} configurations: steps off by {statistics.fmean(errors):.1%}, {max(errors):.1%} at most; "
        f"memory by {statistics.fmean(memory):.1%}, {max(memory):.1%} at most"
    ]
    for servers in sorted({row["servers"] for row in rows}):
        same = [row for row in rows if row["servers"] == servers]
        pick, best = (min(same, key=lambda row: row[name]) for name in ("planned_s", "step_s"))
        behind = pick["step_s"] / best["step_s"] - 1
        lines.append(f"{servers} CPU machines: the pick, {pick['layout']}, is {behind:.1%} behind {best['layout']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", default=range(len(CONFIGURATIONS)), metavar="N")
    parser.add_argument("--mbit", type=float, default=400.0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        serve(arguments.steps)
        return
    print("| | CPU machines | layout | step | planned | | memory | |\n|---|---|---|---|---|---|---|---|", flush=True)
    rows = [row for numbers in jobs_of(arguments.only) for row in compared(numbers, arguments.mbit, arguments.steps)]
    print(summary(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
