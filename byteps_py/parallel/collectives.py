"""Collectives of torch.distributed that have got other names. One thread."""

from __future__ import annotations

import torch
import torch.distributed as dist

#: The names from torch 2.13 on, or those before.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather_single(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Put the ranks' ``tensor``, of equal shapes, one behind the other into ``output``."""
    getattr(dist, ALL_GATHER)(output, tensor, group=group)


def reduce_scatter_single(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Put this rank's part of the sum of the ranks' ``tensor`` into ``output``."""
    getattr(dist, REDUCE_SCATTER)(output, tensor, group=group)
