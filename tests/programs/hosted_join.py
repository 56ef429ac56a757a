"""Rank 1 joins after three steps of a hosted optimizer, and rank 0 makes a fourth: an error that names both.
Argument: the kind of steps."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

import byteps_py as bps

KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "delayed": {"delayed_update_after": 1}, "in_backward": {"step_in_backward": True},
}  # fmt: skip


def main() -> None:
    bps.init()
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters(), hosted=True, **KINDS[sys.argv[1]])
    rank = bps.rank()
    try:
        for _ in range(6 - 3 * rank):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        bps.join()
    except bps.BytePSError as error:
        os.write(1, f"{rank}: {type(error).__name__}: {error}\n".encode())
        os._exit(0)  # the job has failed; nothing is to be completed


if __name__ == "__main__":
    main()
