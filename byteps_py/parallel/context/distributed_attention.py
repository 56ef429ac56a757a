"""Attention with a sequence on several ranks: ``attention`` gathers keys and values (Llama 3, section 4), for
``ring_attention`` they travel from rank to rank (Ring Attention, Liu et al. 2023).

    mask = DocumentMask.from_tokens(tokens, eos_id)  # of whole sequences
    x = embed(shard_sequence(tokens, group, dim=1))
    q, k, v = ...  # of this rank's tokens; rotary embeddings of positions(S, group)
    o = attention(q, k, v, mask, group)

Cross-attention of sharded queries to keys that are not sharded, as of images, needs nothing of this: each rank calls
scaled_dot_product_attention with all keys. As for parameters, gradients of the keys are then to be summed over the
group.

In the ring, no rank holds the keys of the whole sequence: of memory it needs those of two ranks. Each hop is under way
while a rank computes with the block that it has. The backward pass is a second ring, on which the gradients of a block
follow it and go one hop more, home.

A part of softmax attention is its output o and the log-sum-exp of its scores. Two parts merge to

    lse = log(e^lse1 + e^lse2),    o = o1 * e^(lse1 - lse) + o2 * e^(lse2 - lse)

Half precision is computed in float32. Keys arrive as the two chunks of some rank. One thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from byteps_py.parallel.context.document_mask import AttentionSpan, DocumentMask, seen_in, squares_of
from byteps_py.parallel.context.local_attention import AttentionCall, attend, visible
from byteps_py.parallel.context.sequences import RingHop, all_gather_sequences, reduce_scatter_sequences


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: DocumentMask,
    group: dist.ProcessGroup | None,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of this rank's tokens to the whole sequence. The forward pass gathers k and v of all ranks, the
    backward pass reduce-scatters their gradients: one collective each. All ranks of the group call it alike.

    Args:
        q: (batch, heads, S / cp, head_dim), this rank's two chunks (``shard_sequence``), of any floating dtype.
        k: (batch, kv_heads, S / cp, head_dim). kv_heads divides heads; each is shared by heads that follow each other.
        v: (batch, kv_heads, S / cp, value_dim).
        mask: of the whole sequences, the same on all ranks.
        group: the cp ranks that share the sequences, on any backend. None, or one rank: S need not be even.
        scale: of the scores; default head_dim ** -0.5.

    Returns (batch, heads, S / cp, value_dim). Gradients are those of the sum of all ranks' losses
    (``token_mean_loss``).

    Raises UsageError if the tensors, the mask and the group do not go together, and the errors of the backend.
    """
    call = AttentionCall.of((q, k, v), mask, group, scale)
    if group is not None and call.size > 1:
        k, v = _GatherKeys.apply(k, v, group)  # type: ignore[no-untyped-call]
    return attend(q, k, v, call)


class _GatherKeys(torch.autograd.Function):
    """All-gather of k and v along the sequence; back: reduce-scatter of their gradients."""

    @staticmethod
    def forward(ctx: Any, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(all_gather_sequences([k, v], 2, group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return *reduce_scatter_sequences(gradients, 2, ctx.group), None


#: Queries and keys of a tile, at most: its scores have up to TILE * TILE entries for each head.
TILE = 512

Place = tuple[slice, slice, slice]  # of queries or keys in tensors (batch, heads, tokens, …)
_ALL = slice(None)


def merge(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of the keys of two parts, each (o, lse): o of the shape (…, value_dim), lse of the shape (…).

    >>> o, lse = merge(*((torch.tensor([o]), torch.tensor(weight).log()) for o, weight in ((1.0, 1.0), (3.0, 3.0))))
    >>> round(o.item(), 6), round(lse.exp().item(), 6)
    (2.5, 4.0)
    """
    lse = torch.logaddexp(first[1], second[1])
    outputs = [o * (part - lse).exp().unsqueeze(-1) for o, part in (first, second)]
    return outputs[0] + outputs[1], lse


class KeyBlock(NamedTuple):
    """The keys and values of the chunks that ``rank`` holds, (batch, kv_heads, tokens, dim)."""

    k: torch.Tensor
    v: torch.Tensor
    rank: int


@dataclass(slots=True)
class PartialAttention:
    """The attention of this rank's queries to the blocks that it has met."""

    call: AttentionCall
    q: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def of(cls, q: torch.Tensor, value_dim: int, call: AttentionCall) -> PartialAttention:
        """Attention to no block yet."""
        dtype = accumulating(q.dtype)
        o = q.new_zeros((*q.shape[:3], value_dim), dtype=dtype)
        return cls(call, q, o, q.new_full(q.shape[:3], -torch.inf, dtype=dtype))

    def add(self, block: KeyBlock) -> None:
        """Add the attention to another block."""
        for own, seen, tile in _tiles(self.call, block.rank):
            scores = _scores(self.q[own], block.k[seen], tile, self.call)
            lse = scores.logsumexp(-1)
            o = (scores - lse.unsqueeze(-1)).exp_() @ _grouped(block.v[seen], 1, scores.dtype)
            shape = self.lse[own].shape
            part = o.reshape(*shape, -1), lse.reshape(shape)
            self.o[own], self.lse[own] = merge((self.o[own], self.lse[own]), part)


@dataclass(slots=True)
class AttentionGradients:
    """The backward pass of the attention of this rank's queries: gradients of q, and of the blocks that it meets.

    ``o``, ``lse``: of all blocks. ``gradient``: of ``o``.
    """

    call: AttentionCall
    q: torch.Tensor
    lse: torch.Tensor
    gradient: torch.Tensor
    delta: torch.Tensor
    q_gradient: torch.Tensor

    @classmethod
    def of(cls, parts: PartialAttention, gradient: torch.Tensor) -> AttentionGradients:
        """Gradients before the first block. ``parts``: the attention to all blocks."""
        gradient = gradient.to(parts.o.dtype)
        delta = (gradient * parts.o).sum(-1)
        return cls(parts.call, parts.q, parts.lse, gradient, delta, torch.zeros_like(parts.q, dtype=parts.o.dtype))

    def of_block(self, block: KeyBlock) -> tuple[torch.Tensor, torch.Tensor]:
        """The part of these queries in the gradients of the block's k and v, in the dtype of accumulation."""
        k_gradient, v_gradient = (torch.zeros_like(one, dtype=self.lse.dtype) for one in (block.k, block.v))
        groups = self.q.shape[1] // block.k.shape[1]
        for own, seen, tile in _tiles(self.call, block.rank):
            q, gradient = self.q[own], _grouped(self.gradient[own], groups)
            scores = _scores(q, block.k[seen], tile, self.call)
            lse, delta = (_grouped(one[own].unsqueeze(-1), groups) for one in (self.lse, self.delta))
            weights = (scores - lse).exp_()
            v_gradient[seen] += (weights.transpose(-1, -2) @ gradient).sum(2)
            of_weights = gradient @ _grouped(block.v[seen], 1, scores.dtype).transpose(-1, -2)
            of_scores = weights.mul_(of_weights.sub_(delta)).mul_(self.call.scale)
            self.q_gradient[own] += (of_scores @ _grouped(block.k[seen], 1, scores.dtype)).reshape(q.shape)
            k_gradient[seen] += (of_scores.transpose(-1, -2) @ _grouped(q, groups, scores.dtype)).sum(2)
        return k_gradient, v_gradient


def accumulating(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of values of ``dtype`` are taken."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _tiles(call: AttentionCall, rank: int) -> Iterator[tuple[Place, Place, AttentionSpan]]:
    """(own queries, keys in the block of ``rank``, their positions), wherever queries see keys of the block."""
    for rows, span, offset in call.own_spans():
        held = 0
        for chunk in call.chunks_of(rank):
            part = seen_in(call.mask, span, chunk)
            for tile in squares_of(call.mask, part, TILE) if part is not None else ():
                keys = slice(tile.keys.start - chunk.start + held, tile.keys.stop - chunk.start + held)
                own = slice(tile.queries.start - offset, tile.queries.stop - offset)
                yield (rows, _ALL, own), (rows, _ALL, keys), tile
            held += len(chunk)


def _scores(q: torch.Tensor, k: torch.Tensor, tile: AttentionSpan, call: AttentionCall) -> torch.Tensor:
    """(batch, kv_heads, heads / kv_heads, queries, keys), -inf where a query does not see a key."""
    dtype = accumulating(q.dtype)
    scores = (_grouped(q, q.shape[1] // k.shape[1], dtype) * call.scale) @ _grouped(k, 1, dtype).transpose(-1, -2)
    sees = visible(call.mask, tile, q.device)
    return scores if sees is None else scores.masked_fill_(~sees, -torch.inf)


def _grouped(tensor: torch.Tensor, groups: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """(batch, heads, …) as (batch, heads / groups, groups, …)."""
    batch, heads, *rest = tensor.shape
    return tensor.to(dtype or tensor.dtype).reshape(batch, heads // groups, groups, *rest)


# ---- the ring ------------------------------------------------------------------------------------------------------


_KEYS, _GRADIENTS = 1, 2  # tags


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: DocumentMask,
    group: dist.ProcessGroup | None,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Like ``attention``, with the same arguments, result and errors, but for the way of the keys and values: cp - 1
    hops on a ring of ranks, and in the backward pass cp - 1 hops of them and cp of their gradients. Gradients travel in
    float32 for half precision. Computed in plain torch: slower than ``attention``, where its memory suffices.
    """
    call = AttentionCall.of((q, k, v), mask, group, scale)
    output: torch.Tensor = _RingAttention.apply(q, k, v, call, group)  # type: ignore[no-untyped-call]
    return output


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: AttentionCall,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        parts = PartialAttention.of(q, v.shape[3], call)
        with torch.autocast(q.device.type, enabled=False):  # parts are merged in the dtype of accumulation
            for block in _blocks(k, v, call, group):
                parts.add(block)
        ctx.call, ctx.group = call, group
        ctx.save_for_backward(q, k, v, parts.o, parts.lse)
        return parts.o.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        call, group = ctx.call, ctx.group
        own = AttentionGradients.of(PartialAttention(call, q, o, lse), gradient)
        hop: RingHop | None = None
        for block in _blocks(k, v, call, group):
            total = _flat(*own.of_block(block))
            if hop is not None:
                total += hop.finish()
            if group is not None and call.size > 1:
                hop = RingHop.start(total, group, _GRADIENTS)
        k_gradient, v_gradient = _pair(total if hop is None else hop.finish(), k, v)
        return own.q_gradient.to(q.dtype), k_gradient.to(k.dtype), v_gradient.to(v.dtype), None, None


def _blocks(
    k: torch.Tensor, v: torch.Tensor, call: AttentionCall, group: dist.ProcessGroup | None
) -> Iterator[KeyBlock]:
    """This rank's block, then those of the ranks before it; the next one is on its way meanwhile."""
    block = _flat(k, v)
    for step in range(call.size):
        hop = None if group is None or step == call.size - 1 else RingHop.start(block, group, _KEYS)
        keys, values = _pair(block, k, v)
        yield KeyBlock(keys, values, (call.rank - step) % call.size)
        if hop is not None:
            block = hop.finish()


def _flat(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _pair(flat: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Two tensors, shaped as ``k`` and ``v``, from the result of ``_flat``."""
    parts = flat.split([k.numel(), v.numel()])
    return [part.view(like.shape) for part, like in zip(parts, (k, v), strict=True)]
