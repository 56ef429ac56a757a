"""ElasticSampler: a distributed sampler that remembers how far an epoch has come. The training thread calls."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from byteps_py.torch.horovod.api import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides a dataset among the ranks, and again, what is left of it, after the job was joined again.

    Put it into the TorchState, call ``record_batch`` after each batch and ``set_epoch`` at the end of each epoch.
    dataset: of constant length. shuffle: each epoch in another order, the same on all ranks. seed: of that order.
    All ranks have equally many samples: where they do not go round, some are given twice.

    >>> import byteps_py as bps
    >>> bps.init()
    >>> sampler = ElasticSampler(range(5), shuffle=False)
    >>> sampler.record_batch(0, 2)
    >>> sampler.load_state_dict(sampler.state_dict())  # as a restored state does
    >>> list(sampler)
    [2, 3, 4]
    >>> bps.shutdown()
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__()
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0  # samples of this epoch that all ranks together have processed
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch number ``epoch``: nothing of it is processed. Call it at the end of the one before."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has processed ``batch_size`` samples. The division of the rest stays until ``reset``."""
        self.processed_num += batch_size * self.num_replicas

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """This rank's samples in batch number ``batch_idx`` since the last ``reset``."""
        return self._mine()[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to where ``state_dict`` was taken, and divide what is left among the present ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide what is left among the present ranks."""
        self.num_replicas = size()
        self.rank = rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def _mine(self) -> list[int]:
        padded = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return list(padded)[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self._mine())

    def __len__(self) -> int:
        return self.num_samples
