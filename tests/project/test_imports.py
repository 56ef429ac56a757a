"""Whatever a test, a benchmark, an example or a string of code in them imports from this package is there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("byteps_py", "support", "benchmarks")
#: Modules of libraries that need not be installed.
OPTIONAL = ("byteps_py.ray", "byteps_py.torchft")
FILES = sorted(
    path
    for folder in ("tests", "benchmarks", "examples", "docs/generators")
    for path in (ROOT / folder).rglob("*.py")
    if path != Path(__file__) and not path.name.startswith(".")
)


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name), also of code in strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, each.name) for each in node.names if each.name != "*")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "byteps_py" in node.value:
            try:
                inner = ast.parse(node.value)
            except SyntaxError:  # prose, or a part of a program
                continue
            yield from imported(inner)


def is_there(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    is_package = hasattr(found, "__path__")
    return hasattr(found, name) or (is_package and importlib.util.find_spec(f"{module}.{name}") is not None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of libraries
def test_imported_names_are_there() -> None:
    wanted: dict[tuple[str, str], str] = {}
    for path in FILES:
        for module, name in imported(ast.parse(path.read_text())):
            if module.split(".")[0] in OURS and not module.startswith(OPTIONAL):
                wanted.setdefault((module, name), str(path.relative_to(ROOT)))
    assert len(wanted) > 1000
    missing = []
    for (module, name), path in wanted.items():
        try:
            if not is_there(module, name):
                missing.append(f"{path}: {module}.{name}")
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in OURS:
                missing.append(f"{path}: {error}")
    assert missing == []


@pytest.mark.parametrize("code", ["from byteps_py.no_module import x", "from byteps_py.errors import NoError"])
def test_what_is_not_there_would_be_found(code: str) -> None:
    ((module, name),) = imported(ast.parse(code))
    try:
        assert not is_there(module, name)
    except ModuleNotFoundError:
        assert module == "byteps_py.no_module"
