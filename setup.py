"""Names the packages of the distribution. All else is in pyproject.toml.

``packages.find`` of pyproject.toml takes a package's name from its folder. It can't say that `server` is installed as
byteps_py.server.
"""

import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
FOLDERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]

setup(
    packages=[
        package
        for name, folder in FOLDERS.items()
        for package in (name, *(f"{name}.{inner}" for inner in find_packages(str(ROOT / folder))))
    ]
)
