"""One rank of benchmarks/hosted.py. Arguments: the contender, millions of parameters, steps of a turn."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent.parent))

import byteps_py.torch as bps
from benchmarks.turns import measured, orders

WIDTH = 1000  # a million parameters in each matrix


class Matrices(nn.Module):
    """``count`` matrices; the forward pass touches each once."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for layer in self.layers:
            total = total + layer(x).sum()
        return total


def main() -> None:
    contender, count, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = Matrices(count)
    options = {"lr": 1e-3, "weight_decay": 0.1}
    is_ours = contender == "on ranks" or contender.startswith("hosted")
    if is_ours:
        bps.init()
        optimizer = bps.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), **options),
            model.named_parameters(),
            hosted=contender != "on ranks",
            step_in_backward=contender.endswith("step in backward"),
        )
    else:
        dist.init_process_group("byteps")
        if contender == "zero1":
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)  # type: ignore[arg-type]
        else:
            for layer in model.layers:  # type: ignore[union-attr]
                fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False))
            whole = fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
            optimizer = torch.optim.AdamW(whole.parameters(), **options)
    x = torch.ones(1, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    with orders() as words:
        for _, answer in words:
            answer(measured(step, steps))
    if is_ours:
        bps.shutdown()
    else:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
