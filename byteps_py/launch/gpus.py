"""How many GPUs this machine offers to a job, asked without importing torch. Any thread."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Callable, Mapping

_ASK_TIMEOUT_S = 20.0


def ask_driver() -> int:
    """What nvidia-smi counts; 0 without the program, or when it can't reach a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        answer = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0  # a driver that does not answer offers no GPU
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())


def visible_gpus(environ: Mapping[str, str], ask: Callable[[], int] = ask_driver) -> int:
    """CUDA_VISIBLE_DEVICES, else NVIDIA_VISIBLE_DEVICES, else the driver, says it. 0: none."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        listed = environ.get("NVIDIA_VISIBLE_DEVICES")
        if listed is None or listed.strip() == "all":
            return ask()
    names = (name.strip() for name in listed.split(","))
    # As in CUDA, the list ends at the first entry that is none.
    return len(list(itertools.takewhile(lambda name: name not in ("", "-1", "none", "void", "NoDevFiles"), names)))
