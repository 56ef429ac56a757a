"""Hugging Face's Trainer with the backend "byteps": a small GPT-2 from scratch, on text that counts.

torchrun --nproc-per-node 2 examples/transformers_trainer.py    # pip install 'transformers[torch]'
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import byteps_py.torch  # noqa: F401  the backend; not needed if pip has installed byteps_py

WORDS, LENGTH = 32, 24


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences of numbers, each by a fixed step more than the one before."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + torch.arange(LENGTH) * (1 + index % 3)) % WORDS
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    dist.init_process_group("byteps")  # before TrainingArguments, which would choose another backend
    config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=4,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            logging_steps=8,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Counting())
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for step in (0, len(losses) - 1):
        if dist.get_rank() == 0:
            mean = float(losses[step])
            print(
                f"step {step}: mean loss {mean:.4f} on {dist.get_world_size()} ranks, {dist.get_backend()}", flush=True
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
