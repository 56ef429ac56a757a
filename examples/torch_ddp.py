"""DistributedDataParallel with the backend "byteps": every machine of the cluster helps to sum gradients.

torchrun --nproc-per-node 2 examples/torch_ddp.py
DMLC_NUM_SERVER=1 … torchrun --nnodes 2 … examples/torch_ddp.py  # CPU machines: docs/howto/torch-distributed.md
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import byteps_py.torch  # noqa: F401  the backend; not needed if pip has installed byteps_py


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()

    dist.init_process_group("byteps")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())  # each rank has its own points
    for step in range(arguments.steps):
        x = 4 * torch.rand(128, 2, generator=generator) - 2
        loss = nn.functional.mse_loss(model(x), (x[:, :1] * x[:, 1:]).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, arguments.steps - 1):
            mean = loss.detach().clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            if dist.get_rank() == 0:
                print(f"step {step}: mean loss {mean.item():.4f} on {dist.get_world_size()} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
