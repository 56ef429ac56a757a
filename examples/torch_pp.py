"""Pipeline parallelism: each rank has some of the layers, and micro-batches go through them (schedule 1F1B).

torchrun --nproc-per-node 2 examples/torch_pp.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import byteps_py.torch  # noqa: F401  the backend; not needed if pip has installed byteps_py

WIDTH = 64


def layers_of(rank: int, size: int) -> nn.Module:
    """The layers that ``rank`` of ``size`` ranks computes."""
    first = nn.Linear(2 if rank == 0 else WIDTH, WIDTH)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(WIDTH, 1 if rank == size - 1 else WIDTH))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()

    dist.init_process_group("byteps")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    module = layers_of(rank, size)
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for step in range(arguments.steps):
        x = 4 * torch.rand(128, 2, generator=generator) - 2
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        target = (x[:, :1] * x[:, 1:]).sin()
        arguments_of_stage = (x,) if rank == 0 else ()
        if rank == size - 1:
            schedule.step(*arguments_of_stage, target=target, losses=losses)
        else:
            schedule.step(*arguments_of_stage)
        optimizer.step()
        if step in (0, arguments.steps - 1) and losses:
            mean = torch.stack(losses).mean().item()
            print(f"step {step}: mean loss {mean:.4f} on {size} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
