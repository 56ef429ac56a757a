"""Trains with ``shadow=True`` a model with a buffer of 3 MiB that changes, and attaches 5 MiB; goes on from what the
servers hold.

    shadowed_buffers.py FOLDER STEPS END [CHECKPOINTS]

Rank R writes what it has after step N to FOLDER/N.R.pt, and what it has restored to FOLDER/restored-N.R.pt. END: after
STEPS, "done" ends, "wait" prints ``made`` and waits for SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import byteps_py as bps

BUFFER_BYTES, ATTACHED_BYTES = 3 << 20, 5 << 20


class Model(torch.nn.Module):
    """``seen``: a running sum of inputs, another one on each rank; ``mask``: large, and never changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.linear = torch.nn.Linear(64, 64)
        self.register_buffer("seen", torch.zeros(BUFFER_BYTES // 4))
        self.register_buffer("mask", torch.ones(600, 600).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.sum().sin()
        self.seen.view(-1, 64).add_(x.detach()[:1])
        return self.linear(x)


def save(value: Any, path: Path) -> None:
    torch.save(value, path.with_suffix(".new"))
    os.rename(path.with_suffix(".new"), path)


def main() -> None:
    bps.init()
    torch.set_num_threads(1)
    folder, steps, rank = Path(sys.argv[1]), int(sys.argv[2]), bps.rank()
    model = Model()
    named = list(model.named_parameters())
    optimizer = bps.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), named, shadow=True)
    begun = bps.restore(model, optimizer, *sys.argv[4:])

    def everything() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": optimizer.shadow_extra}

    if begun is not None:
        save(everything(), folder / f"restored-{begun}.{rank}.pt")
    print(f"restored at {begun}", flush=True)
    for step in range((begun or 0) + 1, steps + 1):
        data = torch.Generator().manual_seed(2 * step + rank)
        model(torch.randn(8, 64, generator=data)).square().mean().backward()
        attached = torch.randn(ATTACHED_BYTES // 4, generator=data)
        optimizer.shadow_extra = {"step": step, "memory": attached}
        optimizer.step()
        optimizer.zero_grad()
        save(everything(), folder / f"{step}.{rank}.pt")
    if sys.argv[3] == "wait":
        print("made", flush=True)
        signal.pause()
    bps.shutdown()


if __name__ == "__main__":
    main()
