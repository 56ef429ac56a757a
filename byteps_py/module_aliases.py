"""Aliases for the modules that scripts import from ``horovod.torch`` and ``byteps.torch``: ``byteps_py.mpi_ops`` is
``byteps_py.torch.mpi_ops``.

Owns the list of aliases and the import hook that resolves them. Must not know what the modules contain; torch is
imported only when an alias is. Python's import system calls the hook, in any thread.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

#: The names that are modules in ``horovod.torch`` or ``byteps.torch``.
NAMES = frozenset({"compression", "cross_barrier", "elastic", "functions", "mpi_ops", "optimizer", "sync_batch_norm"})


class _Loader(importlib.abc.Loader):
    """Returns the module under its real name. A second copy of it would have classes of its own."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._spec: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._home)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has replaced it by the alias's


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, module = fullname.partition(".")
        if package != __package__ or module.partition(".")[0] not in NAMES:
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(f"{package}.torch.{module}"))


def install() -> None:
    """Install the import hook."""
    sys.meta_path.insert(0, _Finder())
