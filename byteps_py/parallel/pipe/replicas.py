"""Sums the gradients of parameters that several ranks hold: copies of a stage in other pipes, data-parallel copies, and
parameters that stages share (tied weights).

One group of ranks for each stage, and for each set of shared parameters: workers may finish their stages in different
orders, and the sums of one group never wait for those of another. One thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.wide_gradients import gradient_dtype


@dataclass(slots=True)
class ReplicatedParameters:
    """Parameters that the ranks of ``group`` hold, in the same order."""

    names: Sequence[str]
    parameters: Sequence[nn.Parameter]
    group: dist.ProcessGroup
    is_due: bool = True  # in this step, it has not been launched yet
    _under_way: list[tuple[dist.Work, torch.Tensor, list[nn.Parameter]]] = field(default_factory=list)

    def launch(self) -> None:
        """Begin to sum the gradients. All ranks of the group call it once in a step. Raises UsageError for a sparse
        gradient, after the others have been served."""
        self.is_due = False
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            if parameter.requires_grad:
                by_dtype.setdefault(gradient_dtype(parameter), []).append(parameter)
        for some in by_dtype.values():
            # With one number for each parameter that says how many ranks have a gradient.
            pieces = [_dense(parameter).reshape(-1) for parameter in some]
            there = torch.tensor([float(parameter.grad is not None) for parameter in some], device="cpu")
            whole = torch.cat([*pieces, there.to(pieces[0])])
            work = dist.all_reduce(whole, group=self.group, async_op=True)
            if work is None:
                raise RuntimeError("this rank is not in its own group")
            self._under_way.append((work, whole, some))
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise UsageError(f"{name}: a pipeline does not sum sparse gradients; use sparse=False")

    def finish(self) -> None:
        """Wait for the sums. A parameter without a gradient on any rank gets none."""
        for work, whole, some in self._under_way:
            work.wait()
            *pieces, there = whole.split([*(parameter.numel() for parameter in some), len(some)])
            for parameter, piece, count in zip(some, pieces, there.tolist(), strict=True):
                if not count:
                    parameter.grad = None
                elif parameter.grad is None or parameter.grad.is_sparse:
                    parameter.grad = piece.view_as(parameter).clone()
                else:
                    parameter.grad.copy_(piece.view_as(parameter))
        self._under_way.clear()
        self.is_due = True

    def broadcast(self, source: int) -> None:
        """Give all ranks the values of rank ``source``."""
        for parameter in self.parameters:
            dist.broadcast(parameter.data, source, group=self.group)


def _dense(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None or parameter.grad.is_sparse:
        return torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    return parameter.grad
