"""The norm of all gradients of a model, and clipping, where parameters lie in parts on several ranks.

A parameter that tensor-parallel ranks or FSDP2 have cut counts with all its parts; one that several ranks hold counts
once. Gradients are those after their sums over data-parallel ranks. One thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from byteps_py.errors import UsageError
from byteps_py.parallel.collectives import size_of
from byteps_py.parallel.tensor.layers import local_part
from byteps_py.parallel.tensor.parallel_plan import sharded_parameters, tensor_parallel_group
from byteps_py.parallel.tensor.shard import Shard

_Groups = tuple[dist.ProcessGroup, ...]
#: Rows of a parameter that several tensor-parallel ranks hold: start, stop, number of ranks.
Copied = tuple[tuple[int, int, int], ...]


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, groups: Sequence[dist.ProcessGroup] = ()
) -> torch.Tensor:
    """Like ``torch.nn.utils.clip_grad_norm_``, for a model whose parameters may be cut by ``tensor.parallelize`` and
    FSDP2. Returns the norm before clipping, a scalar that is the same on all ranks. A Pipeline has a method of this
    name.

        loss.backward()
        norm = clip_grad_norm_(model, 1.0)

    Args:
        model: of this rank. All ranks of its groups call it.
        max_norm: the largest norm that gradients keep.
        norm_type: from 1 on, or inf.
        groups: ranks with other parameters, such as the stages of a pipeline.
    """
    named = [(name, one.grad) for name, one in model.named_parameters() if one.grad is not None]
    partial = partial_norms(named, sharded_parameters(model), tensor_parallel_group(model), norm_type)
    norm = total_norm(partial, groups, norm_type)
    scale_gradients((parameter for parameter in model.parameters()), max_norm, norm)
    return norm


def partial_norms(
    named: Iterable[tuple[str, torch.Tensor]],
    shards: Mapping[str, Shard],
    tp: dist.ProcessGroup | None,
    norm_type: float,
) -> torch.Tensor:
    """Σ |g|^norm_type (or the largest |g|, for inf) over the gradients of the ranks that share their parameters with
    this one: a float64 scalar. ``shards``: of the parameters that the ranks of ``tp`` have cut."""
    if norm_type < 1.0:
        raise UsageError(f"norm_type={norm_type} must be from 1 on, or inf")
    by_groups: dict[_Groups, list[torch.Tensor]] = {}
    for name, gradient in named:
        groups: _Groups = ()
        local = gradient
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            sharded = [dim for dim, one in enumerate(gradient.placements) if one.is_shard()]
            groups = tuple(mesh.get_group(dim) for dim in sharded if mesh.size(dim) > 1)
            local = gradient.to_local()
        copied: Copied = ()
        if name in shards and tp is not None and size_of(tp) > 1:
            groups = (*groups, tp)
            copied = shards[name].copied()
        by_groups.setdefault(groups, []).extend(_norms(local, local_part(gradient, 0)[1], copied, norm_type))
    is_infinite = norm_type == float("inf")
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for groups, norms_ in by_groups.items():
        norms = torch.stack(norms_)
        value = norms.max() if is_infinite else (norms**norm_type).sum()
        for group in groups:
            dist.all_reduce(value, dist.ReduceOp.MAX if is_infinite else dist.ReduceOp.SUM, group=group)
        total = total.to(value.device)
        total = torch.maximum(total, value) if is_infinite else total + value
    return total


def total_norm(partial: torch.Tensor, groups: Sequence[dist.ProcessGroup], norm_type: float) -> torch.Tensor:
    """The norm, from ``partial_norms`` of ranks with different parameters."""
    is_infinite = norm_type == float("inf")
    for group in groups:
        dist.all_reduce(partial, dist.ReduceOp.MAX if is_infinite else dist.ReduceOp.SUM, group=group)
    return partial if is_infinite else partial ** (1.0 / norm_type)


def scale_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    """Multiply the gradients by max_norm / norm if that is below 1."""
    multiply_gradients(parameters, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def multiply_gradients(parameters: Iterable[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply the gradients that are there by a scalar, which may lie on another device."""
    for parameter in parameters:
        if parameter.grad is not None:
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            local.mul_(factor.to(local.device))


def _norms(local: torch.Tensor, first: int, copied: Copied, norm_type: float) -> list[torch.Tensor]:
    """The norms of ``local``, the rows from ``first`` on of a rank's gradient; rows that several ranks hold count once
    in all."""
    found, place = [], 0
    for start, stop, number in copied:
        start, stop = (min(max(row - first, 0), len(local)) for row in (start, stop))
        found.append(_norm(local[place:start], norm_type))
        found.append(_norm(local[start:stop], norm_type) * number ** (-1.0 / norm_type))
        place = stop
    return [*found, _norm(local[place:] if place else local, norm_type)]


def _norm(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    if not tensor.numel():
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    precise = torch.promote_types(tensor.dtype, torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, norm_type, dtype=precise)
    return norm.double()
