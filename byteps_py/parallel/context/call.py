"""The arguments of one call of attention, checked. Pure; any thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from byteps_py.errors import UsageError
from byteps_py.parallel.context.document_mask import DocumentMask
from byteps_py.parallel.context.exchange import place_in
from byteps_py.parallel.context.head_tail import head_tail_chunks
from byteps_py.parallel.context.sequences import check_shard
from byteps_py.parallel.context.spans import AttentionSpan, spans_of


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
        """For this rank's (q, k, v). Raises UsageError if they, the mask and the group do not go together."""
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
