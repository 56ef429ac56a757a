"""Print what an image needs, one requirement per line, as pyproject.toml says. `make lock` gives it to pip-compile.

    python deploy/requirements.py server     the package's requirements, and what metrics need
    python deploy/requirements.py worker     these, what the examples need, and what torch's CPU build needs; no torch
    python deploy/requirements.py build      what builds the package's wheel
    python deploy/requirements.py torch URL  torch's CPU build, in the version of constraints.txt, with the hashes that
                                             the index at URL has of its wheels for Linux (pip-compile downloads each)

Images install torch by itself, from an index of your choice. So it is not among the worker's requirements, but what it
needs is.
"""

from __future__ import annotations

import re
import sys
import tomllib
import urllib.parse
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent

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


def torch_lock(page: str, version: str) -> str:
    """The requirement for pip, with all hashes that ``page`` has for the version: HTML, with links to wheels. Raises
    ValueError if it has none."""
    wheel = rf"/torch-{re.escape(version)}\+cpu-[^-\"]+-[^-\"]+-manylinux[^\"]*\.whl#sha256=([0-9a-f]{{64}})"
    hashes = sorted(set(re.findall(wheel, urllib.parse.unquote(page))))
    if not hashes:
        raise ValueError(f"the index has no wheel of torch {version}+cpu with a hash")
    return " \\\n".join([f"torch=={version}+cpu", *(f"    --hash=sha256:{each}" for each in hashes)])


def main() -> None:
    if sys.argv[1] == "torch":
        [version] = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        with urllib.request.urlopen(f"{sys.argv[2]}/torch/", timeout=60) as page:
            print(torch_lock(page.read().decode(), version))
        return
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = content["project"]
    examples = [each for each in project["optional-dependencies"]["examples"] if not each.startswith("torch")]
    services = [*project["dependencies"], *project["optional-dependencies"]["metrics"]]
    groups = {
        "server": services,
        "worker": [*services, *examples, *TORCH_NEEDS],
        "build": content["build-system"]["requires"],
    }
    (wanted,) = sys.argv[1:]
    print(*groups[wanted], sep="\n")


if __name__ == "__main__":
    main()
