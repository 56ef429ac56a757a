"""The variables that torchrun, Open MPI's mpirun and SLURM's srun set for their processes. Pure; any thread.

Each launcher has its own variables for the same facts: the number of machines, the index of this one, the number of
ranks on it, the index of this rank. Launchers may be nested (torchrun in a step of srun); then a process has the
variables of both. So all facts are taken from one launcher, the innermost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from byteps_py.errors import ConfigurationError

Facts = dict[str, str]
_MOST_MACHINES = 65_535
Environ = Mapping[str, str]


def facts(environ: Environ) -> Facts:
    """The launcher's facts about this rank, under the names of this package's variables. Empty without a launcher.

    Variables of this package that are set take precedence over these. Raises ConfigurationError if the facts do not say
    which machine this is.

    >>> torchrun = {"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    >>> facts(torchrun)["DMLC_WORKER_ID"], facts(torchrun)["BYTEPS_LOCAL_SIZE"]
    ('1', '4')
    """
    if environ.get("DMLC_ROLE", "").strip().lower() in ("server", "scheduler"):
        return {}  # to the launcher, these processes are ranks like others
    for is_there, read in _LAUNCHERS:
        if environ.get(is_there):
            return read(environ)
    return {}


def job(environ: Environ) -> str:
    """A name for the launch: equal in its ranks, different from any other launch on this machine; empty if unknown.

    When torchrun starts processes again, that is another launch.
    """
    return "/".join(environ[name] for name in _JOB if environ.get(name))


def scheduler(environ: Environ) -> tuple[str, int] | None:
    """The scheduler's host and port: on the first machine, next to the port of torch.distributed's rendezvous. None if
    MASTER_ADDR and MASTER_PORT do not say where that is."""
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host or not re.fullmatch("[0-9]{1,5}", port):
        return None
    return host, int(port) + 1 if int(port) < 65535 else int(port) - 1


def _torchrun(environ: Environ) -> Facts:
    return _renamed(
        environ,
        DMLC_NUM_WORKER="GROUP_WORLD_SIZE",
        DMLC_WORKER_ID="GROUP_RANK",
        BYTEPS_LOCAL_SIZE="LOCAL_WORLD_SIZE",
        BYTEPS_LOCAL_RANK="LOCAL_RANK",
    )


def _open_mpi(environ: Environ) -> Facts:
    """mpirun does not say how many machines there are. That follows from the ranks if every machine has the same number
    of them, in order."""
    found = _renamed(
        environ, BYTEPS_LOCAL_SIZE="OMPI_COMM_WORLD_LOCAL_SIZE", BYTEPS_LOCAL_RANK="OMPI_COMM_WORLD_LOCAL_RANK"
    )
    if environ.get("DMLC_NUM_WORKER") and environ.get("DMLC_WORKER_ID"):
        return found
    size, rank, local_size, local_rank = (
        _count(environ, f"OMPI_COMM_WORLD_{name}", least)
        for name, least in (("SIZE", 1), ("RANK", 0), ("LOCAL_SIZE", 1), ("LOCAL_RANK", 0))
    )
    machines, worker_id = size // local_size, rank // local_size
    if size != machines * local_size or rank != worker_id * local_size + local_rank:
        raise ConfigurationError(
            f"mpirun started {size} ranks, {local_size} of them on this machine, where rank {rank} has the local rank "
            f"{local_rank}; that does not say which machine this is. Start equally many ranks on every machine, in "
            "order (mpirun --map-by slot --rank-by slot), or set DMLC_NUM_WORKER on all machines, and DMLC_WORKER_ID "
            "on each"
        )
    return {**found, "DMLC_NUM_WORKER": str(machines), "DMLC_WORKER_ID": str(worker_id)}


def _srun(environ: Environ) -> Facts:
    """Uses only the step's variables. A batch script has those of the allocation, which say nothing about the processes
    that the script starts."""
    found = _renamed(
        environ,
        DMLC_NUM_WORKER="SLURM_STEP_NUM_NODES",
        DMLC_WORKER_ID="SLURM_NODEID",
        BYTEPS_LOCAL_RANK="SLURM_LOCALID",
    )
    sizes = _tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    node = environ.get("SLURM_NODEID", "0")
    if re.fullmatch("[0-9]{1,6}", node) and int(node) < len(sizes):
        found["BYTEPS_LOCAL_SIZE"] = sizes[int(node)]
    return found


def _tasks_per_node(text: str) -> list[str]:
    """``2(x3),1`` is ``2, 2, 2, 1``; any text of another form is an empty list."""
    sizes: list[str] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            return []
        sizes += [match[1]] * min(int(match[2] or 1), _MOST_MACHINES - len(sizes))
    return sizes


def _count(environ: Environ, name: str, least: int) -> int:
    """The variable's value; ``least`` if it is not set. Raises ConfigurationError."""
    text = environ.get(name, str(least))
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise ConfigurationError(f"{name}={text[:40]!r} is not what mpirun sets: a whole number of at least {least}")
    return int(text)


def _renamed(environ: Environ, **names: str) -> Facts:
    return {ours: environ[theirs] for ours, theirs in names.items() if environ.get(theirs)}


#: A variable that only this launcher sets, and the function that reads its facts. The innermost launcher comes first.
_LAUNCHERS: tuple[tuple[str, Callable[[Environ], Facts]], ...] = (
    ("GROUP_WORLD_SIZE", _torchrun),
    ("OMPI_COMM_WORLD_SIZE", _open_mpi),
    ("SLURM_STEP_TASKS_PER_NODE", _srun),
)
_JOB = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "PMIX_NAMESPACE",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)
