"""What a gradient is rounded to on its way: ``Compression.none``, ``.fp16``, ``.bf16``. Any thread.

The rounding costs no pass of its own: it happens in the copy that hands a tensor over.
"""

from __future__ import annotations

import torch


class Compressor:
    """Sends tensors as they are."""

    @staticmethod
    def wire_dtype(dtype: torch.dtype) -> torch.dtype:
        """The dtype that a tensor of ``dtype`` has on the wire, and in which it is summed and averaged."""
        return dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """``tensor`` as it goes on the wire, and what ``decompress`` needs."""
        return tensor.to(cls.wire_dtype(tensor.dtype)), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx)


def _narrowed(dtype: torch.dtype, to: torch.dtype) -> torch.dtype:
    return to if dtype.is_floating_point and dtype.itemsize > to.itemsize else dtype


class FP16Compressor(Compressor):
    """Sends float32 and float64 as float16. Values beyond 65504 become infinite: scale the loss."""

    @staticmethod
    def wire_dtype(dtype: torch.dtype) -> torch.dtype:
        return _narrowed(dtype, torch.float16)


class BF16Compressor(Compressor):
    """Sends float32 and float64 as bfloat16: float32's range with 8 bits of precision."""

    @staticmethod
    def wire_dtype(dtype: torch.dtype) -> torch.dtype:
        return _narrowed(dtype, torch.bfloat16)


class Compression:
    """The choices for every ``compression`` argument."""

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
