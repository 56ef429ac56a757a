"""Scale factors of a reduction, applied while tensors are copied to the service and back. Any thread.

float16 and bfloat16 are multiplied in float32 and rounded once, integers in float64 and rounded towards zero. So the
result stays deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from byteps_py.torch.collectives.slot_view import PieceView


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """``tensor * factor`` in the tensor's dtype.

    >>> scaled(torch.tensor([3, -3]), 0.5).tolist()
    [1, -1]
    """
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating_point:
        return tensor * factor
    return (tensor.to(torch.float64) * factor).to(tensor.dtype)


def send_scaled(slot_view: PieceView, tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Contribute ``tensors * factor``."""
    if factor == 1.0:
        slot_view.contribute(tensors)
    elif all(_in_one_pass(tensor, slot_view) for tensor in tensors):
        with torch.no_grad():
            for tensor, view in zip(tensors, slot_view.inputs, strict=True):
                torch.mul(tensor, factor, out=view)
        slot_view.contribute_input()
    else:
        slot_view.contribute([scaled(tensor, factor) for tensor in tensors])


def fetch_scaled(slot_view: PieceView, outputs: Sequence[torch.Tensor], factor: float) -> None:
    """Copy ``results * factor`` to ``outputs``."""
    if factor != 1.0 and all(_in_one_pass(output, slot_view) for output in outputs):
        with torch.no_grad():
            for view, output in zip(slot_view.results, outputs, strict=True):
                torch.mul(view, factor, out=output)
        return
    slot_view.fetch(outputs)
    if factor != 1.0:
        for output in outputs:
            output.copy_(scaled(output, factor))


def _in_one_pass(tensor: torch.Tensor, slot_view: PieceView) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype is slot_view.dtype and tensor.dtype.is_floating_point
