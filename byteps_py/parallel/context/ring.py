"""Ring attention: keys and values travel from rank to rank (Ring Attention, Liu et al. 2023), masks as in gathered.py.

No rank holds the keys of the whole sequence: of memory it needs those of two ranks. Each hop is under way while a rank
computes with the block that it has. The backward pass is a second ring, on which the gradients of a block follow it and
go one hop more, home. One thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from byteps_py.parallel.context.blocks import AttentionGradients, KeyBlock, PartialAttention
from byteps_py.parallel.context.call import AttentionCall
from byteps_py.parallel.context.document_mask import DocumentMask
from byteps_py.parallel.context.exchange import RingHop

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
    """As ``attention``, with the same arguments, result and errors, but for the way of the keys and values: cp - 1 hops
    on a ring of ranks, and in the backward pass cp - 1 hops of them and cp of their gradients. Gradients travel in
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
    """Two tensors, shaped as ``k`` and ``v``, from what ``_flat`` made."""
    parts = flat.split([k.numel(), v.numel()])
    return [part.view(like.shape) for part, like in zip(parts, (k, v), strict=True)]
