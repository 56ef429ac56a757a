"""The bytes of values, gradients and optimizer states that a rank really holds. One thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class MemoryTally:
    """Bytes of memory, each counted once; in ``offloaded`` those of states that are not where the parameters are."""

    parameters: int
    gradients: int
    states: int
    offloaded: int

    @property
    def total(self) -> int:
        """All but ``offloaded``."""
        return self.parameters + self.gradients + self.states


def tally_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> MemoryTally:
    """Count the bytes that this rank holds now, by walking the memory of tensors: that of a view counts whole.

    Scalars, such as Adam's counts of steps, are left out. ``optimizer``: of torch, of ``shard``, or a
    ZeroRedundancyOptimizer.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> tally_memory(model, optimizer)
    MemoryTally(parameters=40, gradients=40, states=80, offloaded=0)
    """
    inner = getattr(optimizer, "optim", None)
    states = (inner if isinstance(inner, torch.optim.Optimizer) else optimizer).state
    offload = getattr(optimizer, "offloaded", None)
    hosted = {id(one) for one in offload.host_tensors()} if offload is not None else set()
    # FSDP2's optimizer has the parts; the model may have whole parameters at this time.
    held = [one for group in optimizer.param_groups for one in group["params"]]
    parameters = list({id(one): one for one in (*model.parameters(), *held)}.values())
    seen: set[int] = set()
    of_states = [value for one in parameters for value in states.get(one, {}).values() if _counts(value)]
    return MemoryTally(
        _memory(parameters, seen),
        _memory([one.grad for one in parameters if one.grad is not None], seen),
        _memory([one for one in of_states if id(one) not in hosted], seen),
        sum(one.nbytes for one in of_states if id(one) in hosted),
    )


def _counts(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _memory(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage() if not local.is_sparse else local._values().untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
