"""Attention of one rank's queries to whole sequences of keys and values: no communication.

On a CPU, spans are computed in tiles of queries by scaled_dot_product_attention. A mask is as large as a tile and its
keys, and tiles with as many keys as queries need none. On CUDA, torch.nn.attention.varlen (FlashAttention) takes the
cases that it supports: one call for each chunk, whose spans, of all rows, are the kernel's sequences. The packing is
also tested on a CPU, with a plain kernel of the same signature. Any thread.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from byteps_py.errors import UsageError
from byteps_py.parallel.context.document_mask import AttentionSpan, DocumentMask, cumulative_lengths, spans_of, tiles_of
from byteps_py.parallel.context.head_tail import head_tail_chunks
from byteps_py.parallel.context.sequences import check_shard, place_in


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """``length``: of the whole sequence, on ``size`` ranks, of which this is ``rank``. ``scale``: of q @ k."""

    mask: DocumentMask
    scale: float
    length: int
    rank: int = 0
    size: int = 1

    @classmethod
    def of(
        cls,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: DocumentMask,
        group: dist.ProcessGroup | None,
        scale: float | None,
    ) -> AttentionCall:
        """The call for this rank's (q, k, v). Raises UsageError if they, the mask and the group do not go together."""
        q, k, v = tensors
        rank, size = place_in(group)
        for name, tensor in zip("qkv", tensors, strict=True):
            if tensor.dim() != 4:
                raise UsageError(f"{name} has the shape {list(tensor.shape)}: give (batch, heads, tokens, head_dim)")
            if tensor.dtype != q.dtype or tensor.device != q.device:
                raise UsageError(
                    f"{name} is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}: give one dtype and "
                    "device"
                )
            if tensor.shape[0] != q.shape[0] or tensor.shape[2] != q.shape[2]:
                raise UsageError(
                    f"{name} has the shape {list(tensor.shape)}, q {list(q.shape)}: the batch and the number of this "
                    "rank's tokens are the same. (For keys that are not sharded, as of images, call "
                    "torch.nn.functional.scaled_dot_product_attention: each rank has all that its queries need.)"
                )
        if not q.dtype.is_floating_point:
            raise UsageError(f"q, k and v are {q.dtype}: give floating-point tensors")
        if q.shape[3] != k.shape[3]:
            raise UsageError(f"q has head_dim {q.shape[3]}, k has {k.shape[3]}: they are the same")
        if k.shape[1] != v.shape[1] or not k.shape[1] or q.shape[1] % k.shape[1]:
            raise UsageError(
                f"q, k, v have {q.shape[1]}, {k.shape[1]}, {v.shape[1]} heads: k and v have the same number, which "
                "divides that of q"
            )
        if not isinstance(mask, DocumentMask):
            raise UsageError(f"the mask is a {type(mask).__name__}: give a DocumentMask, as DocumentMask.causal(S)")
        if size > 1:
            check_shard(q.shape[2], size)
        mask.check(q.shape[0], q.shape[2] * size)
        return cls(mask, q.shape[3] ** -0.5 if scale is None else scale, mask.length, rank, size)

    def chunks_of(self, rank: int) -> tuple[range, ...]:
        """The positions that ``rank`` holds."""
        return head_tail_chunks(self.length, self.size, rank)

    @property
    def own_chunks(self) -> tuple[range, ...]:
        """The positions that this rank holds."""
        return self.chunks_of(self.rank)

    def own_spans(self) -> Iterator[tuple[slice, AttentionSpan, int]]:
        """(rows of the batch, span, offset) of this rank: a query at a position is the entry ``position - offset`` of
        its shard. Rows by rows, in the order of the shard."""
        for rows, lengths in self.mask.rows():
            held = 0
            for chunk in self.own_chunks:
                for span in spans_of(self.mask, lengths, chunk):
                    yield rows, span, chunk.start - held
                held += len(chunk)


# ---- in tiles of queries -------------------------------------------------------------------------------------------


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


# ---- by torch's kernel for sequences of different lengths ----------------------------------------------------------


#: A function like torch.nn.attention.varlen.varlen_attn.
VarlenKernel = Callable[..., Any]
_LARGEST_HEAD = 256  # FlashAttention's


def varlen_kernel(q: torch.Tensor, values: torch.Tensor, mask: DocumentMask) -> VarlenKernel | None:
    """The kernel that takes these tensors and this mask; None if there is none."""
    fits = (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[3] == values.shape[3] <= _LARGEST_HEAD
        and (mask.is_causal or mask.window is None)
    )
    return _torch_kernel() if fits else None


@functools.cache
def _torch_kernel() -> VarlenKernel | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return None
    parameters = inspect.signature(varlen_attn).parameters
    if "window_size" not in parameters:  # torch 2.10
        return None
    return varlen_attn if "enable_gqa" in parameters else functools.partial(with_repeated_heads, varlen_attn)


def with_repeated_heads(
    kernel: VarlenKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *packed: Any,
    enable_gqa: bool,
    **options: Any,
) -> Any:
    """``kernel``, of a torch whose kernel wants as many heads of keys as of queries (2.11)."""
    if enable_gqa:
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], dim=1) for one in (k, v))
    return kernel(q, k, v, *packed, **options)


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """The spans of a chunk for the kernel. ``keys``: of each row, the positions between its first and last key."""

    cu_queries: torch.Tensor  # int32, on the device
    cu_keys: torch.Tensor
    most_queries: int
    most_keys: int
    keys: tuple[range, ...]


@functools.lru_cache(maxsize=64)  # for all layers, forward and backward
def packed_chunk(mask: DocumentMask, chunk: range, batch: int, device: torch.device) -> PackedChunk:
    """The chunk's spans in all rows of a batch. In a row, keys of spans follow each other without gaps."""
    each = mask.lengths if len(mask.lengths) == batch else mask.lengths * batch
    rows = [spans_of(mask, lengths, chunk) for lengths in each]
    spans = [span for row in rows for span in row]
    queries, keys = cumulative_lengths(spans)
    return PackedChunk(
        torch.tensor(queries, dtype=torch.int32, device=device),
        torch.tensor(keys, dtype=torch.int32, device=device),
        max(len(span.queries) for span in spans),
        max(len(span.keys) for span in spans),
        tuple(range(row[0].keys.start, row[-1].keys.stop) for row in rows),
    )


def attend_packed(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: AttentionCall, kernel: VarlenKernel
) -> torch.Tensor:
    """Like local_attention.attend, by ``kernel``."""
    mask, batch, heads = call.mask, q.shape[0], q.shape[1]
    behind = -1 if mask.window is None else mask.window - 1
    outputs = []
    for chunk, queries in zip(call.own_chunks, q.chunk(len(call.own_chunks), dim=2), strict=True):
        packed = packed_chunk(mask, chunk, batch, q.device)
        k, v = (
            torch.cat(
                [row[:, some.start : some.stop].transpose(0, 1) for row, some in zip(one, packed.keys, strict=True)]
            )
            for one in (keys, values)
        )
        output = kernel(
            queries.transpose(1, 2).reshape(-1, heads, q.shape[3]),
            k,
            v,
            packed.cu_queries,
            packed.cu_keys,
            packed.most_queries,
            packed.most_keys,
            scale=call.scale,
            window_size=(behind, 0) if mask.is_causal else (-1, -1),
            enable_gqa=heads != k.shape[1],
        )
        outputs.append(output.view(batch, len(chunk), heads, -1).transpose(1, 2))
    return torch.cat(outputs, dim=2)
