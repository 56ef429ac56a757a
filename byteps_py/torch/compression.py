"""Compression: the form in which a tensor travels. Any thread.

``fp16`` and ``bf16``: a dtype that ranks round it to. The rounding is part of the copy that hands a tensor over, so it
takes no extra pass over memory. ``int8``, ``float8`` and ``topk``: a codec, which the services of machines use between
them; ranks hand over and get the tensor as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from byteps_py.config.settings import Settings
from byteps_py.errors import UsageError
from byteps_py.tensor_codec import Codec, CodecKind


class Compressor:
    """Sends tensors without a conversion. Base class of the other compressors. ``codec``: the form between machines;
    None for that of the wire dtype."""

    codec: Codec | None = None

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


@functools.cache
def _coded(codec: Codec) -> type[Compressor]:
    """The compressor that sends tensors in this form. There is one for each."""
    return type(f"<{codec}>", (Compressor,), {"codec": codec, "__doc__": f"Sends tensors between machines as {codec}."})


class Compression:
    """The values of ``compression`` arguments. See docs/explanation/compression.md.

    none: as they are. fp16, bf16: rounded to that dtype by each rank. The others compress between machines only, and
    only tensors of BYTEPS_MIN_COMPRESS_BYTES or more. int8: 8-bit integers, with a scale for each 256 elements: 3.9
    times fewer bytes than float32. float8 (float8_e4m3), float8_e5m2: 8-bit floats, likewise. ``topk``: a share of the
    elements.

    >>> import torch
    >>> Compression.fp16.wire_dtype(torch.float32)
    torch.float16
    >>> Compression.topk(ratio=0.01, error_feedback=True).__name__
    '<topk of 41 in 4096 with error feedback>'
    """

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = _coded(Codec(CodecKind.INT8))
    float8_e4m3 = float8 = _coded(Codec(CodecKind.FLOAT8_E4M3))
    float8_e5m2 = _coded(Codec(CodecKind.FLOAT8_E5M2))

    @staticmethod
    def topk(ratio: float, error_feedback: bool = False) -> type[Compressor]:
        """Send the share ``ratio`` of the elements, those of the largest magnitude in each 4,096; others count as 0.
        error_feedback: what was not sent is added to the next round's tensor. Raises UsageError unless 0 < ratio <= 1.
        """
        return _coded(Codec.topk(ratio, error_feedback))

    @staticmethod
    def with_error_feedback(compression: type[Compressor]) -> type[Compressor]:
        """``compression`` with error feedback: each machine adds what its codes lack to the next round's tensor. Raises
        UsageError for one without a codec.

        >>> Compression.with_error_feedback(Compression.int8).__name__
        '<int8 with error feedback>'
        """
        if compression.codec is None:
            raise UsageError(f"error feedback is for int8, float8 and topk, not for {compression.__name__}")
        codec = compression.codec
        return _coded(Codec(codec.kind, codec.entries, error_feedback=True))


#: What BytePS's dictionaries may say that is not here.
_NOT_HERE = "topk is, with 0 < k < 1 as the share that is sent, alone or with ef=vanilla"


def compression_of(choice: Any) -> type[Compressor]:
    """The compressor that a ``compression`` argument means: one of Compression, or a dictionary of BytePS. Raises
    UsageError, which names what is not supported.

    >>> compression_of({"compressor": "topk", "k": 0.01, "ef": "vanilla"}).__name__
    '<topk of 41 in 4096 with error feedback>'
    """
    if isinstance(choice, type) and issubclass(choice, Compressor):
        return choice
    if not isinstance(choice, Mapping):
        raise UsageError(
            f"compression must be one of bps.Compression, or a dictionary of BytePS, got {choice!r:.100}; say "
            "compression=bps.Compression.int8"
        )
    settings = dict(choice)
    compressor, k, feedback = settings.pop("compressor", None), settings.pop("k", None), settings.pop("ef", None)
    if compressor != "topk":
        raise UsageError(f"compression: the compressor {compressor!r} of {dict(choice)!r} is not here; {_NOT_HERE}")
    if settings:
        raise UsageError(f"compression: {', '.join(map(repr, settings))} of {dict(choice)!r} is not here; {_NOT_HERE}")
    if feedback not in (None, "vanilla"):
        raise UsageError(f"compression: ef={feedback!r} of {dict(choice)!r} is not here; {_NOT_HERE}")
    try:
        share = float(k)  # BytePS's examples have strings
    except (TypeError, ValueError):
        raise UsageError(f"compression: k={k!r} of {dict(choice)!r} is no number") from None
    if share >= 1:
        raise UsageError(
            f"compression: k={k!r} of {dict(choice)!r} is a number of elements, perhaps more than a tensor has: give "
            "the share that is to be sent, 0 < k < 1"
        )
    return Compression.topk(share, feedback == "vanilla")


def codec_for(
    compression: type[Compressor], dtype: torch.dtype, nbytes: int, name: str | None, settings: Settings
) -> Codec | None:
    """The codec of a tensor of ``dtype`` and ``nbytes``; None if it has none, or is too small. Raises UsageError if it
    can't have it."""
    codec = compression.codec
    if codec is None:
        return None
    what = f"tensor {name!r}: compression {codec}" if name else f"compression {codec}"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        raise UsageError(f"{what} is for float32, float16 and bfloat16, not for {kind}: give it none")
    if codec.error_feedback and settings.elastic:
        raise UsageError(
            f"{what} can't be had in an elastic job: what was not sent yet would be lost when the ranks form anew. Use "
            "it without error feedback"
        )
    return codec if nbytes >= settings.min_compress_bytes else None
