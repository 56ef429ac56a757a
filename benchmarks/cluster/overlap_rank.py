"""One rank of benchmarks/cluster/overlap: trains a model whose layers compute by waiting. Rank 0 prints one JSON line.

A layer's forward and backward pass take a set time, as a GPU's would for the CPU; its gradient is a real tensor that
goes through autograd's hooks. A step's time is from one step's end to the next one's, so that what a contender
leaves to the next step is counted there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

WARM_UP = 2
LEARNING_RATE = 0.125
FORWARD = 1 / 3  # of a layer's time; the rest is its backward pass
#: The arguments of hosted optimizers.
HOSTED: dict[str, dict[str, Any]] = {
    "hosted": {"hosted": True},
    "shadow": {"hosted": True, "shadow": True},
    "machine": {"hosted": "machine"},
    "machine-backward": {"hosted": "machine", "step_in_backward": True},
    "sharded": {"hosted": "sharded"},
    "sharded-backward": {"hosted": "sharded", "step_in_backward": True},
}
ADAM = ("hosted", "shadow")  # the others, and those on the ranks, are SGD
CONTENDERS = ("ddp", "ours", "cross", "cross-flat", *HOSTED)


class _Timed(torch.autograd.Function):
    """The identity, with a weight whose gradient is what ``memory`` holds: who writes it is not the CPU."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float, memory: np.ndarray[Any, np.dtype[np.float32]]
    ) -> torch.Tensor:
        began = time.perf_counter()
        ctx.seconds, ctx.memory = seconds, memory
        _wait_until(began + seconds * FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        began = time.perf_counter()
        _wait_until(began + ctx.seconds * (1 - FORWARD))
        return grads[0].clone(), torch.from_numpy(ctx.memory), None, None


class Layer(nn.Module):
    def __init__(self, count: int, seconds: float, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))
        self.seconds, self.memory = seconds, np.full(count, value, np.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Timed.apply(x, self.weight, self.seconds, self.memory)  # type: ignore[no-untyped-call]
        return result


def _wait_until(deadline: float) -> None:
    left = deadline - time.perf_counter()
    if left > 0:
        time.sleep(left)


Contender = tuple[nn.Module, Any, Callable[[], None]]  # what to call, the optimizer, what ends it


def ddp(model: nn.Module) -> Contender:
    import torch.distributed as dist

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, torch.optim.SGD(model.parameters(), LEARNING_RATE), dist.destroy_process_group


def ours(model: nn.Module, crossing: bool, priorities: bool) -> Contender:
    import byteps_py as bps

    optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), LEARNING_RATE), model.named_parameters())
    if not crossing:
        return model, optimizer, bps.shutdown
    crossed = bps.CrossBarrier(model, optimizer)
    if not priorities:
        for bucket in optimizer._stepper.reducer.buckets:
            spec = dataclasses.replace(bucket.request.spec, priority=0)
            bucket.request = dataclasses.replace(bucket.request, spec=spec)
    return model, crossed, bps.shutdown


def hosted(model: nn.Module, contender: str) -> Contender:
    import byteps_py as bps

    kind = torch.optim.AdamW if contender in ADAM else torch.optim.SGD
    optimizer = bps.DistributedOptimizer(
        kind(model.parameters(), LEARNING_RATE), model.named_parameters(), **HOSTED[contender]
    )
    return model, optimizer, bps.shutdown


def join(contender: str) -> tuple[int, int]:
    """(rank, size)"""
    if contender == "ddp":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()
    import byteps_py as bps

    bps.init()
    return bps.rank(), bps.size()


def check(model: nn.Module, size: int, steps: int, is_sgd: bool) -> None:
    """Gradients were rank + 1 everywhere: small multiples of a power of two, so sums are exact in any order."""
    expected = -LEARNING_RATE * (size + 1) / 2 * steps
    if not is_sgd:
        expected = next(model.parameters())[0].item()
        if not -math.inf < expected < 0:
            raise SystemExit(f"parameters are {expected}")
    for name, param in model.state_dict().items():
        if not (param == expected).all():
            raise SystemExit(f"{name} is {param.unique()}, must be {expected}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--counts", required=True, help="elements of each layer, in order of the forward pass")
    parser.add_argument("--compute-s", type=float, required=True, help="of a step; layers have equal shares")
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    contender = arguments.contender
    rank, size = join(contender)
    counts = [int(count) for count in arguments.counts.split(",")]
    model = nn.Sequential(*(Layer(count, arguments.compute_s / len(counts), rank + 1.0) for count in counts))
    if contender == "ddp":
        network, optimizer, close = ddp(model)
    elif contender in HOSTED:
        network, optimizer, close = hosted(model, contender)
    else:
        network, optimizer, close = ours(model, contender.startswith("cross"), contender != "cross-flat")
    x = torch.ones(1, requires_grad=True)
    ends = []
    for _ in range(WARM_UP + arguments.steps):
        network(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    check(model, size, WARM_UP + arguments.steps, contender not in ADAM)
    if rank == 0:
        times = [end - begin for begin, end in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]
        print(json.dumps({"times_s": times}), flush=True)
    close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
