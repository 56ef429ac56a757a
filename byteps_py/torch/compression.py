"""Compression: the dtype that a tensor is rounded to for the network: ``none``, ``fp16`` or ``bf16``. Any thread.

The rounding is part of the copy that hands a tensor over, so it takes no extra pass over memory.
"""

from __future__ import annotations

import torch


class Compressor:
    """Sends tensors without a conversion. Base class of the other compressors."""

    @staticmethod
    def wire_dtype(dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor of ``dtype`` is sent, summed and averaged."""
        return dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """``tensor`` in its wire dtype, and the argument ``ctx`` of ``decompress``."""
        return tensor.to(cls.wire_dtype(tensor.dtype)), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        """``tensor`` in its original dtype."""
        return tensor.to(ctx)


def _narrowed(dtype: torch.dtype, to: torch.dtype) -> torch.dtype:
    return to if dtype.is_floating_point and dtype.itemsize > to.itemsize else dtype


class FP16Compressor(Compressor):
    """Sends float32 and float64 as float16. Values beyond 65504 become infinite, so scale the loss."""

    @staticmethod
    def wire_dtype(dtype: torch.dtype) -> torch.dtype:
        return _narrowed(dtype, torch.float16)


class BF16Compressor(Compressor):
    """Sends float32 and float64 as bfloat16, which has float32's range and 8 bits of precision."""

    @staticmethod
    def wire_dtype(dtype: torch.dtype) -> torch.dtype:
        return _narrowed(dtype, torch.bfloat16)


class Compression:
    """The values of ``compression`` arguments.

    >>> import torch
    >>> Compression.fp16.wire_dtype(torch.float32)
    torch.float16
    """

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
