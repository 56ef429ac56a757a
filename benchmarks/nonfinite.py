"""What it costs to look for NaN and infinity in gradients: training steps with BYTEPS_NONFINITE=raise and with allow.

    python benchmarks/nonfinite.py [--starts 12] [--turns 30] [--only [mlp …]] [--skip] [--json FILE]

One job of two ranks for each contender, all alive at once. They take turns step by step, in an order that changes,
and whoever has no turn waits in a read; so whatever slows the machine down slows all of them. A figure is the median
over all turns of a step's time over that of ``allow`` in the same turn, with the interval that holds 95 % of such
medians of resampled starts and turns: where its memory lies makes one start of a job differ from the next. A second
job with ``allow`` shows what differs where nothing does. Fastest tenth: the tenth percentile of all steps over that of
``allow``; on a busy machine those are the steps that others disturbed least. CPU time: of all processes of a job,
services too; idle: what all jobs together use while nobody has a turn. Before them: the kernel that looks, call by call
beside the one that does not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from turns import Job, launch, orders

from byteps_py.kernels.reduction import reduce, reduce_checked
from byteps_py.tensors import Checks, DType, Op
from server import used

CONTENDERS = {"allow": "allow", "again": "allow", "raise": "raise", "skip": "skip"}
RANKS = 2
WARM_UP = 10
SUMMED_BYTES = 64 << 20
SUMS_S = 5.0
IDLE_S = 2.0
RESAMPLES = 2000


class Case(NamedTuple):
    title: str
    model: str
    machines: int = 1


CASES = {
    "mlp": Case("4 linear layers of 1024, batch 64", "mlp"),
    "small": Case("4 linear layers of 256, batch 64", "small"),
    "cnn": Case("10 convolutions of 128, batch 1 of 32 x 32", "cnn"),
    "mlp-machines": Case("4 linear layers, 2 machines of a rank", "mlp", 2),
    "resnet50": Case("ResNet-50's gradients, nothing computed", "resnet50"),
    "resnet50-machines": Case("the same, 2 machines of a rank", "resnet50", 2),
}


Figure = Callable[[np.ndarray, np.ndarray], float]  # of a contender's steps, and of those of ``allow``


# ---- one rank --------------------------------------------------------------------------------------------------------


def rank(model_name: str) -> None:
    """Steps when told, and says from when to when."""
    import torch

    import byteps_py as bps

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, inputs = build(model_name)
    bps.init()
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters())
    with orders() as words:
        for _, answer in words:
            began = time.perf_counter()
            optimizer.zero_grad()
            loss = model(*inputs).square().mean()
            loss.backward()
            optimizer.step()
            answer([began, time.perf_counter()])
    bps.shutdown()


def build(name: str) -> tuple[Any, list[Any]]:
    """A model and what it is given."""
    import torch
    from torch import nn

    from byteps_py.placement.placement_plan import load_model

    class Bare(nn.Module):
        """Its loss is of its parameters alone: a gradient costs one write."""

        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ParameterList(nn.Parameter(torch.zeros(tuple(shape))) for _, shape in load_model(name))

        def forward(self) -> torch.Tensor:
            return torch.stack([parameter.sum() for parameter in self.all])

    if name in ("mlp", "small"):
        width = 1024 if name == "mlp" else 256
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*layers), [torch.randn(64, width)]
    if name == "cnn":
        layers = [layer for _ in range(10) for layer in (nn.Conv2d(128, 128, 3, padding=1), nn.ReLU())]
        return nn.Sequential(nn.Conv2d(3, 128, 3, padding=1), *layers), [torch.randn(1, 3, 32, 32)]
    return Bare(), []


# ---- turns -----------------------------------------------------------------------------------------------------------


def step_s(job: Job) -> float:
    times = job.tell("step")
    return max(ended for _, ended in times) - min(began for began, _ in times)


def cpu_s(job: Job) -> float:
    return sum(used(pid)[0] for pid in job.pids)


class Start(NamedTuple):
    """Of fresh processes, by contender: seconds of every step, CPU seconds per step. CPU seconds per second idle."""

    steps_s: dict[str, list[float]]
    cpu_s: dict[str, float]
    idle: float


def measure(case: Case, contenders: list[str], turns: int) -> Start:
    jobs: dict[str, Job] = {}
    try:
        for contender in contenders:
            program = [__file__, "--rank", case.model]
            mode = CONTENDERS[contender]
            jobs[contender] = launch(contender, RANKS // case.machines, case.machines, program, BYTEPS_NONFINITE=mode)
        for job in jobs.values():
            job.meet()
        for _ in range(WARM_UP):
            for job in jobs.values():
                step_s(job)
        before = {contender: cpu_s(job) for contender, job in jobs.items()}
        time.sleep(IDLE_S)
        idle = sum(cpu_s(job) - before[contender] for contender, job in jobs.items()) / IDLE_S
        before = {contender: cpu_s(job) for contender, job in jobs.items()}
        steps: dict[str, list[float]] = {contender: [] for contender in jobs}
        names = list(jobs)
        for turn in range(turns):
            first = turn // 2 % len(names)
            order = names[first:] + names[:first]
            for contender in order if turn % 2 else reversed(order):
                steps[contender].append(step_s(jobs[contender]))
        return Start(steps, {each: (cpu_s(job) - before[each]) / turns for each, job in jobs.items()}, idle)
    finally:
        for job in jobs.values():
            job.close()


def paired(steps: np.ndarray, base: np.ndarray) -> float:
    return float(np.median(steps / base))


def fastest(steps: np.ndarray, base: np.ndarray) -> float:
    return float(np.quantile(steps, 0.1) / np.quantile(base, 0.1))


FIGURES = (paired, fastest)


def interval(figure: Figure, steps: np.ndarray, base: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    """That holds 95 % of the figures of resampled starts (rows) and, within each, turns (columns)."""
    starts, turns = steps.shape
    drawn = []
    for _ in range(RESAMPLES):
        chosen = rng.integers(starts, size=(starts, 1)), rng.integers(turns, size=(starts, turns))
        drawn.append(figure(steps[chosen], base[chosen]))
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)


def sums(nbytes: int) -> dict[str, float]:
    """The kernel alone, call by call with the check and without, on memory that no cache holds: microseconds without,
    and the median ratio."""
    whole = [np.ones(SUMMED_BYTES // 4, np.float32) for _ in range(2)]
    count = SUMMED_BYTES // nbytes
    times: dict[bool, list[float]] = {False: [], True: []}
    until = time.perf_counter() + SUMS_S
    for turn in itertools.count():
        for place, checked in enumerate((True, False) if turn % 2 else (False, True)):
            at = (2 * turn + place) % count * nbytes
            inputs = [array.ctypes.data + at for array in whole]
            began = time.perf_counter()
            if checked:
                reduce_checked(Checks.FINITE, Op.SUM, DType.FLOAT32, inputs, inputs[:1], nbytes // 4)
            else:
                reduce(Op.SUM, DType.FLOAT32, inputs, inputs[:1], nbytes // 4)
            times[checked].append(time.perf_counter() - began)
        if began > until:
            break
    checked_s, plain_s = np.array(times[True][WARM_UP:]), np.array(times[False][WARM_UP:])
    found = {"plain_us": float(np.median(plain_s)) * 1e6, "ratio": float(np.median(checked_s / plain_s))}
    print(
        f"sum of two inputs of {nbytes >> 10} KB: {found['plain_us']:.1f} us, with the check {found['ratio']:.3f} of it"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=12, help="of fresh processes, per case")
    parser.add_argument("--turns", type=int, default=30, help="steps of each contender, per start")
    parser.add_argument("--skip", action="store_true", help="BYTEPS_NONFINITE=skip, too")
    parser.add_argument("--only", nargs="*", choices=CASES, default=["mlp", "cnn", "mlp-machines", "resnet50"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank)
        return
    contenders = [each for each in CONTENDERS if each != "skip" or options.skip]
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {"sums": {nbytes: sums(nbytes) for nbytes in (64 << 10, 1 << 20, 4 << 20)}}
    for name in options.only:
        starts = []
        for start in range(options.starts):
            first = start % len(contenders)
            starts.append(measure(CASES[name], contenders[first:] + contenders[:first], options.turns))
        found[name] = report(CASES[name], starts, contenders, rng)
    if options.json:
        options.json.write_text(json.dumps({"starts": options.starts, "turns": options.turns, **found}, indent=1))


def report(case: Case, starts: list[Start], contenders: list[str], rng: np.random.Generator) -> dict[str, Any]:
    steps = {each: np.array([start.steps_s[each] for start in starts]) for each in contenders}
    idle = statistics.median(start.idle for start in starts)
    print(f"{case.title}: {len(starts)} starts of {steps['allow'].shape[1]} turns; idle {idle * 100:.1f} % of a core")
    columns = ("step, median", "over allow", "fastest tenth over allow", "CPU over allow")
    print("{:16}{:>15}{:>30}{:>30}{:>18}".format("", *columns))
    rows: dict[str, Any] = {}
    for contender in contenders:
        figures = {
            figure.__name__: (
                figure(steps[contender], steps["allow"]),
                *interval(figure, steps[contender], steps["allow"], rng),
            )
            for figure in FIGURES
        }
        rows[contender] = row = {
            "median_s": float(np.median(steps[contender])),
            "starts": np.median(steps[contender] / steps["allow"], axis=1).tolist(),
            "cpu_s": statistics.median(start.cpu_s[contender] for start in starts),
            "cpu_ratio": statistics.median(start.cpu_s[contender] / start.cpu_s["allow"] for start in starts),
            **figures,
        }
        title = "allow, again" if contender == "again" else contender
        cells = [f"{value:.4f} ({low:.4f} to {high:.4f})" for value, low, high in figures.values()]
        print(
            f"{title:16}{row['median_s'] * 1e3:12.2f} ms"
            + "".join(f"{cell:>30}" for cell in cells)
            + f"{row['cpu_ratio']:18.4f}",
            flush=True,
        )
    return {"title": case.title, "idle": idle, "rows": rows}


if __name__ == "__main__":
    main()
