"""A rank that makes steps of one kind, of which some are counted: ``flows.py FLOW STEPS SECONDS``.

The first ones warm up, for so many seconds at least: names are declared, kernels are compiled, plans are settled. Then
all processes count, for so many steps and seconds at least, and the rank makes a few more.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from counting import COUNTED, COUNTING, Switch
from torch import nn

import byteps_py as bps

WARM_UP = 12
#: No rank ends its next step but one before the first rank has begun its next: all hear in time which step is the last.
MORE = 3
WIDTH = 256

Step = Callable[[], object]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def optimizer_steps(shadow: bool) -> Step:
    bps.init()
    net, batch = model(), torch.randn(4, WIDTH)
    plain = torch.optim.AdamW(net.parameters()) if shadow else torch.optim.SGD(net.parameters(), lr=0.01)
    optimizer = bps.DistributedOptimizer(plain, net.named_parameters(), shadow=shadow)

    def step() -> None:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()

    return step


def all_reduce() -> Step:
    dist.init_process_group("byteps")
    tensor = torch.zeros(16)
    return lambda: dist.all_reduce(tensor)


def gather() -> Step:
    bps.init()
    tensor = torch.zeros(16)
    return lambda: bps.allgather(tensor, name="x")


def pipeline() -> Step:
    dist.init_process_group("byteps")
    pipe = bps.parallel.Pipeline(model(), "dapple", micro_batches=4)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
    batch, targets = torch.randn(16, WIDTH), torch.zeros(16, 1)

    def step() -> None:
        optimizer.zero_grad()
        pipe.step(batch, targets, nn.functional.mse_loss)
        optimizer.step()

    return step


FLOWS: dict[str, Callable[[], Step]] = {
    "gradient": lambda: optimizer_steps(shadow=False),
    "all_reduce": all_reduce,
    "gather": gather,
    "pipeline": pipeline,
    "hosted_shadow": lambda: optimizer_steps(shadow=True),
}


def main() -> None:
    flow, least_steps, least_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    switch = Switch(Path(os.environ["STEP_FILES_FOLDER"]))
    step = FLOWS[flow]()
    is_first = int(os.environ["RANK"]) == 0
    done, begun, due_s = 0, 0, time.monotonic() + least_s
    while not switch.last_step or done < switch.last_step:
        step()
        done += 1
        if not is_first or switch.last_step or time.monotonic() < due_s:
            continue
        if not begun and done >= WARM_UP:
            begun, due_s = done, time.monotonic() + least_s
            switch.state = COUNTING
        elif begun and done >= begun + least_steps:
            switch.state = COUNTED
            switch.last_step = done + MORE
            print(f"counted: {done - begun}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    else:
        bps.shutdown()


if __name__ == "__main__":
    main()
