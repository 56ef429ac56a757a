"""byteps_py: one communication service for distributed training. ``import byteps_py as bps``.

Importing this package does not import torch: CPU machines, which only sum, do not have it. The training interface is
``byteps_py.torch``; its names are available here too, and their first use imports torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from byteps_py import module_aliases

__version__ = "0.1.0"

if TYPE_CHECKING:
    from byteps_py.torch import *  # noqa: F403

module_aliases.install()

# A script in the source tree imports this folder, not the installed package. There, server, worker and proto lie beside
# it.
_folder = Path(__file__).parent
if not (_folder / "proto").exists() and (_folder.parent / "proto" / "control.proto").exists():
    __path__.append(str(_folder.parent))  # noqa: F405
del _folder


def __getattr__(name: str) -> Any:
    # `from byteps_py import wire` calls this function first. It must find the submodule without importing torch.
    if name == "parallel":
        return importlib.import_module(f"{__name__}.parallel")
    if name == "sharding":
        return importlib.import_module(f"{__name__}.parallel.sharding")
    is_ours = name not in module_aliases.HOMES and importlib.util.find_spec(f"{__name__}.{name}") is not None
    if name.startswith("__") or is_ours:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("torch") is None:  # here, so that the traceback ends near the program's line
        from byteps_py.wording import NO_TORCH

        raise ModuleNotFoundError(NO_TORCH, name="torch")
    value = getattr(importlib.import_module(f"{__name__}.torch"), name)
    globals()[name] = value
    return value
