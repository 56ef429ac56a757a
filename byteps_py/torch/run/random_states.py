"""The states of the random number generators that are global: of Python, numpy, torch, and its CUDA devices.

Plain values and tensors, which torch.load takes with weights_only=True. The training thread calls.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from byteps_py.system.log import logger


def random_states() -> dict[str, Any]:
    """All of them as they are now. CUDA's only if this process uses CUDA.

    >>> before = random_states()
    >>> drawn = random.random(), torch.rand(1), np.random.rand()
    >>> set_random_states(before)
    >>> drawn == (random.random(), torch.rand(1), np.random.rand())
    True
    """
    numpy_state = np.random.get_state(legacy=False)
    assigned = dict(numpy_state)
    if assigned["bit_generator"] == "MT19937":  # numpy's own choice, unless somebody has set another one
        key = assigned["state"]["key"]
        assigned["state"] = {**assigned["state"], "key": torch.from_numpy(key.astype(np.int64))}
    found = {"python": random.getstate(), "numpy": assigned, "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def set_random_states(states: dict[str, Any]) -> None:
    """Go back to these. Warns if there are states of CUDA devices that this process does not have."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    numpy_state = dict(states["numpy"])
    if isinstance(key := numpy_state["state"].get("key"), torch.Tensor):
        numpy_state["state"] = {**numpy_state["state"], "key": key.numpy().astype(np.uint32)}
    np.random.set_state(numpy_state)
    torch.set_rng_state(states["torch"])
    of_devices = states.get("cuda", [])
    devices = torch.cuda.device_count() if of_devices and torch.cuda.is_available() else 0
    if devices != len(of_devices):
        logger.warning(
            "random states of %d CUDA devices are to be put back, and this process has %d: later random numbers of the "
            "others differ from those of the run before", len(of_devices), devices,
        )  # fmt: skip
    for device, state in zip(range(devices), of_devices, strict=False):
        torch.cuda.set_rng_state(state, device)
