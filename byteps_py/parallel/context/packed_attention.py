"""Attention of one rank's queries by torch's kernel for sequences of different lengths, on CUDA: FlashAttention by
torch.nn.attention.varlen. One call for each chunk; its spans, of all rows, are the kernel's sequences.

Its packing is also tested on a CPU, with a plain kernel of the same signature. Any thread.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from byteps_py.parallel.context.call import AttentionCall
from byteps_py.parallel.context.document_mask import DocumentMask
from byteps_py.parallel.context.spans import cumulative_lengths, spans_of

#: As torch.nn.attention.varlen.varlen_attn.
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
    """As local_attention.attend, by ``kernel``."""
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
