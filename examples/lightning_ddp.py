"""Lightning's Trainer with the backend "byteps".

torchrun --nproc-per-node 2 examples/lightning_ddp.py    # pip install lightning
"""

from __future__ import annotations

import os

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import byteps_py.torch  # noqa: F401  the backend; not needed if pip has installed byteps_py


class Regression(lightning.LightningModule):
    """Learns sin(x · y)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        (points,) = batch
        loss = nn.functional.mse_loss(self.layers(points), (points[:, :1] * points[:, 1:]).sin())
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            loss = self.trainer.callback_metrics["loss"]
            epoch, ranks = self.current_epoch, self.trainer.world_size
            print(f"step {epoch}: mean loss {loss:.4f} on {ranks} ranks, {torch.distributed.get_backend()}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    points = 4 * torch.rand(4096, 2, generator=torch.Generator().manual_seed(0)) - 2
    trainer = lightning.Trainer(
        strategy=DDPStrategy(process_group_backend="byteps"),
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_epochs=8,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(TensorDataset(points), batch_size=128, shuffle=True))


if __name__ == "__main__":
    main()
