"""FSDP2: each rank has one piece of the parameters, gradients and optimizer state. Writes a checkpoint of them.

torchrun --nproc-per-node 2 examples/torch_fsdp2.py --checkpoint /tmp/checkpoint
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

import byteps_py.torch  # noqa: F401  the backend; not needed if pip has installed byteps_py


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", help="folder for the trained model")
    arguments = parser.parse_args()

    dist.init_process_group("byteps")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)  # parameters are gathered while the layer computes
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
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
    if arguments.checkpoint:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=arguments.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
