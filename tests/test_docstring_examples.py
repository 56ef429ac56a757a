"""Examples in the docstrings of the shared ground and of the kernels run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "byteps_py"
MODULES = [
    ".".join(["byteps_py", *path.relative_to(ROOT).with_suffix("").parts])
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("kernels/*.py")])
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
