"""byteps_py: one communication service for distributed training. ``import byteps_py as bps``.

Importing this package does not import torch: CPU machines, which only sum, do not have it. The training
interface lives in ``byteps_py.torch`` and its names are found here on first use.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from byteps_py import aliases

__version__ = "0.1.0"

if TYPE_CHECKING:
    from byteps_py.torch import *  # noqa: F403

aliases.install()


def __getattr__(name: str) -> Any:
    # `from byteps_py import wire` asks here first, and must get the submodule without torch being imported.
    if name == "parallel":
        return importlib.import_module(f"{__name__}.parallel")
    is_ours = name not in aliases.HOMES and importlib.util.find_spec(f"{__name__}.{name}") is not None
    if name.startswith("__") or is_ours:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.torch"), name)
    globals()[name] = value
    return value
