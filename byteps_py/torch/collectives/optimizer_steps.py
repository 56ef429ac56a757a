"""Notices the steps of torch's optimizers, whoever makes them: a training loop with torch's DistributedDataParallel or
FSDP2 has no other place that says so. DistributedOptimizer says it itself.

torch calls the hook on the thread that steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

_watching: list[Callable[[torch.optim.Optimizer], None]] = []


def watch(stepped: Callable[[torch.optim.Optimizer], None]) -> None:
    """Call ``stepped`` after each step of any optimizer of this process, from the first call on."""
    if not _watching:
        _watching.append(stepped)
        torch_optimizer.register_optimizer_step_post_hook(_hook)


def _hook(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
    if not hasattr(optimizer, "_stepper"):  # a DistributedOptimizer, whose own step() is not over yet
        _watching[0](optimizer)


def has_other_hooks() -> bool:
    """True if hooks are registered for the steps of all optimizers, beside this one."""
    post = torch_optimizer._global_optimizer_post_hooks
    return bool(torch_optimizer._global_optimizer_pre_hooks) or any(hook is not _hook for hook in post.values())
