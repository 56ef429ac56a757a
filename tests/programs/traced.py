"""A training whose steps are traced: a DistributedOptimizer, sums in the groups of a mesh, a message to the next rank.
Argument: the number of steps."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import byteps_py.torch as bps


def main(steps: int) -> None:
    bps.init()
    dist.init_process_group("byteps")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    for step in range(steps):
        data = torch.randn(64, 256)
        hidden = model(data)
        dist.all_reduce(torch.ones(1000), group=mesh.get_group("tp"))
        sent = dist.isend(torch.ones(500), (rank + 1) % size)
        dist.recv(torch.empty(500), (rank - 1) % size)
        sent.wait()
        optimizer.zero_grad()
        hidden.square().mean().backward()
        optimizer.step()
        if step == 20:
            print(f"rank {rank}: step 20", flush=True)
    print(f"rank {rank}: done", flush=True)
    bps.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
