"""The ranks of a program in process sets that train at the same time, each its own model.

TEST_GROUPS="0,2;1,3": ranks 0 and 2 train together, and ranks 1 and 3 do. A rank in none of these sets trains alone:
its ``process_set`` is the first one. Without it, all ranks train together.
"""

from __future__ import annotations

import os
from typing import Any

import torch

import byteps_py as bps

_SETS: list[bps.ProcessSet] = []


def add_sets() -> None:
    """All ranks call it, after ``init``."""
    groups = filter(None, os.environ.get("TEST_GROUPS", "").split(";"))
    _SETS.extend(bps.add_process_set([int(rank) for rank in ranks.split(",")]) for ranks in groups)


def own_set() -> bps.ProcessSet:
    return next((each for each in _SETS if each.included()), _SETS[0] if _SETS else bps.global_process_set)


def members() -> list[int]:
    """The ranks that train with this one."""
    ranks = own_set().ranks
    return ranks if ranks is not None and bps.rank() in ranks else [bps.rank()]


def distributed(optimizer: torch.optim.Optimizer, *arguments: Any, **options: Any) -> Any:
    """A DistributedOptimizer of these ranks."""
    return bps.DistributedOptimizer(optimizer, *arguments, **options, process_set=own_set())


def averaged(grad: torch.Tensor, name: str) -> torch.Tensor:
    """Over these ranks."""
    return bps.allreduce(grad, name=name, process_set=own_set()) if len(members()) > 1 else grad.clone()
