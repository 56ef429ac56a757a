"""A rank whose forked child communicates: what the child is told, and that the rank goes on. Run under bpslaunch by
tests/jobs/test_failures.py, whose job has one rank, or several.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable

import torch

import byteps_py as bps
from byteps_py.errors import BytePSError

ONES = torch.ones(3)


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except BytePSError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main() -> None:
    bps.init()
    model = torch.nn.Linear(2, 1)
    named = list(model.named_parameters())
    optimizers = {
        "step": bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), named),
        "adasum": bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), named, op=bps.Adasum),
    }
    calls: dict[str, Callable[[], object]] = {
        "sum": lambda: bps.push_pull(ONES, name="x"),
        "broadcast": lambda: bps.broadcast(ONES, root_rank=0, name="b"),
        "gather": lambda: bps.allgather(ONES, name="g"),
        "join": bps.join,
        **{name: optimizer.step for name, optimizer in optimizers.items()},
    }
    for param in model.parameters():
        param.grad = torch.ones_like(param)

    def child() -> None:
        for name, call in calls.items():
            os.write(1, f"{bps.rank()}: {name}: {told(call)}\n".encode())  # in one piece: others write, too

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    bps.barrier()
    os.write(1, f"{bps.rank()}: went on: {bps.push_pull(ONES, name='x', average=False).tolist()}\n".encode())
    bps.shutdown()


if __name__ == "__main__":
    main()
