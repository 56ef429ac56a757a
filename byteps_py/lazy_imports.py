"""Names of a package whose modules are imported when they are first used: `bps` commands need no torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def importer(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """For ``__getattr__`` of ``package``. ``homes``: the module of each name, which itself has the name; or, with the
    value "", a submodule.

        __getattr__ = importer(__name__, {"Pipeline": "byteps_py.parallel.pipe.pipeline", "tensor": ""})
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not homes[name]:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
