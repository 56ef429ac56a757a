"""Sequences and their shards: the share of a rank of a context-parallel group, and the whole (Llama 3, section 4).

All ranks of a group call these functions alike; with no group, or a group of one rank, a shard is the whole. Targets
must be shifted before they are sharded, because the token after the last of a chunk is on another rank:

    inputs, targets = (shard_sequence(some, group, dim=1) for some in (tokens[:, :-1], tokens[:, 1:]))

Means over each rank's tokens can't be averaged, because masked targets make ranks count different numbers: see
``token_mean_loss``. One thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from byteps_py.errors import UsageError
from byteps_py.parallel.collectives import all_gather_single, reduce_scatter_single
from byteps_py.parallel.context.document_mask import DocumentMask
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


# ---- the loss ------------------------------------------------------------------------------------------------------


def token_mean_loss(
    loss_sum: torch.Tensor,
    token_count: torch.Tensor | float,
    group: dist.ProcessGroup | None,
    *,
    reduction: Literal["sum", "mean"] = "sum",
) -> torch.Tensor:
    """The sum of all ranks' ``loss_sum`` by the sum of their ``token_count``, on all ranks. One all-reduce of two
    numbers. All ranks of the group call it alike.

        loss_sum = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        loss = token_mean_loss(loss_sum, (targets != -100).sum(), group)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)  # the sum: not the mean

    Args:
        loss_sum: one number, the sum over this rank's tokens that count.
        token_count: how many count here. Masked targets do not; it may be 0 on some ranks.
        group: the ranks that the tokens are spread over, and that gradients are reduced over: those of context
            parallelism, or of data and context parallelism together. None: this rank is alone.
        reduction: of the parameters' gradients over ``group``, by the caller. After "sum", they are those of the global
            mean. Give "mean" if the caller, or a wrapper as DistributedDataParallel or FSDP, takes the mean over the
            group's ranks: gradients are then multiplied by their number.

    Returns one number with the dtype of ``loss_sum``. Without any token that counts, it and its gradients are 0.

    Raises UsageError if ``loss_sum`` is not one number, or the count is negative.
    """
    _, size = place_in(group)
    if loss_sum.numel() != 1 or not loss_sum.is_floating_point():
        raise UsageError(
            f"loss_sum is {loss_sum.dtype} of the shape {list(loss_sum.shape)}: give the sum over this rank's tokens, "
            "one floating-point number (reduction='sum')"
        )
    if reduction not in ("sum", "mean"):
        raise UsageError(f"reduction={reduction!r}: give 'sum' or 'mean', as gradients are reduced")
    count = torch.as_tensor(token_count, dtype=torch.float64, device=loss_sum.device)
    if count.numel() != 1 or (not count.is_cuda and float(count) < 0):
        raise UsageError(f"token_count is {token_count}: give one number, 0 or more")
    loss: torch.Tensor = _GlobalMean.apply(  # type: ignore[no-untyped-call]
        loss_sum.reshape(()), count.reshape(()), group if size > 1 else None, size if reduction == "mean" else 1
    )
    return loss


class _GlobalMean(torch.autograd.Function):
    """All-reduce forwards; backwards each rank's sum has the gradient 1 / count, without communication."""

    @staticmethod
    def forward(
        ctx: Any, loss_sum: torch.Tensor, count: torch.Tensor, group: dist.ProcessGroup | None, factor: int
    ) -> torch.Tensor:
        both = torch.stack([loss_sum.to(torch.float64), count])
        if group is not None:
            dist.all_reduce(both, group=group)
        total, tokens = both
        share = torch.where(tokens > 0, 1 / tokens.clamp(min=1e-300), 0.0)
        ctx.share = share * factor
        mean: torch.Tensor = (total * share).to(loss_sum.dtype)
        return mean

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (gradients[0] * ctx.share).to(gradients[0].dtype), None, None, None


# ---- moving sequences between ranks --------------------------------------------------------------------------------


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(own rank in the group, its size); (0, 1) without a group. Raises UsageError on a rank outside the group."""
    if group is None:
        return 0, 1
    if not isinstance(group, dist.ProcessGroup | int):  # an int stands for a group without this rank
        raise UsageError(f"group is a {type(group).__name__}: give a process group, as mesh.get_group('cp'), or None")
    if isinstance(group, int) or (rank := dist.get_rank(group)) < 0:
        raise UsageError(
            f"rank {dist.get_rank()} is not in the context-parallel group: give the group that has it, or None for no "
            "context parallelism"
        )
    return rank, dist.get_world_size(group)


def all_gather_sequences(tensors: Sequence[torch.Tensor], dim: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The whole sequences of which each rank holds its two chunks along ``dim``, by one collective."""
    size = dist.get_world_size(group)
    own = torch.cat([tensor.reshape(-1) for tensor in tensors])
    gathered = own.new_empty(size * own.numel())
    all_gather_single(gathered, own, group)
    by_rank = gathered.view(size, -1).split([tensor.numel() for tensor in tensors], dim=1)
    return [
        in_order([piece.view(tensor.shape) for piece in pieces], dim)
        for pieces, tensor in zip(by_rank, tensors, strict=True)
    ]


def reduce_scatter_sequences(tensors: Sequence[torch.Tensor], dim: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """This rank's two chunks of the sums over all ranks of whole sequences, by one collective."""
    size = dist.get_world_size(group)
    pieces = [by_rank(tensor, dim, size) for tensor in tensors]
    whole = torch.cat([piece.reshape(-1) for rank in range(size) for piece in (one[rank] for one in pieces)])
    own = whole.new_empty(whole.numel() // size)
    reduce_scatter_single(own, whole, group)
    parts = own.split([one[0].numel() for one in pieces])
    return [part.view(one[0].shape) for part, one in zip(parts, pieces, strict=True)]


def in_order(by_ranks: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The whole sequence from the two chunks of each rank."""
    halves = [tensor.chunk(2, dim) for tensor in by_ranks]
    return torch.cat([*(head for head, _ in halves), *(tail for _, tail in reversed(halves))], dim)


def by_rank(tensor: torch.Tensor, dim: int, size: int) -> list[torch.Tensor]:
    """The two chunks of each rank from the whole sequence."""
    chunks = tensor.chunk(2 * size, dim)
    return [torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim) for rank in range(size)]


@dataclass(frozen=True, slots=True)
class RingHop:
    """A tensor on its way to the next rank, and one that comes from the rank before."""

    works: Sequence[dist.Work]
    sent: torch.Tensor  # kept until it has left
    received: torch.Tensor

    @classmethod
    def start(cls, tensor: torch.Tensor, group: dist.ProcessGroup, tag: int) -> RingHop:
        """All ranks call it, in one order. ``tag``: tells apart the hops that are under way together."""
        rank, size = place_in(group)
        sent, received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        send = dist.P2POp(dist.isend, sent, group=group, tag=tag, group_peer=(rank + 1) % size)
        receive = dist.P2POp(dist.irecv, received, group=group, tag=tag, group_peer=(rank - 1) % size)
        # Odd ranks receive first: a backend that carries out one operation after the other does not wait in a circle.
        return cls(dist.batch_isend_irecv([send, receive] if rank % 2 == 0 else [receive, send]), sent, received)

    def finish(self) -> torch.Tensor:
        """The tensor that the rank before has sent. Raises the errors of the backend."""
        for work in self.works:
            work.wait()
        return self.received
