"""Programs of named cases on real processes: each prints "NAME: right" on each rank.

TEST_DEVICE: where their tensors lie, by default "cpu". All ranks use the first device of its kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

Case = Callable[[], None]
CASES: dict[str, Case] = {}
if "TEST_DEVICE" in os.environ:
    torch.set_default_device(os.environ["TEST_DEVICE"])
    torch.empty(0)  # from now on torch keeps the device that is set, rather than set one by the local rank


def case(function: Case) -> Case:
    """A case that ``run`` knows by the function's name."""
    CASES[function.__name__] = function
    return function


def run(names: Sequence[str], before: Case = lambda: None) -> None:
    """Run these cases, or all, each after ``before``."""
    torch.set_num_threads(1)
    dist.init_process_group(os.environ.get("TEST_BACKEND", "byteps"))
    for name in names or CASES:
        before()
        CASES[name]()
        print(f"{name}: right", flush=True)
    dist.destroy_process_group()
