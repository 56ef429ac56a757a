"""What sums with a codec must be: machines and a server in one process, written down a second time in plain torch.

One object for each tensor: it keeps the machines' errors from round to round.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from byteps_py.tensor_codec import Codec, CodecKind

_FLOAT8 = {CodecKind.FLOAT8_E4M3: torch.float8_e4m3fn, CodecKind.FLOAT8_E5M2: torch.float8_e5m2}


def blocks_of(values: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of ``size`` elements, the last one filled with zeros."""
    rows = -(-values.numel() // size)
    return torch.cat([values.flatten(), values.new_zeros(rows * size - values.numel())]).view(rows, size)


def scaled(kind: CodecKind, values: torch.Tensor) -> torch.Tensor:
    """What the scaled bytes of ``values``, float32, decode to."""
    blocks = blocks_of(values, 256)
    largest = blocks.abs().amax(1, keepdim=True)
    top = 127.0 if kind is CodecKind.INT8 else torch.finfo(_FLOAT8[kind]).max
    scale = largest / top
    numbers = blocks * (1.0 / scale)
    codes = numbers.round() + 0.0 if kind is CodecKind.INT8 else numbers.to(_FLOAT8[kind]).float()
    decoded = codes * scale
    decoded = torch.where(largest < 2.0**-100, 0.0, decoded)
    decoded = torch.where(largest.isfinite(), decoded, torch.nan)
    return decoded.flatten()[: values.numel()]


def is_chosen(entries: int, values: torch.Tensor, count: int) -> torch.Tensor:
    """Which of ``values`` are sent; of the last block, only the first ``count`` elements of the tensor are there."""
    chosen = torch.zeros(values.shape, dtype=torch.bool)
    for row, block in enumerate(values):
        there = block[: max(0, min(len(block), count - row * len(block)))]
        order = (there.view(torch.int32) & 0x7FFFFFFF).sort(descending=True, stable=True).indices
        chosen[row, order[:entries]] = True
    return chosen


@dataclass
class CodedSums:
    """Sums of one tensor over machines of ``local_size`` ranks each, or of so many as a list says."""

    codec: Codec
    local_size: int | Sequence[int] = 1
    errors: list[torch.Tensor] | None = None

    def __call__(self, tensors: Sequence[torch.Tensor], divisor: int = 1) -> torch.Tensor:
        """The result of one round, of the ranks' ``tensors`` in order."""
        first, sizes = tensors[0], self.local_size
        if isinstance(sizes, int):
            sizes = [sizes] * (len(tensors) // sizes)
        ends = list(itertools.accumulate(sizes))
        machines = [tensors[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        sums = [self._folded([tensor.float().flatten() for tensor in each]) for each in machines]
        if len(sums) == 1:
            return self._delivered(sums[0], first, divisor)
        if self.errors is None:
            self.errors = [torch.zeros_like(each) for each in sums]
        if self.codec.error_feedback:
            sums = [each + error for each, error in zip(sums, self.errors, strict=True)]
        result = self._topk(sums) if self.codec.kind is CodecKind.TOPK else self._scaled(sums)
        return self._delivered(result, first, divisor)

    @staticmethod
    def _folded(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    @staticmethod
    def _delivered(result: torch.Tensor, like: torch.Tensor, divisor: int) -> torch.Tensor:
        rounded = result.to(like.dtype)
        return (rounded / divisor if divisor > 1 else rounded).view(like.shape)

    def _scaled(self, sums: list[torch.Tensor]) -> torch.Tensor:
        sent = [scaled(self.codec.kind, each) for each in sums]
        assert self.errors is not None
        for machine, (value, code) in enumerate(zip(sums, sent, strict=True)):
            bad = ~blocks_of(value, 256).isfinite().all(1, keepdim=True).expand(-1, 256).flatten()[: value.numel()]
            self.errors[machine] = torch.where(bad, self.errors[machine], value - code)
        return scaled(self.codec.kind, self._folded(sent))

    def _topk(self, sums: list[torch.Tensor]) -> torch.Tensor:
        assert self.errors is not None
        count, size, entries = sums[0].numel(), self.codec.block, self.codec.entries
        blocks = [blocks_of(each, size) for each in sums]
        sent = [is_chosen(entries, each, count) for each in blocks]
        total = torch.zeros_like(blocks[0])
        for each, chosen in zip(blocks, sent, strict=True):
            total += torch.where(chosen, each, 0.0)
        answered = is_chosen(entries, total, total.numel())
        for machine, (each, chosen) in enumerate(zip(blocks, sent, strict=True)):
            kept = blocks_of(self.errors[machine], size)
            bad = ~each.isfinite().all(1, keepdim=True)
            error = torch.where(bad, kept, torch.where(chosen & answered, 0.0, each))
            self.errors[machine] = error.flatten()[:count]
        return torch.where(answered, total, 0.0).flatten()[:count]
