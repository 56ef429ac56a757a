"""Attention with a sequence on several ranks, by gathered keys and values (Llama 3, section 4).

    mask = DocumentMask.from_tokens(tokens, eos_id)  # of whole sequences
    x = embed(shard_sequence(tokens, group, dim=1))
    q, k, v = ...  # of this rank's tokens; rotary embeddings of positions(S, group)
    o = attention(q, k, v, mask, group)

Cross-attention of sharded queries to keys that are not sharded, as of images, needs nothing of this: each rank calls
scaled_dot_product_attention with all keys. As for parameters, gradients of the keys are then to be summed over the
group. One thread.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from byteps_py.parallel.context.document_mask import DocumentMask
from byteps_py.parallel.context.local_attention import AttentionCall, attend
from byteps_py.parallel.context.sequences import all_gather_sequences, reduce_scatter_sequences


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
