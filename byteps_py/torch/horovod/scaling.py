"""Scale factors of a reduction, applied in the copies that bring tensors to the service and back. Any thread.

In the arithmetic of the tensor's dtype: float16 and bfloat16 in float32, rounded once; integers in float64, cut off
towards zero. So the result is as deterministic as without.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from byteps_py.torch.engine.exchange import Exchange


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


def send_scaled(exchange: Exchange, tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Contribute ``tensors * factor``."""
    if factor == 1.0:
        exchange.send(tensors)
    elif all(_in_one_pass(tensor, exchange) for tensor in tensors):
        with torch.no_grad():
            for tensor, view in zip(tensors, exchange.inputs, strict=True):
                torch.mul(tensor, factor, out=view)
        exchange.send_nothing()
    else:
        exchange.send([scaled(tensor, factor) for tensor in tensors])


def fetch_scaled(exchange: Exchange, outputs: Sequence[torch.Tensor], factor: float) -> None:
    """Copy ``results * factor`` to ``outputs``."""
    if factor != 1.0 and all(_in_one_pass(output, exchange) for output in outputs):
        with torch.no_grad():
            for view, output in zip(exchange.results, outputs, strict=True):
                torch.mul(view, factor, out=output)
        return
    exchange.fetch(outputs)
    if factor != 1.0:
        for output in outputs:
            output.copy_(scaled(output, factor))


def _in_one_pass(tensor: torch.Tensor, exchange: Exchange) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype is exchange.dtype and tensor.dtype.is_floating_point
