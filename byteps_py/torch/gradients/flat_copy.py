"""Parameters side by side in one tensor: what ranks exchange of a model at a time, beside its gradients.

The training thread calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: A parameter and its name.
Named = tuple[str, torch.nn.Parameter]


def copy_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's global value and changes: at least float32, or small changes would be lost."""
    return torch.float32 if param.dtype.itemsize < torch.float32.itemsize else param.dtype


@dataclass(eq=False)
class FlatCopy:
    """The global values of parameters of one dtype and device.

    change: what is exchanged: a change, or the mean of all ranks' changes. views, changes: of each parameter's part.
    is_sent: of which elements the last mean has something, if it may lack some; None: of all.
    """

    names: list[str]
    params: list[torch.nn.Parameter]
    values: torch.nn.Parameter
    change: torch.Tensor
    views: list[torch.Tensor]
    changes: list[torch.Tensor]
    is_sent: torch.Tensor | None = None

    @classmethod
    def of(cls, named: Sequence[Named]) -> FlatCopy:
        """A copy of the present values."""
        names, params = [name for name, _ in named], [param for _, param in named]
        flat = torch.cat([param.detach().flatten().to(copy_dtype(param)) for param in params])
        change = torch.zeros_like(flat)
        sizes = [param.numel() for param in params]
        views, changes = (
            [part.view(param.shape) for part, param in zip(whole.split(sizes), params, strict=True)]
            for whole in (flat, change)
        )
        return cls(names, params, torch.nn.Parameter(flat, requires_grad=False), change, views, changes)

    @torch.no_grad()
    def take_change(self, sign: int = 1) -> None:
        """``change`` becomes what the rank's own values lack to the global ones, or with ``sign`` -1 what they have
        more."""
        for view, param, change in zip(self.views, self.params, self.changes, strict=True):
            if sign > 0:
                torch.sub(view, param, out=change)
            else:
                torch.sub(param, view, out=change)

    @torch.no_grad()
    def give_values(self, alpha: float = 0.0) -> None:
        """Parameters become the global values, but for a share of ``alpha`` of their own, and for what was not sent."""
        if self.is_sent is not None:
            sent = self.is_sent.split([param.numel() for param in self.params])
            for view, param, of in zip(self.views, self.params, sent, strict=True):
                values = view.to(param.dtype)
                values = param.lerp(values, 1 - alpha) if alpha else values
                param.copy_(torch.where(of.view(param.shape), values, param))
            return
        for view, param in zip(self.views, self.params, strict=True):
            if alpha:
                param.lerp_(view.to(param.dtype), 1 - alpha)
            else:
                param.copy_(view)

    @torch.no_grad()
    def move_parameters(self, before: torch.Tensor) -> None:
        """Parameters change as the global values have changed, which were ``before``."""
        moved = (self.values - before).split([param.numel() for param in self.params])
        for part, param in zip(moved, self.params, strict=True):
            param.add_(part.view(param.shape))
