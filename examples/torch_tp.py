"""Tensor parallelism: each rank has one piece of each layer's weights, and all ranks compute on the same inputs.

torchrun --nproc-per-node 2 examples/torch_tp.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import byteps_py.torch  # noqa: F401  the backend; not needed if pip has installed byteps_py


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()

    dist.init_process_group("byteps")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)  # the same points on all ranks
    for step in range(arguments.steps):
        x = 4 * torch.rand(128, 2, generator=generator) - 2
        loss = nn.functional.mse_loss(model(x), (x[:, :1] * x[:, 1:]).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, arguments.steps - 1) and dist.get_rank() == 0:
            print(f"step {step}: mean loss {loss.item():.4f} on {dist.get_world_size()} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
