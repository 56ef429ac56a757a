"""Training with Ray: summation servers where Ray has CPUs to spare, and Ray Train's TorchTrainer.

    from byteps_py.ray import BytePSConfig
    trainer = TorchTrainer(train_loop, torch_config=BytePSConfig(servers=2), …)

train_backend ─► server_pool. Only who imports this package needs Ray (``pip install 'byteps-py[ray]'``).
"""

from __future__ import annotations

import importlib.util

# Where there is no Ray, there may be a folder of this name: it has no origin.
if getattr(importlib.util.find_spec("ray"), "origin", None) is None:
    raise ModuleNotFoundError(
        "byteps_py.ray needs Ray Train, and it is not installed here: run pip install 'byteps-py[ray]', or pip install "
        "'.[ray]' in a clone of the repository",
        name="ray",
    )

from byteps_py.ray.server_pool import scale, status
from byteps_py.ray.train_backend import BytePSConfig

__all__ = ["BytePSConfig", "scale", "status"]
