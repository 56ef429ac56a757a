"""Print the requirements of pyproject.toml, one per line, so that an image can install them before it copies sources.

    python requirements.py dependencies     the package's requirements
    python requirements.py EXTRA            the additional requirements of one of its extras

Reads the pyproject.toml of the current folder.
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
