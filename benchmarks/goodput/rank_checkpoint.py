"""One rank of benchmarks/goodput under torchrun, with torch's own means: DDP over gloo, and a checkpoint now and then.

When a rank fails, torchrun ends all of them. All are started again, and they go on from the last checkpoint.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.goodput.training import Log, Task, compute, hash_of, loader_of, model_and_data


def main() -> None:
    task = Task.read()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log = Log(task, rank)
    plain, data = model_and_data(task)
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    path, done = Path(task.folder) / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path)
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
    batches = enumerate(loader_of(task, data, rank))
    for step, (samples, inputs, targets) in itertools.islice(batches, done, None):
        log.note("begin", step=step, samples=samples.tolist())
        compute(task, model, inputs, targets)
        optimizer.step()
        log.note("step", step=step)
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % task.checkpoint_every == 0:
            partial = path.with_suffix(".partial")
            torch.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "done": step + 1}, partial)
            os.replace(partial, path)
    log.note("end", weights=hash_of(plain))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
