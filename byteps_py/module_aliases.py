"""Finds modules under the names that scripts for ``horovod.torch`` and ``byteps.torch`` import.

``byteps_py.mpi_ops`` and ``byteps_py.torch.mpi_ops`` are both ``byteps_py.torch``, which has every name.

Owns the table of these names. Must not know the modules' contents. Imports torch only when a script imports one of
them. Any thread that imports calls it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

#: Modules of ``horovod.torch`` and ``byteps.torch``. They resolve under ``byteps_py`` and ``byteps_py.torch``.
HOMES = {
    "compression": "byteps_py.torch.compression",
    "cross_barrier": "byteps_py.torch",
    "elastic": "byteps_py.torch.elastic",
    "functions": "byteps_py.torch",
    "mpi_ops": "byteps_py.torch",
    "ops": "byteps_py.torch",
    "optimizer": "byteps_py.torch.gradients.optimizer",
    "sync_batch_norm": "byteps_py.torch.horovod.sync_batch_norm",
}
#: Other names of packages: former ones, and that of a tool which belongs to parallel training.
MOVED = {
    "byteps_py.parallel.numerics": "byteps_py.tools.numerics",
    "byteps_py.torch.distributed": "byteps_py.torch.process_group",
    "byteps_py.torch.parallel": "byteps_py.parallel",
}


def home_of(name: str) -> str | None:
    """The full name of the module behind an alias; None if ``name`` is not an alias.

    >>> home_of("byteps_py.optimizer"), home_of("byteps_py.torch.parallel"), home_of("byteps_py.wire.data_link")
    ('byteps_py.torch.gradients.optimizer', 'byteps_py.parallel', None)
    """
    for alias, home in MOVED.items():
        if name == alias or name.startswith(f"{alias}."):
            return home + name.removeprefix(alias)
    head, _, rest = name.removeprefix("byteps_py.").removeprefix("torch.").partition(".")
    if not name.startswith("byteps_py.") or head not in HOMES:
        return None
    found = f"{HOMES[head]}.{rest}" if rest else HOMES[head]
    return None if found == name else found


class _Loader(importlib.abc.Loader):
    """Returns the existing module, because a second copy would have classes of its own."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._spec: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._home)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has set the alias's spec


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        home = home_of(fullname)
        return None if home is None else importlib.machinery.ModuleSpec(fullname, _Loader(home))


def install() -> None:
    """Make imports find the aliases. Called once, by ``byteps_py``."""
    sys.meta_path.insert(0, _Finder())
