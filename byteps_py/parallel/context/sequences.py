"""Sequences and their shards: what a rank of a context-parallel group holds, and the whole (Llama 3, section 4).

All ranks of a group call these functions alike; with no group, or a group of one rank, a shard is the whole. Targets
must be shifted before they are sharded, because the token after the last of a chunk is on another rank:

    inputs, targets = (shard_sequence(some, group, dim=1) for some in (tokens[:, :-1], tokens[:, 1:]))

One thread.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from byteps_py.errors import UsageError
from byteps_py.parallel.context.document_mask import DocumentMask
from byteps_py.parallel.context.exchange import all_gather_sequences, place_in, reduce_scatter_sequences
from byteps_py.parallel.context.head_tail import head_tail_chunks


def shard_sequence(tensor: torch.Tensor, group: dist.ProcessGroup | None, dim: int) -> torch.Tensor:
    """This rank's two chunks of ``tensor``, one after the other along ``dim``. No communication.

    Args:
        tensor: the whole sequence, the same on all ranks, of any dtype and shape; ``dim`` has S entries.
        group: the ranks that share the sequence.
        dim: of the sequence.

    Its gradient is 0 where other ranks' chunks are. Raises UsageError if S is not a multiple of twice the number of
    ranks.
    """
    rank, size = place_in(group)
    _check_dim(tensor, dim)
    if size == 1:
        return tensor
    chunks = head_tail_chunks(tensor.shape[dim], size, rank)
    return torch.cat([tensor.narrow(dim, chunk.start, len(chunk)) for chunk in chunks], dim)


def unshard_sequence(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, dim: int, *, gradient: Literal["sum", "own"] = "sum"
) -> torch.Tensor:
    """The whole sequence, on all ranks, from the chunks of each; undoes ``shard_sequence``. One all-gather.

    Args:
        tensor: this rank's chunks; the same shape and dtype on all ranks.
        group: the ranks that share the sequence.
        dim: of the sequence.
        gradient: in the backward pass, "sum": gradients of all ranks are summed by a reduce-scatter, as for the sum of
            the losses of all ranks. "own": a rank takes the gradient of its chunks and drops the rest, without
            communication; for a loss of the whole sequence that all ranks compute alike.

    Raises UsageError if the shard is not two chunks of one length.
    """
    _, size = place_in(group)
    _check_dim(tensor, dim)
    if gradient not in ("sum", "own"):
        raise UsageError(f"gradient={gradient!r}: give 'sum' or 'own'")
    if group is None or size == 1:
        return tensor
    check_shard(tensor.shape[dim], size)
    whole: torch.Tensor = _Unshard.apply(tensor, group, dim, gradient == "sum")  # type: ignore[no-untyped-call]
    return whole


def positions(
    length: int,
    group: dist.ProcessGroup | None,
    *,
    mask: DocumentMask | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The positions of this rank's tokens in the sequence, for rotary embeddings: int64, of the shape (S / cp,).

    Args:
        length: of the whole sequence, S.
        group: the ranks that share the sequence.
        mask: count from the beginning of each document instead; the shape is then (rows of the mask, S / cp).
        device: of the result.

    Raises UsageError if S is not a multiple of twice the number of ranks, or the mask has another length.
    """
    rank, size = place_in(group)
    if mask is None:
        return torch.cat(
            [torch.arange(chunk.start, chunk.stop, device=device) for chunk in head_tail_chunks(length, size, rank)]
        )
    mask.check(len(mask.lengths), length)
    rows = [torch.cat([torch.arange(each, device=device) for each in lengths]) for lengths in mask.lengths]
    return shard_sequence(torch.stack(rows), group, dim=1)


def check_shard(length: int, size: int) -> None:
    """Raises UsageError if ``length`` tokens are not the two chunks of one rank of ``size``."""
    if length < 2 or length % 2:
        raise UsageError(
            f"this rank has {length} tokens, which are not two chunks of one length: shard a sequence padded to "
            f"a multiple of 2 * {size} = {2 * size} tokens by shard_sequence()"
        )


def _check_dim(tensor: torch.Tensor, dim: int) -> None:
    if not -tensor.dim() <= dim < tensor.dim():
        raise UsageError(f"dim={dim}: the tensor has {tensor.dim()} dimensions, {list(tensor.shape)}")


class _Unshard(torch.autograd.Function):
    """Conjugate to itself: all-gather, and back reduce-scatter, or the own part."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, dim: int, sums: bool) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.sums = group, dim, sums
        return all_gather_sequences([tensor], dim, group)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if not ctx.sums:
            return shard_sequence(gradients[0], ctx.group, ctx.dim), None, None, None
        return *reduce_scatter_sequences(gradients, ctx.dim, ctx.group), None, None, None
