"""Optimizers of which ranks have different numbers. Run by test_some_optimizers.py under bpslaunch.

Argument: which ranks have a second one, and what the others do meanwhile.
"""

from __future__ import annotations

import os
import sys
import time

import torch

import byteps_py as bps
from byteps_py.torch.collectives import context as contexts


def wrapped(name: str, **options: object) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    named = [(f"{name}.{each}", param) for each, param in model.named_parameters()]
    sgd = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    return model, bps.DistributedOptimizer(sgd, named_parameters=named, **options)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def train(case: str, rank: int) -> None:
    alone = bps.add_process_set([0])
    generator = wrapped("generator", hosted=case == "hosted")
    match case:
        case "first":
            others = [wrapped("discriminator")] if rank == 0 else []
        case "last":
            others = [wrapped(f"discriminator{number}") for number in range(1 + 2 * rank)]
        case "hosted":
            others = [wrapped("discriminator", hosted=True)] if rank == 0 else []
        case "own process set":
            others = [wrapped("discriminator", process_set=alone)] if rank == 0 else []
        case "all":
            others = [wrapped("a", hosted=True), wrapped("b", hosted=True, delayed_update_after=0), wrapped("c")]
        case _:
            others = [wrapped("discriminator")] if rank == 0 or case == "late" else []
    for number in range(4):
        step(*generator)
        for other in others:
            step(*other)
        if case == "another call" and rank == 1:
            bps.push_pull(torch.ones(2), name="loss")
        if case == "end" and rank == 1:
            return
        if case == "late" and number == 2:
            if rank == 1:
                time.sleep(4)  # a slow rank; the other one waits, and must not be told that they differ
            others.append(late := wrapped("late"))
            step(*late)
    if case == "all":
        counts = contexts.current().session.steps_begun
        os.write(1, f"rank {rank} has begun {list(counts.values())}\n".encode())


def main() -> None:
    bps.init()
    rank, began = bps.rank(), time.monotonic()
    try:
        train(sys.argv[1], rank)
        os.write(1, f"rank {rank} is done\n".encode())
    except bps.HorovodInternalError as error:
        os.write(1, f"rank {rank} after {time.monotonic() - began:.0f} s: {type(error).__name__}: {error}\n".encode())
    bps.shutdown()


if __name__ == "__main__":
    main()
