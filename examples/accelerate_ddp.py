"""Accelerate with the backend "byteps": it uses the process group that is there.

torchrun --nproc-per-node 2 examples/accelerate_ddp.py    # pip install accelerate
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import byteps_py.torch  # noqa: F401  the backend; not needed if pip has installed byteps_py

EPOCHS = 8


def main() -> None:
    dist.init_process_group("byteps")  # before the Accelerator, which would choose another backend
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    points = 4 * torch.rand(4096, 2) - 2
    loader = DataLoader(TensorDataset(points), batch_size=128, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(EPOCHS):
        total = torch.zeros(1, device=accelerator.device)
        for (batch,) in loader:
            loss = nn.functional.mse_loss(model(batch), (batch[:, :1] * batch[:, 1:]).sin())
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach() / len(loader)
        mean = accelerator.reduce(total, "mean")
        if epoch in (0, EPOCHS - 1):
            ranks = accelerator.num_processes
            accelerator.print(f"step {epoch}: mean loss {mean.item():.4f} on {ranks} ranks, {dist.get_backend()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
