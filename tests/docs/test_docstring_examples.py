"""Examples in docstrings run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"byteps_py": ROOT / "byteps_py", "byteps_py.server": ROOT / "server", "byteps_py.worker": ROOT / "worker"}
MODULES = [
    ".".join([package, *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__")
    for package, folder in FOLDERS.items()
    for path in sorted(folder.rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "ray":  # an extra
            raise
        pytest.skip(str(error))
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
