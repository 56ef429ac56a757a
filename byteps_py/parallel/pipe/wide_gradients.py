"""Gradients of parameters of 16 bits that are accumulated in float32 during a step.

Sums of many small terms in bfloat16 lose most of its 8 bits (Llama 3, section 6.2). Autograd adds to a gradient in the
gradient's type, which torch lets a parameter choose from 2.10 on. One thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class WideGradient:
    """The gradient of ``parameter``: float32 between ``widen`` and ``narrow``. It is None before ``widen``."""

    parameter: nn.Parameter

    def widen(self) -> None:
        """From now on, autograd accumulates in float32."""
        self.parameter.grad_dtype = torch.float32

    def narrow(self) -> None:
        """Round what has been accumulated to the parameter's type."""
        gradient = self.parameter.grad
        self.discard()
        if gradient is not None:
            self.parameter.grad = gradient.to(self.parameter.dtype)

    def discard(self) -> None:
        """Forget what has been accumulated."""
        self.parameter.grad = None
        self.parameter.grad_dtype = self.parameter.dtype


def can_widen(parameter: nn.Parameter) -> bool:
    """True for a trained parameter of 16 bits that is not one of FSDP2's, if torch can do it."""
    is_half = parameter.dtype in (torch.bfloat16, torch.float16)
    return (
        is_half and parameter.requires_grad and hasattr(parameter, "grad_dtype") and not isinstance(parameter, DTensor)
    )


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The type in which autograd accumulates."""
    chosen: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if chosen is None else chosen
