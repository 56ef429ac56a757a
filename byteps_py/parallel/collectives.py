"""Collectives that several dimensions use: torch.distributed's where names differ between versions, and as functions
that return new tensors. Autograd sees none of them: for that, see tensor/regions.py. One thread."""

from __future__ import annotations

import torch
import torch.distributed as dist

from byteps_py.errors import UsageError

Group = dist.ProcessGroup | None

#: The names from torch 2.13 on, or those before.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather_single(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Put the ranks' ``tensor``, of equal shapes, one behind the other into ``output``."""
    getattr(dist, ALL_GATHER)(output, tensor, group=group)


def reduce_scatter_single(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Put this rank's part of the sum of the ranks' ``tensor`` into ``output``."""
    getattr(dist, REDUCE_SCATTER)(output, tensor, group=group)


def size_of(group: Group) -> int:
    """The number of ranks of ``group``; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: Group) -> int:
    """The position of this rank in ``group``; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def all_reduced(tensor: torch.Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """A new tensor with the sum (or another ``op``) over the ranks."""
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if size_of(group) > 1:
        dist.all_reduce(result, op, group=group)
    return result


def all_gathered(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """The ranks' tensors of equal shapes, joined along ``dim``."""
    ranks = size_of(group)
    own = tensor.detach().contiguous()
    parts = own.new_empty((ranks, *own.shape))
    all_gather_single(parts.view(-1, *own.shape[1:]), own, group=group)
    if dim % own.dim() == 0:
        return parts.view(-1, *own.shape[1:])
    return torch.cat(tuple(parts), dim)


def summed_among(tensor: torch.Tensor, group: Group, copied: tuple[tuple[int, int, int], ...]) -> torch.Tensor:
    """``tensor`` with the sums of the ranges that ranks have in common: see copy_among in tensor/regions.py. The same
    bits on those ranks."""
    result, place = tensor.detach().clone(memory_format=torch.contiguous_format), 0
    own = torch.cat([result[start:stop] for start, stop, _ in copied])
    parts = all_gathered(own.unsqueeze(0), group, 0)
    for start, stop, number in copied:
        first = rank_in(group) // number * number
        result[start:stop] = parts[first : first + number, place : place + stop - start].sum(0)
        place += stop - start
    return result


def reduce_scattered(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's part, along ``dim``, of the sum."""
    check_divides(tensor, group, dim)
    parts = torch.stack(tensor.detach().chunk(size_of(group), dim))
    result = parts.new_empty(parts.shape[1:])
    reduce_scatter_single(result.view(-1), parts.view(-1), group=group)
    return result


def own_part(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's part along ``dim``, contiguous."""
    check_divides(tensor, group, dim)
    return tensor.detach().chunk(size_of(group), dim)[rank_in(group)].contiguous()


def check_divides(tensor: torch.Tensor, group: Group, dim: int) -> None:
    """Raises UsageError if ``tensor`` can't be cut into equal parts along ``dim``."""
    ranks, length = size_of(group), tensor.shape[dim]
    if length % ranks:
        raise UsageError(
            f"{ranks} tensor-parallel ranks do not divide dimension {dim} of a tensor of shape {tuple(tensor.shape)}: "
            f"pad its {length} to {-(-length // ranks) * ranks}"
        )
