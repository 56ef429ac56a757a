"""One rank of benchmarks/goodput with torchft: a replica group of one rank. When one is lost, the others go on.

The samples of a step are those that its number says: a rank that comes back continues with the others' step. So none
is used twice, and those of the steps that were made without it are left out.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torchft
from torch.distributed import TCPStore

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.goodput.training import Log, Task, compute, hash_of, loader_of, model_and_data

_LIMIT = timedelta(seconds=20)


def main() -> None:
    task, rank = Task.read(), int(os.environ["GOODPUT_RANK"])
    plain, data = model_and_data(task)
    batches = list(loader_of(task, data, rank))
    local = torch.optim.AdamW(plain.parameters(), lr=1e-3)

    def load(state: Any) -> None:
        plain.load_state_dict(state["model"])
        local.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=_LIMIT),
        load_state_dict=load,
        state_dict=lambda: {"model": plain.state_dict(), "optimizer": local.state_dict()},
        min_replica_size=1,
        timeout=_LIMIT,
        quorum_timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"rank_{rank}_",
        hostname="127.0.0.1",
    )
    model = torchft.DistributedDataParallel(manager, plain)
    optimizer = torchft.Optimizer(manager, local)
    log = Log(task, rank)
    while not all((Path(task.folder) / f"{each}.jsonl").exists() for each in range(task.ranks)):
        time.sleep(0.02)  # the first step is to be one of all ranks
    while (step := manager.current_step()) < task.steps:
        samples, inputs, targets = batches[step]
        log.note("begin", step=step, samples=samples.tolist())
        optimizer.zero_grad()
        compute(task, model, inputs, targets)
        optimizer.step()
        if manager.current_step() == step + 1 and manager.is_participating():
            log.note("step", step=step)
    log.note("end", weights=hash_of(plain))
    manager.shutdown(wait=False)
    os._exit(0)  # its threads may wait for ranks that are gone


if __name__ == "__main__":
    main()
