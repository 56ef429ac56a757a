"""One rank of benchmarks/async_training.py. Arguments: the contender, width of the model, milliseconds of computation
in each step of this rank and of the slowest one, seconds of a turn, and its steps if they are fixed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import byteps_py as bps
from benchmarks.turns import orders

_INPUTS, _SEQUENCES, _HELD_OUT = 32, 64, 2048
_LEARNING_RATE = 0.1  # for the average of all ranks' gradients
_MACHINES = 4


def new_model(width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(_INPUTS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def main() -> None:
    name, *numbers = sys.argv[1:]
    width, steps = int(numbers[0]), int(numbers[4])
    step_s, slow_s, seconds = map(float, numbers[1:4])
    torch.set_num_threads(1)
    teacher, model = new_model(16, 1), new_model(width, 0)
    forward: nn.Module = model
    plain = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    optimizer: Any = plain
    if name == "gloo":
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        forward = nn.parallel.DistributedDataParallel(model)
    else:
        bps.init()
        rank = bps.rank()
        if name == "sync":
            bps.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer = bps.DistributedOptimizer(plain, model.named_parameters())
        else:
            for group in plain.param_groups:
                group["lr"] = _LEARNING_RATE / bps.size()  # changes are added
            bound = int(name.removeprefix("async_")) if name.startswith("async_") else None
            optimizer = bps.AsyncOptimizer(plain, model.named_parameters(), staleness=bound)
    own_s = slow_s if rank == _MACHINES - 1 else step_s
    own = torch.Generator().manual_seed(1 + rank)

    def loss_of(count: int, generator: torch.Generator) -> torch.Tensor:
        inputs = torch.randn(count, _INPUTS, generator=generator)
        with torch.no_grad():
            targets = 3 * teacher(inputs)
        return (forward(inputs) - targets).square().mean()

    def step() -> None:
        began_s = time.perf_counter()
        optimizer.zero_grad()
        loss_of(_SEQUENCES, own).backward()
        time.sleep(max(0.0, own_s - (time.perf_counter() - began_s)))  # as on a GPU, which leaves the processor alone
        optimizer.step()

    def train() -> tuple[int, float]:
        """Steps, and seconds. Ranks that wait for each other make the same number."""
        began_s, made = time.perf_counter(), 0
        fixed = steps or (0 if name.startswith("async") else round(seconds / max(step_s, slow_s)))
        while made < fixed or (not fixed and time.perf_counter() - began_s < seconds):
            step()
            made += 1
        return made, time.perf_counter() - began_s

    def evaluate() -> float:
        with torch.no_grad():
            return float(loss_of(_HELD_OUT, torch.Generator().manual_seed(0)))

    does: dict[str, Callable[[], object]] = {"steps": train, "loss": evaluate, "begin": step}
    with orders() as words:
        for word, answer in words:
            answer(does[word]())
    if name == "gloo":
        dist.destroy_process_group()
    else:
        if name.startswith("async"):
            bps.join()
        bps.shutdown()


if __name__ == "__main__":
    main()
