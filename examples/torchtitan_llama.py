"""torchtitan's Trainer with the backend "byteps": a small Llama 3 with FSDP2, on text that counts.

torchrun --nproc-per-node 2 examples/torchtitan_llama.py    # pip install torchtitan==0.2.2 triton
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components import metrics
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import JobConfig
from torchtitan.distributed import parallel_dims, utils as distributed_utils
from torchtitan.models import llama3
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.tools import utils
from torchtitan.train import Trainer

import byteps_py.torch  # noqa: F401  the backend; not needed if pip has installed byteps_py

WORDS, LENGTH, STEPS = 32, 24, 30


class Processor:
    """What torchtitan asks of an accelerator, for machines without one."""

    @staticmethod
    def set_device(device: torch.device) -> None:
        pass

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_device_name(device: torch.device) -> str:
        return "CPU"

    @staticmethod
    def get_device_properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1 << 30)

    @staticmethod
    def memory_stats(device: torch.device) -> dict[str, int]:
        return {}

    @staticmethod
    def synchronize() -> None:
        pass

    reset_peak_memory_stats = empty_cache = synchronize


class Counting(BaseDataLoader):
    """Sequences of numbers, each by a fixed step more than the one before."""

    def __init__(self, dp_world_size: int, dp_rank: int, tokenizer: None, job_config: JobConfig) -> None:
        self._ranks, self._rank = dp_world_size, dp_rank
        self._batch = job_config.training.local_batch_size
        self._used = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            first = (self._used * self._ranks + self._rank) * self._batch
            starts = torch.arange(first, first + self._batch)[:, None]
            tokens = (starts + torch.arange(LENGTH + 1) * (1 + starts % 3)) % WORDS
            self._used += 1
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"used": self._used}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._used = state_dict["used"]


class Printed(metrics.MetricsProcessor):
    """Prints the loss."""

    def __init__(self, job_config: JobConfig, parallel_dims: Any, model_args: Any) -> None:
        super().__init__(job_config, parallel_dims)

    def log(self, step: int, global_avg_loss: float, *rest: Any, **named: Any) -> None:
        super().log(step, global_avg_loss, *rest, **named)
        if dist.get_rank() == 0:
            ranks = dist.get_world_size()
            print(f"step {step}: mean loss {global_avg_loss:.4f} on {ranks} ranks, {dist.get_backend()}", flush=True)


def main() -> None:
    if not torch.cuda.is_available():
        for module in (utils, distributed_utils, parallel_dims, metrics):
            module.device_type, module.device_module = "cpu", Processor
    dist.Backend.default_device_backend_map[utils.device_type] = "byteps"  # torchtitan takes the device's backend
    small = llama3.TransformerModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=WORDS, max_seq_len=LENGTH)
    spec = dataclasses.replace(
        llama3.get_train_spec(),
        model_args={"small": small},
        build_dataloader_fn=Counting,
        build_tokenizer_fn=None,  # the numbers are tokens
        build_metrics_processor_fn=Printed,
        state_dict_adapter=None,
    )
    register_train_spec("counting", spec)
    config = JobConfig()
    config.model.name, config.model.flavor = "counting", "small"
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 16, LENGTH, STEPS
    config.optimizer.lr, config.lr_scheduler.warmup_steps = 1e-2, 2
    config.activation_checkpoint.mode = "none"
    config.metrics.log_freq = STEPS
    with tempfile.TemporaryDirectory() as config.job.dump_folder:
        trainer = Trainer(config)
        trainer.train()
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
