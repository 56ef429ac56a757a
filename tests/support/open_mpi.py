"""Open MPI's mpirun in tests: whether it is there, and several machines that are all this one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

#: Lets it run as root, and more ranks than there are cores.
OPEN_MPI_ANYWHERE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
_AGENT = """#!/bin/sh
# In place of ssh: OPTIONS HOST COMMAND. Whatever the host is called, it is here, with files of its own.
while [ "${1#-}" != "$1" ]; do shift; done
export TMPDIR="${0%/*}/$1"
mkdir -p "$TMPDIR"
shift
exec sh -c "$*"
"""


def require_open_mpi() -> None:
    """Skips the test where Open MPI is not installed."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("mpirun is not installed (Debian: apt-get install openmpi-bin)")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in version:
        pytest.skip(f"mpirun is not Open MPI's but {version.splitlines()[:1]}")


def as_machines(folder: Path, *sizes: int) -> list[str]:
    """mpirun's options for one machine of each of ``sizes``, all emulated on this one."""
    agent = folder / "agent"
    agent.write_text(_AGENT)
    agent.chmod(0o755)
    hosts = ",".join(f"machine{index}:{size}" for index, size in enumerate(sizes))
    return ["--mca", "plm_rsh_agent", str(agent), "--host", hosts, "-np", str(sum(sizes))]
