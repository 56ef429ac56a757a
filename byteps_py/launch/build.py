"""``bpslaunch --check-build``: what this installation can do, as horovodrun's option of that name does. Any thread."""

from __future__ import annotations

import importlib.metadata
import os
import platform

from byteps_py import __version__
from byteps_py.launch.gpus import visible_gpus


def describe_build() -> str:
    """Asks what is installed; imports none of it."""
    torch = _version("torch")
    gpus = visible_gpus(os.environ)
    frameworks = [(bool(torch), f"PyTorch {torch}" if torch else "PyTorch: pip install 'byteps-py[torch]'")]
    transports = [
        (True, "shared memory, between the processes of a machine"),
        (True, "TCP, between machines"),
        (False, "RDMA"),
    ]
    numba = _version("numba")
    kernels = [(bool(numba), f"compiled by numba {numba}, for this processor" if numba else "numba is not installed")]
    devices = [(True, "CPU"), (gpus > 0, f"CUDA, visible: {gpus}")]
    sections = (
        ("Frameworks that can train", frameworks),
        ("Ways of the tensors", transports),
        ("Kernels that sum", kernels),
        ("Devices", devices),
    )
    lines = [f"byteps_py {__version__}, Python {platform.python_version()}"]
    for title, entries in sections:
        lines += ["", f"{title}:", *(f"    [{'X' if is_there else ' '}] {text}" for is_there, text in entries)]
    return "\n".join(lines)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
