"""The capabilities of this machine and installation of byteps_py: visible GPUs, and ``bpslaunch --check-build``.

Imports neither torch nor anything else that it asks about. Any thread.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping

from byteps_py import __version__

_ASK_TIMEOUT_S = 20.0


def ask_driver() -> int:
    """The number of GPUs that nvidia-smi lists; 0 without the program, or if it can't reach a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        answer = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0  # a driver that does not answer offers no GPU
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())


def visible_gpus(environ: Mapping[str, str], ask: Callable[[], int] = ask_driver) -> int:
    """The number of GPUs, from CUDA_VISIBLE_DEVICES, else NVIDIA_VISIBLE_DEVICES, else ``ask``, which asks the
    driver."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        listed = environ.get("NVIDIA_VISIBLE_DEVICES")
        if listed is None or listed.strip() == "all":
            return ask()
    names = (name.strip() for name in listed.split(","))
    # As in CUDA, the list ends at the first entry that names no device.
    return len(list(itertools.takewhile(lambda name: name not in ("", "-1", "none", "void", "NoDevFiles"), names)))


def describe_build() -> str:
    """The text that ``bpslaunch --check-build`` prints, as horovodrun's option of that name does."""
    torch = _version("torch")
    gpus = visible_gpus(os.environ)
    frameworks = [(bool(torch), f"PyTorch {torch}" if torch else "PyTorch: pip install '.[torch]'")]
    nixl = _version("nixl-cu12") or _version("nixl-cu13")
    transports = [
        (True, "shared memory, between the processes of a machine"),
        (True, "TCP, between machines"),
        (bool(nixl), f"RDMA by NIXL {nixl}: DMLC_ENABLE_RDMA=1" if nixl else "RDMA: pip install '.[rdma]'"),
    ]
    numba = _version("numba")
    kernels = [(bool(numba), f"compiled by numba {numba}, for this processor" if numba else "numba is not installed")]
    devices = [(True, "CPU"), (gpus > 0, f"CUDA, visible: {gpus}")]
    sections = (
        ("Frameworks that can train", frameworks),
        ("Transports", transports),
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
