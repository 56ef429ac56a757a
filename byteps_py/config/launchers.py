"""The variables that torchrun, Open MPI's mpirun, SLURM's srun and Kubernetes set for their processes, and those that
torch.distributed reads. Pure; any thread.

Each launcher has its own variables for the same facts: the number of machines, the index of this one, the number of
ranks on it, the index of this rank. Launchers may be nested (torchrun in a step of srun); then a process has the
variables of both. So all facts are taken from one launcher, the innermost.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from byteps_py.config.slurm import SlurmStep, tasks_per_node
from byteps_py.errors import ConfigurationError

Facts = dict[str, str]
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
    neither MASTER_ADDR and MASTER_PORT nor the step of srun say where that is."""
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host or not re.fullmatch("[0-9]{1,5}", port):
        step = SlurmStep.of(environ)
        return None if step is None else step.scheduler
    return host, int(port) + 1 if int(port) < 65535 else int(port) - 1


@dataclass(frozen=True, slots=True)
class TrainJobStatus:
    """Where Kubeflow Trainer takes the progress of its TrainJob, and the files with the certificate of that server and
    with this pod's token, which is renewed while the pod runs."""

    url: str
    certificate_file: str
    token_file: str


def trainjob_status(environ: Environ) -> TrainJobStatus | None:
    """None outside of a TrainJob, or where its controller takes no progress."""
    names = ("KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN")
    url, certificate_file, token_file = (environ.get(name, "") for name in names)
    return TrainJobStatus(url, certificate_file, token_file) if url and token_file else None


@dataclass(frozen=True, slots=True)
class TorchWorld:
    """The world as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe it."""

    rank: int
    size: int
    host: str
    port: int


def torch_world(environ: Environ) -> TorchWorld | None:
    """The world that torch's variables describe, if they are all that is known about this rank; None if this is the
    only rank, or if a launcher or BYTEPS_LOCAL_SIZE describes the ranks. Raises ConfigurationError if they are
    incomplete.

    >>> world = torch_world({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "gpu0", "MASTER_PORT": "29500"})
    >>> world.rank, world.host
    (1, 'gpu0')
    """
    if environ.get("BYTEPS_LOCAL_SIZE") or facts(environ):
        return None
    given = {name: _count(environ, name, least, "torch") for name, least in _COUNTS if environ.get(name)}
    for name, most in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("LOCAL_RANK", "WORLD_SIZE")):
        if name in given and given[name] >= given.get(most, given[name] + 1):
            raise ConfigurationError(f"{name}={given[name]} must be below {most}={given[most]}: ranks begin at 0")
    if given.get("LOCAL_WORLD_SIZE", 1) > given.get("WORLD_SIZE", math.inf):
        raise ConfigurationError(
            f"LOCAL_WORLD_SIZE={given['LOCAL_WORLD_SIZE']} is more than WORLD_SIZE={given['WORLD_SIZE']}, all ranks"
        )
    alone = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    if given.get("WORLD_SIZE") == 1 or given.items() <= alone.items():
        return None
    if missing := [name for name in _WORLD if not environ.get(name)]:
        there = [f"{name}={environ[name][:40]}" for name in (*_WORLD, *_LOCAL) if environ.get(name)]
        raise ConfigurationError(
            f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} set, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not: a rank needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. "
            "Set all of them, or start the ranks with bpslaunch -np or torchrun; unset them for a job of one rank"
        )
    port = environ["MASTER_PORT"]
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ConfigurationError(f"MASTER_PORT={port[:40]!r} is not a port: it takes a whole number from 1 to 65535")
    return TorchWorld(given["RANK"], given["WORLD_SIZE"], environ["MASTER_ADDR"], int(port))


def local_group(environ: Environ, rank: int, size: int) -> str:
    """A text that is equal in the ranks of one launcher: of LOCAL_RANK and LOCAL_WORLD_SIZE, where they fit ``rank``
    and ``size``; else empty.

    >>> local_group({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 3, 4)
    '/ranks from 2'
    """
    local_rank, local_size = environ.get("LOCAL_RANK", ""), environ.get("LOCAL_WORLD_SIZE", "")
    if not re.fullmatch("[0-9]{1,9}", local_rank) or not re.fullmatch("[0-9]{1,9}", local_size):
        return ""
    if not int(local_size) or size % int(local_size) or rank % int(local_size) != int(local_rank):
        return ""
    return f"/ranks from {rank - int(local_rank)}"


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
        _count(environ, f"OMPI_COMM_WORLD_{name}", least, "mpirun")
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
    that the script starts. Raises ConfigurationError for a rank on a node that lends."""
    found = _renamed(
        environ,
        DMLC_NUM_WORKER="SLURM_STEP_NUM_NODES",
        DMLC_WORKER_ID="SLURM_NODEID",
        BYTEPS_LOCAL_RANK="SLURM_LOCALID",
    )
    sizes = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    node = environ.get("SLURM_NODEID", "0")
    if re.fullmatch("[0-9]{1,6}", node) and int(node) < len(sizes):
        found["BYTEPS_LOCAL_SIZE"] = sizes[int(node)]
    step = SlurmStep.of(environ)
    if step is None or not step.first_trainer:
        return found
    if not step.trains:
        raise ConfigurationError(
            f"this process is on {step.nodes[step.node]}, which lends its processors: of a heterogeneous step, the "
            f"last group trains, and that begins with {step.nodes[step.first_trainer]}. Start bpslaunch without a "
            "command on the groups before it, or put the group that trains last"
        )
    return {
        **found,
        "DMLC_NUM_WORKER": str(step.num_workers),
        "DMLC_NUM_SERVER": str(step.num_servers),
        "DMLC_WORKER_ID": str(step.worker_id),
    }


def slurm_part(environ: Environ, has_command: bool) -> Facts:
    """What ``bpslaunch`` is to be in a step of srun: a machine that trains, or one that only sums, under the names of
    this package's variables. Empty outside of a step, and where DMLC_ROLE says it.

    Raises ConfigurationError if bpslaunch has no command on a node that trains, or is not alone on it.
    """
    step = None if environ.get("DMLC_ROLE", "").strip() else SlurmStep.of(environ)
    if step is None or not environ.get("SLURM_STEP_TASKS_PER_NODE") or _is_nested(environ):
        return {}
    host, port = scheduler(environ) or step.scheduler
    common = {
        "DMLC_NUM_WORKER": str(step.num_workers),
        "DMLC_NUM_SERVER": str(step.num_servers),
        "DMLC_PS_ROOT_URI": host,
        "DMLC_PS_ROOT_PORT": str(port),
    }
    here = step.nodes[step.node]
    if not step.trains:
        return {**common, "DMLC_ROLE": "server"}
    if not has_command:
        raise ConfigurationError(
            f"which program? {here} trains: of a step of srun, the last group does. Give the training command to "
            "bpslaunch there, and none to bpslaunch on the groups before it"
        )
    if step.sizes[step.node] > 1:
        raise ConfigurationError(
            f"srun starts bpslaunch {step.sizes[step.node]} times on {here}: it starts the ranks of a machine itself. "
            "Give srun --ntasks-per-node=1, or the training command without bpslaunch"
        )
    return {**common, "DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(step.worker_id)}


def _is_nested(environ: Environ) -> bool:
    """True if another launcher has started this process in a step of srun."""
    return any(environ.get(name) for name, read in _LAUNCHERS if read not in (_srun, _indexed_job))


def _indexed_job(environ: Environ) -> Facts:
    """Kubernetes numbers the pods of an indexed Job, and says nothing about their processes. Without DMLC_NUM_WORKER it
    is a Job of others: of an operator that sets torch's variables, or of pods that train alone.

    >>> facts({"JOB_COMPLETION_INDEX": "1", "DMLC_NUM_WORKER": "2"})
    {'DMLC_WORKER_ID': '1'}
    """
    return _renamed(environ, DMLC_WORKER_ID="JOB_COMPLETION_INDEX") if environ.get("DMLC_NUM_WORKER") else {}


def _count(environ: Environ, name: str, least: int, whose: str) -> int:
    """The variable's value; ``least`` if it is not set. Raises ConfigurationError."""
    text = environ.get(name, str(least))
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise ConfigurationError(f"{name}={text[:40]!r} is not what {whose} sets: a whole number of at least {least}")
    return int(text)


def _renamed(environ: Environ, **names: str) -> Facts:
    return {ours: environ[theirs] for ours, theirs in names.items() if environ.get(theirs)}


#: A variable that only this launcher sets, and the function that reads its facts. The innermost launcher comes first.
_LAUNCHERS: tuple[tuple[str, Callable[[Environ], Facts]], ...] = (
    ("GROUP_WORLD_SIZE", _torchrun),
    ("OMPI_COMM_WORLD_SIZE", _open_mpi),
    ("SLURM_STEP_TASKS_PER_NODE", _srun),
    ("JOB_COMPLETION_INDEX", _indexed_job),
)
#: Torch's variables of a rank: of all ranks, and of those on one machine, which are optional.
_WORLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
_COUNTS = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
_JOB = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "PMIX_NAMESPACE",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)
