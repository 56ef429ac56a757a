"""Print what an image needs, one requirement per line, as pyproject.toml says. `make lock` gives it to pip-compile.

    python deploy/requirements.py server     the package's requirements
    python deploy/requirements.py worker     these, what the examples need, and what torch's CPU build needs; no torch
    python deploy/requirements.py build      what builds the package's wheel

Images install torch by itself, from an index of your choice. So it is not among these, but what it needs is.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

#: Of the CPU build; a CUDA build needs NVIDIA's libraries, too.
TORCH_NEEDS = [
    "filelock",
    "typing-extensions>=4.10.0",
    "setuptools>=77.0.3",
    "sympy>=1.13.3",
    "networkx>=2.5.1",
    "jinja2",
    "fsspec>=0.8.5",
]


def main() -> None:
    content = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    project = content["project"]
    examples = [each for each in project["optional-dependencies"]["examples"] if not each.startswith("torch")]
    groups = {
        "server": project["dependencies"],
        "worker": [*project["dependencies"], *examples, *TORCH_NEEDS],
        "build": content["build-system"]["requires"],
    }
    (wanted,) = sys.argv[1:]
    print(*groups[wanted], sep="\n")


if __name__ == "__main__":
    main()
