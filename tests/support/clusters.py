"""Whole clusters for tests, by bpslaunch, run to their end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support import warm

ROOT = Path(__file__).parent.parent.parent
OURS = ("DMLC_", "BYTEPS_", "PS_")
LAUNCHERS = ("MASTER_", "GROUP_", "LOCAL_", "TORCHELASTIC_", "OMPI_COMM_", "PMIX_", "SLURM_")
#: With it a line and its end are written one after the other, and another process's may come between.
UNBUFFERED = ("PYTHONUNBUFFERED",)


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without our variables and any launcher's, and with ``variables``.

    On a machine where many tests run at once, a second without a word is no sign of death. Ranks' lines have no prefix
    in front of what they say.
    """
    dropped = OURS + LAUNCHERS + UNBUFFERED
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "OMP_NUM_THREADS": "1", "PS_HEARTBEAT_TIMEOUT": "10", "BYTEPS_TAG_OUTPUT": "0", **variables}


def bpslaunch(
    options: Sequence[str], program: Sequence[str | Path], timeout_s: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``bpslaunch OPTIONS python PROGRAM`` to its end."""
    command = [sys.executable, "-m", "byteps_py.launch", *options, sys.executable, *map(str, program)]
    return warm.run(command, timeout_s, env=clean_environment(**variables))


def has_namespaces() -> bool:
    """True if this process may make network namespaces, with links of their own."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        return False
    name = f"bps{os.getpid()}try"
    added = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return added
