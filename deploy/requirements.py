"""Prints what pyproject.toml asks for, one requirement a line, so that an image installs it before the sources come.

    python requirements.py dependencies     what the package needs
    python requirements.py EXTRA            what one of its extras adds

Reads the pyproject.toml of the folder it is run in.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    (wanted,) = sys.argv[1:]
    groups = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
    print(*groups[wanted], sep="\n")


if __name__ == "__main__":
    main()
