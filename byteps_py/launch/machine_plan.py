"""From one machine's role to the processes that it runs: what DMLC_ROLE and its companion variables ask for.

Pure: the environment and the number of GPUs go in, process descriptions come out. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from byteps_py import launchers
from byteps_py.errors import ConfigurationError
from byteps_py.exit_status import GIVEN_UP_STATUS
from byteps_py.launch.process_spec import ProcessKind, ProcessSpec, service_argv
from byteps_py.settings import Settings
from byteps_py.variables import VARIABLES

#: Not for ever: a scheduler that dies this often is killed by something that does not stop.
_SCHEDULER_RESTARTS = 1000
_SERVER_RESTARTS = 1000  # spare CPU machines may be taken away and given back many times
_BY_FIELD = {variable.field: variable for variable in VARIABLES}
#: Variables that a cluster manager may have set for a machine's only rank.
_PLACE = ("RANK", "WORLD_SIZE")
_EXAMPLES = {
    "role": "worker",
    "scheduler_host": "10.0.0.1",
    "scheduler_port": "9000",
    "num_workers": "2",
    "num_servers": "1",
    "worker_id": "0",
}


def role_plan(
    environ: Mapping[str, str], command: Sequence[str], *, visible_gpus: int, cores: int, token: str, port: int
) -> list[ProcessSpec]:
    """The processes of this machine, in the order in which to start them.

    ``token`` is a random word that names this machine's local socket; ``port``: a free one. Raises ConfigurationError
    that names every missing variable, or the malformed one.
    """
    # Only the facts about the machine: with bpslaunch, the number of its ranks is bpslaunch's.
    machine = {"DMLC_NUM_WORKER", "DMLC_WORKER_ID"}
    known = {name: text for name, text in launchers.facts(environ).items() if name in machine}
    environ = {**known, **{name: text for name, text in environ.items() if text}}
    require(environ, "role")
    role = str(_BY_FIELD["role"].parse("DMLC_ROLE", environ["DMLC_ROLE"]))
    if role == "scheduler":
        require(environ, "num_workers", "num_servers", "scheduler_host", "scheduler_port")
        argv = service_argv("scheduler")
        env = {"DMLC_ROLE": role}
        return [
            ProcessSpec(
                "the scheduler",
                ProcessKind.MAIN,
                "scheduler",
                argv,
                env,
                restarts=scheduler_restarts(environ),
                waits_for_address=True,
            )
        ]
    if role == "server":
        require(environ, "num_workers", "num_servers", "scheduler_host", "scheduler_port")
        return [server_spec("the summation service", "ss", {"DMLC_ROLE": role}, kind=ProcessKind.MAIN)]
    return _worker_plan(environ, command, role, visible_gpus or 1, cores, token, port)


def _worker_plan(
    environ: Mapping[str, str], command: Sequence[str], role: str, default_size: int, cores: int, token: str, port: int
) -> list[ProcessSpec]:
    alone = _value(environ, "num_workers") == "1" and _value(environ, "num_servers") in ("", "0")
    if alone:
        # One machine needs no scheduler, and so not its address.
        environ = {"DMLC_WORKER_ID": "0", "DMLC_NUM_SERVER": "0", **environ}
    else:
        require(environ, "num_workers", "num_servers", "worker_id", "scheduler_host", "scheduler_port")
    size = environ.get("BYTEPS_LOCAL_SIZE") or str(default_size)
    settings = Settings.from_env({**environ, "BYTEPS_LOCAL_SIZE": size, "BYTEPS_LOCAL_RANK": "0"})
    env = {
        "DMLC_ROLE": "worker",
        "DMLC_NUM_WORKER": str(settings.num_workers),
        "DMLC_NUM_SERVER": str(settings.num_servers),
        "DMLC_WORKER_ID": str(settings.worker_id),
        "BYTEPS_LOCAL_SIZE": str(settings.local_size),
    }
    if not settings.job_id and not settings.scheduler_address:
        env["BYTEPS_JOB_ID"] = token
    where = f" of machine {settings.worker_id}" if settings.num_workers > 1 else ""
    specs = services(settings, env, token, where, label="")
    if role == "joint" and settings.num_servers >= settings.num_workers:
        # BytePS's joint role: one of the DMLC_NUM_SERVER servers lives on this machine.
        server_env = {**env, "DMLC_ROLE": "server"}
        specs.insert(0, server_spec("the summation service of a CPU machine", "ss-cpu", server_env))
    many = settings.num_workers > 1
    meeting = _torch_address(settings) if many else ("127.0.0.1", port)
    kept = {} if settings.local_size > 1 else {name: environ[name] for name in _PLACE if environ.get(name)}
    for local_rank in range(settings.local_size):
        place = (local_rank, settings.local_size, settings.worker_id, settings.num_workers)
        place_variables = {**torch_variables(*place, *meeting, environ), **kept}
        place_variables |= {} if many else horovod_variables(*place)
        specs.append(
            rank_spec(
                f"local rank {local_rank}{where}" if many else f"rank {local_rank}",
                f"{settings.worker_id}.{local_rank}" if many else str(local_rank),
                command,
                {**env, **place_variables, **_socket(token)},
                local_rank,
                reads_stdin=local_rank == 0,
                threads=str(environ.get("OMP_NUM_THREADS") or max(1, cores // settings.local_size)),
            )
        )
    return specs


def scheduler_restarts(environ: Mapping[str, str]) -> int:
    """How often a killed scheduler is started again: only with a journal can it resume the job."""
    return 0 if environ.get("BYTEPS_JOURNAL_DIR") == "none" else _SCHEDULER_RESTARTS


def server_spec(
    name: str, label: str, env: Mapping[str, str], *arguments: str, kind: ProcessKind = ProcessKind.SERVICE
) -> ProcessSpec:
    """A summation service. When it dies, others take over its work, and it is started again to take its share back."""
    return ProcessSpec(
        name,
        kind,
        label,
        service_argv("server", *arguments),
        env,
        is_replaceable=kind is ProcessKind.SERVICE,  # alone under a launcher it is the whole job
        restarts=_SERVER_RESTARTS,
        again_status=GIVEN_UP_STATUS,
    )


def services(settings: Settings, env: Mapping[str, str], token: str, where: str, label: str) -> list[ProcessSpec]:
    """The services of a GPU machine: its CS, and its SS where the placement gives it a share."""
    if settings.is_alone:
        return []
    env = {**env, **_socket(token)}
    specs = []
    if settings.gpu_machines_sum:
        name = f"the summation service{where}"
        specs.append(server_spec(name, f"ss{label}", env, "--gpu-machine"))
    # It stays as long as the launcher: ranks may shut down and initialize again.
    argv = service_argv("worker", "--stay")
    name = f"the communication service{where}"
    specs.append(ProcessSpec(name, ProcessKind.SERVICE, f"cs{label}", argv, env, is_dismissed=True))
    return specs


def horovod_variables(local_rank: int, local_size: int, machine: int, machines: int) -> dict[str, str]:
    """The variables that horovodrun sets for a rank, for scripts that read them. All machines have as many ranks.

    >>> horovod_variables(1, 2, 1, 3)["HOROVOD_RANK"]
    '3'
    """
    return {
        "HOROVOD_RANK": str(machine * local_size + local_rank),
        "HOROVOD_SIZE": str(machines * local_size),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(local_size),
        "HOROVOD_CROSS_RANK": str(machine),
        "HOROVOD_CROSS_SIZE": str(machines),
    }


def torch_variables(
    local_rank: int, local_size: int, machine: int, machines: int, host: str, port: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """The variables that torchrun sets for a rank, for ``init_process_group`` with its usual init_method ``env://``:
    rank 0 listens at ``host`` and ``port``, unless ``environ`` has another address. All machines have as many ranks.

    >>> torch_variables(1, 2, 1, 3, "10.0.0.1", 8999, {})["RANK"]
    '3'
    """
    return {
        "RANK": str(machine * local_size + local_rank),
        "WORLD_SIZE": str(machines * local_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or host,
        "MASTER_PORT": environ.get("MASTER_PORT") or str(port),
    }


def _torch_address(settings: Settings) -> tuple[str, int]:
    """The address for torch.distributed, which all machines derive from the scheduler's: that host, and the port
    before. The first machine is expected to run the scheduler. Under torchrun it is the other way round: the
    scheduler's port follows from MASTER_PORT."""
    port = settings.scheduler_port
    return settings.scheduler_host, port - 1 if port > 1 else port + 1


def rank_spec(
    name: str,
    label: str,
    command: Sequence[str],
    env: Mapping[str, str],
    local_rank: int,
    *,
    reads_stdin: bool,
    threads: str,
) -> ProcessSpec:
    """A training process. ``label``: see ProcessSpec; ``threads``: the value of OMP_NUM_THREADS."""
    env = {**env, "BYTEPS_LOCAL_RANK": str(local_rank), "OMP_NUM_THREADS": threads}
    return ProcessSpec(name, ProcessKind.MAIN, label, tuple(command), env, reads_stdin)


def require(environ: Mapping[str, str], *wanted: str) -> None:
    """Raises ConfigurationError that explains each of the ``wanted`` settings that no variable sets."""
    missing = [_BY_FIELD[field] for field in wanted if not _value(environ, field)]
    if not missing:
        return
    # The default in the meaning is for processes that are started without a role.
    meanings = [v.meaning.partition("; default:")[0] for v in missing]
    lines = [
        f"  {v.names[0]:<18} {meaning} (for example {_EXAMPLES[v.field]}); {v.allowed()}"
        for v, meaning in zip(missing, meanings, strict=True)
    ]
    noun = "a variable that is not set" if len(missing) == 1 else f"{len(missing)} variables that are not set"
    role = f" with DMLC_ROLE={environ['DMLC_ROLE']}" if environ.get("DMLC_ROLE") else ""
    raise ConfigurationError("\n".join([f"bpslaunch{role} needs {noun}:", *lines]))


def _value(environ: Mapping[str, str], field: str) -> str:
    """The value of this setting's first variable that is set; empty if none is."""
    return next((environ[name].strip() for name in _BY_FIELD[field].names if environ.get(name)), "")


def _socket(token: str) -> dict[str, str]:
    return {"BYTEPS_SOCKET_NAME": f"byteps-{token}-cs"}
