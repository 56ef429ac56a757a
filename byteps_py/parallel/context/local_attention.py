"""Attention of one rank's queries to whole sequences of keys and values: no communication.

On a CPU, and on CUDA for what the kernel of packed_attention.py does not take, spans are computed in tiles of queries
by scaled_dot_product_attention. A mask is as large as a tile and its keys, and tiles with as many keys as queries
need none. Any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from byteps_py.parallel.context.call import AttentionCall
from byteps_py.parallel.context.document_mask import DocumentMask
from byteps_py.parallel.context.packed_attention import attend_packed, varlen_kernel
from byteps_py.parallel.context.spans import AttentionSpan, tiles_of

#: Queries of a tile. Its mask has up to TILE * S entries of one byte.
TILE = 512


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """The attention of this rank's queries, differentiable.

    Args:
        q: (batch, heads, tokens of this rank, head_dim).
        keys: (batch, kv_heads, S, head_dim).
        values: (batch, kv_heads, S, value_dim).
        call: see AttentionCall.

    Returns (batch, heads, tokens of this rank, value_dim).
    """
    kernel = varlen_kernel(q, values, call.mask)
    if kernel is not None:
        return attend_packed(q, keys, values, call, kernel)
    tiles = [
        (rows, tile, offset) for rows, span, offset in call.own_spans() for tile in tiles_of(call.mask, span, TILE)
    ]
    own = [(rows, slice(tile.queries.start - offset, tile.queries.stop - offset)) for rows, tile, offset in tiles]
    seen = [(rows, slice(tile.keys.start, tile.keys.stop)) for rows, tile, _ in tiles]
    sliced = [_Slices.apply(one, places) for one, places in ((q, own), (keys, seen), (values, seen))]  # type: ignore[no-untyped-call]
    pieces = zip(tiles, *sliced, strict=True)
    outputs = [(rows, _attend_in_tile(one, k, v, tile, call)) for (rows, tile, _), one, k, v in pieces]
    return torch.cat(
        [torch.cat([output for _, output in some], dim=2) for _, some in groupby(outputs, key=lambda each: each[0])]
    )


def visible(mask: DocumentMask, span: AttentionSpan, device: torch.device) -> torch.Tensor | None:
    """The keys (columns) that each query (rows) of a span sees; None if all see all."""
    if mask.hides_none(span.queries, span.keys):
        return None
    queries = torch.arange(span.queries.start, span.queries.stop, device=device).unsqueeze(1)
    ahead = torch.arange(span.keys.start, span.keys.stop, device=device) - queries
    sees = ahead <= 0 if mask.is_causal else torch.ones_like(ahead, dtype=torch.bool)
    return sees if mask.window is None else sees & (ahead.abs() < mask.window)


def _attend_in_tile(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: AttentionSpan, call: AttentionCall
) -> torch.Tensor:
    mask = call.mask
    is_square = mask.is_causal and tile.queries == tile.keys and (mask.window or len(tile.keys)) >= len(tile.keys)
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if is_square else visible(mask, tile, q.device),
        is_causal=is_square,
        scale=call.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


class _Slices(torch.autograd.Function):
    """Pieces of a tensor, (rows, tokens) of each. The backward pass adds all gradients into one tensor; autograd's own
    would make one of full size for each piece."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, places: Sequence[tuple[slice, slice]]) -> tuple[torch.Tensor, ...]:
        ctx.places, ctx.shape = places, tensor.shape
        return tuple(tensor[rows, :, tokens] for rows, tokens in places)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        whole = gradients[0].new_zeros(ctx.shape)
        for (rows, tokens), gradient in zip(ctx.places, gradients, strict=True):
            whole[rows, :, tokens] += gradient
        return whole, None
