"""ElasticSampler: a distributed sampler that keeps track of processed samples. The training thread calls."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from byteps_py.torch.horovod.api import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides a dataset among the ranks. When the job was joined again, it divides the remaining samples.

    Pass it to the TorchState. Call ``record_batch`` after each batch, and ``set_epoch`` at the end of each epoch.
    dataset: of constant length. shuffle: whether each epoch has another order, which is the same on all ranks. seed: of
    the order. All ranks get the same number of samples: if the division leaves a remainder, some samples occur twice.

    >>> import byteps_py as bps
    >>> bps.init()
    >>> sampler = ElasticSampler(range(5), shuffle=False)
    >>> sampler.record_batch(0, 2)
    >>> sampler.load_state_dict(sampler.state_dict())  # as TorchState does on restore
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
        self.processed_num = 0  # samples of this epoch that all ranks have processed
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch number ``epoch`` with no sample processed. Call it at the end of the epoch before."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed ``batch_size`` samples. Samples are divided again only by ``reset``."""
        self.processed_num += batch_size * self.num_replicas

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """This rank's samples in batch number ``batch_idx`` since the last ``reset``."""
        return self._mine()[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """The epoch and the number of processed samples, for ``load_state_dict``."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Return to the position in ``state_dict``, and divide the remaining samples among the current ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the current ranks."""
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
