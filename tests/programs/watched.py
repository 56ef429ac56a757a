"""Trains until rank 0's stdin ends; with shadow=True, up to the step that the file in the second argument names, once
it is there. First argument: which optimizer, or torch's DDP over the backend; see ``WAYS``."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import byteps_py as bps

WAYS = ("plain", "hosted", "shadow", "ddp")


def is_over() -> bool:
    """Rank 0 alone has a stdin."""
    return bool(select.select([0], [], [], 0)[0]) and not os.read(0, 1000)


def is_last(step: int) -> bool:
    """All ranks ask at the same steps, and without an operation that a rank which is started again would not take part
    in."""
    return Path(sys.argv[2]).exists() and step >= int(Path(sys.argv[2]).read_text())


def main() -> None:
    way = sys.argv[1]
    torch.manual_seed(0)
    bps.init()
    model: torch.nn.Module = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if way == "ddp":
        dist.init_process_group("byteps")
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        optimizer = bps.DistributedOptimizer(
            optimizer, model.named_parameters(), hosted=way == "hosted", shadow=way == "shadow"
        )
    step = (bps.restore(model, optimizer) if way == "shadow" else None) or 0
    stop = torch.zeros(1)
    while not stop:
        model(torch.randn(4, 300)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        bps.count_batch(tokens=1200, samples=4)
        step += 1
        if way == "shadow":
            stop[0] = is_last(step)
            continue
        stop = bps.push_pull(torch.tensor([float(bps.rank() == 0 and is_over())]), average=False, name="stop")
    found = bps.metrics()
    assert found["steps"] >= 1
    assert found["tokens"] >= 1200
    print(f"exposed {found['exposed_communication_seconds'] > 0}", flush=True)
    if way == "ddp":
        dist.destroy_process_group()
    bps.shutdown()


main()
