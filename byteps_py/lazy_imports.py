"""Public names of a package that are imported when they are first used: `bps` commands need no torch."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from typing import Any


def import_lazily(package: str) -> None:
    """Give ``package`` its public names. It states each of them once, as type checkers want it, in its __init__.py:

        if TYPE_CHECKING:
            from byteps_py.parallel import tensor as tensor
            from byteps_py.parallel.pipe.pipeline import Pipeline as Pipeline

        import_lazily(__name__)

    This reads the block, and sets ``__all__``, and ``__getattr__`` and ``__dir__``, which Python calls.
    """
    module = sys.modules[package]
    homes = {
        alias.name: str(statement.module)
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            value: Any = importlib.import_module(f"{package}.{name}")
        else:
            value = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    vars(module).update(__all__=sorted(homes), __getattr__=find, __dir__=lambda: sorted({*vars(module), *homes}))
