"""Trains with a codec in a job whose ranks are started again, from checkpoints.

    restarted_compression.py CODEC FOLDER

Each rank saves the weights, and what its machine has not sent yet, after each step. TEST_KILLS: "RANK:STEP:WHERE …":
the rank kills itself there, once; WHERE: "backward" (between two gradients) or "after" (the step). Prints a digest of
the weights at the end.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import byteps_py as bps

STEPS = 8
C = bps.Compression
CODECS = {
    "topk": C.topk(0.05, error_feedback=True),
    "momentum": C.with_momentum(C.with_error_feedback(C.int8), 0.5),
    "thc": C.thc(),
    "powersgd": C.powersgd(2),
}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    bps.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 70), nn.Tanh(), nn.Linear(70, 40))
    rank = bps.rank()

    def die(step: int, where: str) -> None:
        place, done = f"{rank}:{step}:{where}", folder / f"died-{rank}-{step}-{where}"
        if place in os.environ.get("TEST_KILLS", "").split() and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters(), compression=CODECS[name]
    )
    mine = max((int(path.suffix[1:]) for path in folder.glob(f"rank-{rank}.*")), default=0)
    begun = min(bps.allgather_object(mine, name="saved"))
    if begun:
        saved = torch.load(folder / f"rank-{rank}.{begun}")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        bps.load_compression_state_dict(saved["compression"])
    print(f"rank {rank} begins at step {begun}", flush=True)
    current = begun
    model[0].weight.register_hook(lambda gradient: die(current, "backward"))
    for current in range(begun, STEPS):
        inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * current + rank))
        optimizer.zero_grad()
        (model(inputs) - inputs.flip(1)).square().mean().backward()
        optimizer.step()
        die(current, "after")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state["compression"] = bps.compression_state_dict()
        unfinished = folder / f"unfinished-{rank}"
        torch.save(state, unfinished)
        unfinished.rename(folder / f"rank-{rank}.{current + 1}")
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    print(f"rank {rank} ends: {hashlib.sha256(weights.numpy().tobytes()).hexdigest()}", flush=True)
    bps.shutdown()


if __name__ == "__main__":
    main()
