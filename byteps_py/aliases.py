"""Modules of ``horovod.torch`` and ``byteps.torch`` where scripts look for them: ``byteps_py.mpi_ops`` is
``byteps_py.torch.mpi_ops``.

Owns which they are, and how they are found; knows nothing of what is in them, and imports torch only with one of
them. Whoever imports calls, in any thread.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

#: What of ``horovod.torch``, and of ``byteps.torch``, is a module.
NAMES = frozenset({"compression", "cross_barrier", "elastic", "functions", "mpi_ops", "optimizer", "sync_batch_norm"})


class _Loader(importlib.abc.Loader):
    """Gives the module that there is already: a second one would have classes of its own."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._spec: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._home)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import has put the alias's there


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, module = fullname.partition(".")
        if package != __package__ or module.partition(".")[0] not in NAMES:
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(f"{package}.torch.{module}"))


def find() -> None:
    """From now on they are found."""
    sys.meta_path.insert(0, _Finder())
