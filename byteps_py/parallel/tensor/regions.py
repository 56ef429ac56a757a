"""The conjugate operations at the borders of tensor-parallel regions: f and g of Megatron-LM (section 3), and the forms
for sequence parallelism (Korthikanti et al., section 4.2.2).

| function | forward | backward |
|---|---|---|
| copy_to_ranks (f) | identity | all-reduce |
| reduce_from_ranks (g) | all-reduce | identity |
| gather_along (f with sequence parallelism) | all-gather | reduce-scatter |
| reduce_scatter_along (g with sequence parallelism) | reduce-scatter | all-gather |
| split_along | the own part | all-gather |
| collect_along | all-gather | the own part |

All ranks of ``group`` call them in the same order. With ``group`` None or of one rank they return their argument. Sums
are in the order of the ranks, the same bits on all. One thread.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from byteps_py.errors import UsageError

Group = dist.ProcessGroup | None
#: The names in torch 2.13 and later, or those before.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def size_of(group: Group) -> int:
    """The number of ranks of ``group``; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: Group) -> int:
    """The position of this rank in ``group``; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def copy_to_ranks(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """f: each rank uses ``tensor``, which is the same on all, in a computation of its own; gradients are summed."""
    return tensor if size_of(group) == 1 else _run(_Copy, tensor, group)


def reduce_from_ranks(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """g: the sum of the ranks' ``tensor``, on all; the gradient of the sum is that of each of them."""
    return tensor if size_of(group) == 1 else _run(_Reduce, tensor, group)


def gather_along(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """The ranks' parts, joined along ``dim``, for computations that differ among ranks; gradients are summed."""
    return tensor if size_of(group) == 1 else _run(_Gather, tensor, group, dim)


def reduce_scatter_along(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's part, along ``dim``, of the sum of the ranks' ``tensor``. Raises UsageError if the number of ranks
    does not divide it."""
    return tensor if size_of(group) == 1 else _run(_ReduceScatter, tensor, group, dim)


def split_along(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's part, along ``dim``, of a ``tensor`` that all ranks have. Raises UsageError if the number of ranks
    does not divide it."""
    return tensor if size_of(group) == 1 else _run(_Split, tensor, group, dim)


def collect_along(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """The ranks' parts, joined along ``dim``, for computations that are the same on all ranks."""
    return tensor if size_of(group) == 1 else _run(_Collect, tensor, group, dim)


# ---- collectives ---------------------------------------------------------------------------------------------------


def all_reduced(tensor: torch.Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """A new tensor with the sum (or another ``op``) over the ranks. Not differentiable."""
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if size_of(group) > 1:
        dist.all_reduce(result, op, group=group)
    return result


def all_gathered(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """The ranks' tensors of equal shapes, joined along ``dim``. Not differentiable."""
    ranks = size_of(group)
    own = tensor.detach().contiguous()
    parts = own.new_empty((ranks, *own.shape))
    getattr(dist, ALL_GATHER)(parts.view(-1, *own.shape[1:]), own, group=group)
    if dim % own.dim() == 0:
        return parts.view(-1, *own.shape[1:])
    return torch.cat(tuple(parts), dim)


def reduce_scattered(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's part, along ``dim``, of the sum. Not differentiable."""
    check_divides(tensor, group, dim)
    parts = torch.stack(tensor.detach().chunk(size_of(group), dim))
    result = parts.new_empty(parts.shape[1:])
    getattr(dist, REDUCE_SCATTER)(result.view(-1), parts.view(-1), group=group)
    return result


def own_part(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's part along ``dim``, a view."""
    check_divides(tensor, group, dim)
    return tensor.chunk(size_of(group), dim)[rank_in(group)]


def check_divides(tensor: torch.Tensor, group: Group, dim: int) -> None:
    """Raises UsageError if ``tensor`` can't be cut into equal parts along ``dim``."""
    ranks, length = size_of(group), tensor.shape[dim]
    if length % ranks:
        raise UsageError(
            f"{ranks} tensor-parallel ranks do not divide dimension {dim} of a tensor of shape {tuple(tensor.shape)}: "
            f"pad its {length} to {-(-length // ranks) * ranks}"
        )


def _run(function: Any, *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)
    return result


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return all_reduced(gradient, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        return all_reduced(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gathered(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return reduce_scattered(gradient, ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scattered(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return all_gathered(gradient, ctx.group, ctx.dim), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return own_part(tensor, group, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return all_gathered(gradient, ctx.group, ctx.dim), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gathered(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return own_part(gradient, ctx.group, ctx.dim).contiguous(), None, None
