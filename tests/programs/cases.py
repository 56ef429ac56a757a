"""Programs of named cases on real processes: each prints "NAME: right" on each rank.

TEST_DEVICE: where their tensors lie, by default "cpu". All ranks use the first device of its kind.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

Case = Callable[[], None]
CASES: dict[str, Case] = {}
if "TEST_DEVICE" in os.environ:
    torch.set_default_device(os.environ["TEST_DEVICE"])
    torch.empty(0)  # from now on torch keeps the device that is set, rather than set one by the local rank

_MUST_BE_GONE: list[weakref.ref[dist.ProcessGroup]] = []


@atexit.register  # before this package's own handlers: so it runs after them
def _check() -> None:
    gc.collect()
    if any(group() is not None for group in _MUST_BE_GONE):
        print("the default group is kept after destroy_process_group", file=sys.stderr, flush=True)
        os._exit(1)


def case(function: Case) -> Case:
    """A case that ``run`` knows by the function's name."""
    CASES[function.__name__] = function
    return function


def run(names: Sequence[str], before: Case = lambda: None, is_freed: bool = False) -> None:
    """Run these cases, or all, each after ``before``. ``is_freed``: fail if the default group is kept when Python ends,
    after it was destroyed and the models are gone. Its threads could abort the process."""
    torch.set_num_threads(1)
    dist.init_process_group(os.environ.get("TEST_BACKEND", "byteps"))
    world = weakref.ref(dist.group.WORLD)
    for name in names or CASES:
        before()
        CASES[name]()
        print(f"{name}: right", flush=True)
    dist.destroy_process_group()
    if is_freed:
        _MUST_BE_GONE.append(world)
