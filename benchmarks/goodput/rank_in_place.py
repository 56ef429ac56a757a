"""One rank of benchmarks/goodput that is started again in place: ``python rank_in_place.py TASK``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import byteps_py.torch as bps
from benchmarks.goodput.training import Log, Task, compute, hash_of, loader_of, model_and_data


def main() -> None:
    task = Task.read()
    bps.init()
    log = Log(task, bps.rank())
    model, data = model_and_data(task)
    optimizer = bps.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), named_parameters=model.named_parameters(), shadow=True
    )
    run = bps.RunState(model, optimizer, loader=loader_of(task, data, bps.rank()))
    for _ in run.epochs(1):
        for samples, inputs, targets in run:
            log.note("begin", step=run.batch - 1, samples=samples.tolist())
            compute(task, model, inputs, targets)
            optimizer.step()
            log.note("step", step=run.batch - 1)
            optimizer.zero_grad()
    log.note("end", weights=hash_of(model))
    bps.shutdown()


if __name__ == "__main__":
    main()
