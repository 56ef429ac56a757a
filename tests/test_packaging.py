"""What an installed wheel holds: every package of the source tree, under one name."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: Folders at the top that are packages of byteps_py.
MAPPED = ("server", "worker", "proto")


def test_every_package_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    inside = [path.parent.relative_to(ROOT) for path in (ROOT / "byteps_py").rglob("__init__.py")]
    packages = {".".join(path.parts) for path in inside} | {f"byteps_py.{name}" for name in MAPPED}
    assert sorted(project["tool"]["setuptools"]["packages"]) == sorted(packages)
