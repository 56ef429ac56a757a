"""The processes that a machine, or an emulated cluster, runs: the environment goes in, descriptions of processes come
out.

``role_plan``: one machine, as DMLC_ROLE and its companion variables describe it. ``cluster_plan``: a whole cluster on
this host's loopback, which ``bpslaunch -np RANKS --machines N --servers K`` starts. Each emulated machine has its own
BYTEPS_MACHINE_ID, and otherwise the variables that a user who starts it by hand would set.

Pure, except ``free_port``. Any thread.
"""

from __future__ import annotations

import enum
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from byteps_py.config import launchers
from byteps_py.config.addresses import is_loopback
from byteps_py.config.settings import METRICS_PORTS, Settings
from byteps_py.config.variables import VARIABLES
from byteps_py.errors import ConfigurationError, RendezvousError
from byteps_py.wire.launch_protocol import GIVEN_UP_STATUS, NO_JOURNAL_STATUS, UNUSABLE_STATUS

#: Not for ever: a scheduler that dies this often is killed by something that does not stop.
_SCHEDULER_RESTARTS = 1000
_SERVER_RESTARTS = 1000  # spare CPU machines may be taken away and given back many times
_BY_FIELD = {variable.field: variable for variable in VARIABLES}
#: The number of ranks of each machine, in order, separated by commas; where one launcher starts all of them.
RANK_COUNTS_VARIABLE = "BYTEPS_LAUNCH_RANK_COUNTS"
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
_TRIES = 200


class ProcessKind(enum.Enum):
    """The kind of a process, which says what its end means for the job."""

    MAIN = "main"  # the job is over when all of these have ended; their exit codes decide the launcher's
    SERVICE = "service"  # serves the others; exits by itself when they have left


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to start. ``env`` holds only the differences from the launcher's own environment; an empty value
    counts as unset. ``label`` is short, for prefixes and file names."""

    name: str
    kind: ProcessKind
    label: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    reads_stdin: bool = False
    is_dismissed: bool = False  # a service that stays until it gets SIGTERM, once all ranks have ended
    is_vital: bool = True  # a service without which the ranks can't go on for long
    is_replaceable: bool = False  # a service whose work others take over
    restarts: int = 0  # how often it is started again if a signal killed it while the ranks ran
    is_rank: bool = False
    is_restarted_on_failure: bool = False  # … or if it ended with any other exit status than 0
    again_status: int | None = None  # … or if it ended with this exit status
    waits_for_address: bool = False  # … or, from the second time on, if it can't use its address
    retry_status: int | None = None  # this exit status, before any other process ended: start the whole job over
    hopeless_status: int | None = None  # … and this one: the job can't begin, now or later
    task: bytes | None = field(default=None, repr=False)  # of a launcher on a host, over its standard input
    lost_status: int | None = None  # this exit status: there is no connection to that host, or none any more
    is_spare: bool = False  # a host that waits for the place of another one


def _service_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a program of this package. ``-P``: files in the user's folder must not shadow its
    modules."""
    return (sys.executable, "-P", "-m", f"byteps_py.{module}", *arguments)


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
    _require(environ, "role")
    role = str(_BY_FIELD["role"].parse("DMLC_ROLE", environ["DMLC_ROLE"]))
    if role == "scheduler":
        _require(environ, "num_workers", "num_servers", "scheduler_host", "scheduler_port")
        restarts, argv, env = _scheduler_restarts(environ), _service_argv("scheduler"), {"DMLC_ROLE": role}
        kind = ProcessKind.MAIN
        return [ProcessSpec("the scheduler", kind, "scheduler", argv, env, restarts=restarts, waits_for_address=True)]
    if role == "server":
        _require(environ, "scheduler_host", "scheduler_port")
        return [_server_spec("the summation service", "ss", {"DMLC_ROLE": role}, kind=ProcessKind.MAIN)]
    return _worker_plan(environ, command, role, visible_gpus or 1, cores, token, port)


def _worker_plan(
    environ: Mapping[str, str], command: Sequence[str], role: str, default_size: int, cores: int, token: str, port: int
) -> list[ProcessSpec]:
    alone = _value(environ, "num_workers") == "1" and _value(environ, "num_servers") in ("", "0")
    if alone:
        # One machine needs no scheduler, and so not its address.
        environ = {"DMLC_WORKER_ID": "0", "DMLC_NUM_SERVER": "0", **environ}
    else:
        _require(environ, "num_workers", "num_servers", "worker_id", "scheduler_host", "scheduler_port")
    counts = _rank_counts(environ)
    own = _own_count(counts, environ)
    size = own or environ.get("BYTEPS_LOCAL_SIZE") or str(default_size)
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
    many = settings.num_workers > 1
    where = f" of machine {settings.worker_id}" if many else ""
    specs = _services(settings, env, token, where, label="")
    if role == "joint" and settings.num_servers >= settings.num_workers:
        # BytePS's joint role: one of the DMLC_NUM_SERVER servers lives on this machine.
        server_env = {**env, "DMLC_ROLE": "server"}
        specs.insert(0, _server_spec("the summation service of a CPU machine", "ss-cpu", server_env))
    if settings.worker_id == 0:
        specs += _borrower(settings, env)
    meeting = _torch_address(settings) if many else ("127.0.0.1", port)
    kept = {} if settings.local_size > 1 else {name: environ[name] for name in _PLACE if environ.get(name)}
    env |= {
        **_socket(token),
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS") or str(max(1, cores // settings.local_size)),
    }
    are_known = bool(counts) or not many
    for local_rank in range(settings.local_size):
        place = RankNumbers.of_equal(settings.num_workers, settings.local_size, settings.worker_id, local_rank)
        if counts:
            place = RankNumbers.among(counts, settings.worker_id, local_rank)
        rank_env = {**env, "BYTEPS_LOCAL_RANK": str(local_rank), **_torch_variables(place, *meeting, environ), **kept}
        rank_env |= _horovod_variables(place) if are_known else {}
        name = f"rank {place.rank}" if are_known else f"local rank {local_rank}{where}"
        label = str(place.rank) if are_known else f"{settings.worker_id}.{local_rank}"
        specs.append(_rank_spec(name, label, command, rank_env, local_rank == 0, settings))
    return specs


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """``ranks``: of each GPU machine; ``servers``: CPU machines."""

    ranks: int
    machines: int
    servers: int


def cluster_plan(
    environ: Mapping[str, str],
    command: Sequence[str],
    size: ClusterSize,
    *,
    port: int,
    torch_port: int,
    cores: int,
    token: str,
) -> list[ProcessSpec]:
    """The processes of the cluster in the order in which to start them; ranks are numbered machine by machine.

    ``port``: for the scheduler; ``torch_port``: for torch.distributed, if it is used. ``token`` is a random word, the
    job's id. Raises ConfigurationError.
    """
    ranks, machines, servers = size.ranks, size.machines, size.servers
    common = {
        "DMLC_NUM_WORKER": str(machines),
        "DMLC_NUM_SERVER": str(servers),
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "BYTEPS_INTERFACES": _loopback_only(environ.get("BYTEPS_INTERFACES", "")),
        "BYTEPS_JOB_ID": token,
    }
    threads = environ.get("OMP_NUM_THREADS") or str(max(1, cores // (ranks * machines)))
    specs: list[ProcessSpec] = []
    gpu_machine_services: list[ProcessSpec] = []
    rank_specs: list[ProcessSpec] = []
    for machine in range(machines):
        env = {
            **common,
            "DMLC_ROLE": "worker",
            "DMLC_WORKER_ID": str(machine),
            "BYTEPS_MACHINE_ID": f"m{machine}",
            "BYTEPS_LOCAL_SIZE": str(ranks),
            **_metrics_port(environ, size, machine),
        }
        settings = Settings.from_env({**environ, **env, "BYTEPS_LOCAL_RANK": "0"})
        if settings.is_alone:
            common.update(DMLC_PS_ROOT_URI="", DMLC_PS_ROOT_PORT="")
            env.update(common)
        socket_token = f"{token}-m{machine}"
        where = f" of machine m{machine}" if machines > 1 else ""
        label = f"-m{machine}" if machines > 1 else ""
        own_services = _services(settings, env, socket_token, where, label)
        gpu_machine_services += own_services
        env |= {**(_socket(socket_token) if own_services else {}), "OMP_NUM_THREADS": threads}
        for local_rank in range(ranks):
            rank, place = len(rank_specs), RankNumbers.of_equal(machines, ranks, machine, local_rank)
            rank_env = {**env, "BYTEPS_LOCAL_RANK": str(local_rank)}
            rank_env |= _horovod_variables(place) | _torch_variables(place, "127.0.0.1", torch_port, {})
            name = f"rank {rank}{f' (local rank {local_rank}{where})' if machines > 1 else ''}"
            rank_specs.append(_rank_spec(name, str(rank), command, rank_env, rank == 0, settings))
    if gpu_machine_services:
        scheduler = scheduler_spec(environ, {**common, "BYTEPS_MACHINE_ID": "m0"})
        specs.append(replace(scheduler, retry_status=UNUSABLE_STATUS))
        specs += _borrower(settings, common)
    for index in range(servers):
        # It ends with the cluster: no restarted job finds it.
        env = {**common, "DMLC_ROLE": "server", "BYTEPS_MACHINE_ID": f"c{index}", "BYTEPS_SHADOW_KEEP_S": "0"}
        env |= _metrics_port(environ, size, machines + index)
        name = f"the summation service of CPU machine c{index}"
        specs.append(_server_spec(name, f"ss-c{index}", env))
    return [*specs, *gpu_machine_services, *rank_specs]


def _loopback_only(interfaces: str) -> str:
    """Emulated machines talk over loopback: several of its addresses may stand for network cards, others are unset."""
    return interfaces if all(is_loopback(entry.strip()) for entry in interfaces.split(",")) else ""


def _metrics_port(environ: Mapping[str, str], size: ClusterSize, machine: int) -> dict[str, str]:
    """Emulated machines share the host's ports: each has its own of those that its metrics need."""
    first = environ.get("BYTEPS_METRICS_PORT", "").strip()
    if not machine or not first.isdecimal() or not int(first):  # what is no number is refused elsewhere
        return {}
    return {"BYTEPS_METRICS_PORT": str(int(first) + machine * (METRICS_PORTS + size.ranks))}


# ---- what both plans are made of ----------------------------------------------------------------------------------


def _rank_spec(
    name: str, label: str, command: Sequence[str], env: Mapping[str, str], reads_stdin: bool, settings: Settings
) -> ProcessSpec:
    """A rank. With BYTEPS_MAX_RESTARTS it is started again when it fails, and takes its place."""
    return ProcessSpec(
        name,
        ProcessKind.MAIN,
        label,
        tuple(command),
        env,
        reads_stdin,
        is_rank=True,
        restarts=settings.max_restarts,
        is_restarted_on_failure=settings.max_restarts > 0,
    )


def _scheduler_restarts(environ: Mapping[str, str]) -> int:
    """The number of times that a killed scheduler is started again: only with a journal can it resume the job."""
    return 0 if environ.get("BYTEPS_JOURNAL_DIR") == "none" else _SCHEDULER_RESTARTS


def scheduler_spec(environ: Mapping[str, str], env: Mapping[str, str]) -> ProcessSpec:
    """The scheduler, beside other processes of the job. ``env``: for this process."""
    return ProcessSpec(
        "the scheduler",
        ProcessKind.SERVICE,
        "scheduler",
        _service_argv("scheduler"),
        {**env, "DMLC_ROLE": "scheduler"},
        is_vital=False,
        restarts=_scheduler_restarts(environ),
        waits_for_address=True,
        hopeless_status=NO_JOURNAL_STATUS,
    )


def _server_spec(
    name: str, label: str, env: Mapping[str, str], *arguments: str, kind: ProcessKind = ProcessKind.SERVICE
) -> ProcessSpec:
    """A summation service. When it dies, others take over its work, and it is started again to take its share back."""
    return ProcessSpec(
        name,
        kind,
        label,
        _service_argv("server", *arguments),
        env,
        is_replaceable=kind is ProcessKind.SERVICE,  # alone under a launcher it is the whole job
        restarts=_SERVER_RESTARTS,
        again_status=GIVEN_UP_STATUS,
    )


def _services(settings: Settings, env: Mapping[str, str], token: str, where: str, label: str) -> list[ProcessSpec]:
    """The services of a GPU machine: its CS, and its SS where the placement gives it a share."""
    if settings.is_alone:
        return []
    env = {**env, **_socket(token)}
    specs = []
    if settings.gpu_machines_sum:
        name = f"the summation service{where}"
        specs.append(_server_spec(name, f"ss{label}", env, "--gpu-machine"))
    # It stays as long as the launcher: ranks may shut down and initialize again.
    argv = _service_argv("worker", "--stay")
    name = f"the communication service{where}"
    restarts = settings.max_restarts
    specs.append(
        ProcessSpec(
            name, ProcessKind.SERVICE, f"cs{label}", argv, env, is_dismissed=True, restarts=restarts,
            is_restarted_on_failure=restarts > 0,
        )
    )  # fmt: skip
    return specs


def _borrower(settings: Settings, env: Mapping[str, str]) -> list[ProcessSpec]:
    """With BYTEPS_POOL, the process that asks the pool for servers. Raises ConfigurationError without a secret."""
    if not settings.pool or settings.is_alone:
        return []
    if not settings.secret:
        raise ConfigurationError(
            "BYTEPS_POOL (--pool) needs the cluster secret of the pool and its lenders: set BYTEPS_SECRET or "
            "BYTEPS_SECRET_FILE"
        )
    name, argv = "the process that asks the pool for servers", _service_argv("lending.borrow")
    return [ProcessSpec(name, ProcessKind.SERVICE, "pool", argv, dict(env), is_dismissed=True, is_vital=False)]


@dataclass(frozen=True, slots=True)
class RankNumbers:
    """A rank among all. ``first_rank``: of its machine; ``size``: number of all ranks.

    >>> RankNumbers.among([4, 2], 1, 1)
    RankNumbers(local_rank=1, local_size=2, machine=1, machines=2, first_rank=4, size=6)
    """

    local_rank: int
    local_size: int
    machine: int
    machines: int
    first_rank: int
    size: int

    @classmethod
    def among(cls, counts: Sequence[int], machine: int, local_rank: int) -> RankNumbers:
        """``counts``: the number of ranks of each machine."""
        return cls(local_rank, counts[machine], machine, len(counts), sum(counts[:machine]), sum(counts))

    @classmethod
    def of_equal(cls, machines: int, local_size: int, machine: int, local_rank: int) -> RankNumbers:
        """All machines have ``local_size`` ranks."""
        return cls(local_rank, local_size, machine, machines, machine * local_size, machines * local_size)

    @property
    def rank(self) -> int:
        return self.first_rank + self.local_rank


def _horovod_variables(place: RankNumbers) -> dict[str, str]:
    """The variables that horovodrun sets for a rank, for scripts that read them.

    >>> _horovod_variables(RankNumbers.of_equal(3, 2, 1, 1))["HOROVOD_RANK"]
    '3'
    """
    return {
        "HOROVOD_RANK": str(place.rank),
        "HOROVOD_SIZE": str(place.size),
        "HOROVOD_LOCAL_RANK": str(place.local_rank),
        "HOROVOD_LOCAL_SIZE": str(place.local_size),
        "HOROVOD_CROSS_RANK": str(place.machine),
        "HOROVOD_CROSS_SIZE": str(place.machines),
    }


def _torch_variables(place: RankNumbers, host: str, port: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun sets for a rank, for ``init_process_group`` with its usual init_method ``env://``:
    rank 0 listens at ``host`` and ``port``, unless ``environ`` has another address.

    >>> _torch_variables(RankNumbers.of_equal(3, 2, 1, 1), "10.0.0.1", 8999, {})["RANK"]
    '3'
    """
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or host,
        "MASTER_PORT": environ.get("MASTER_PORT") or str(port),
    }


def _rank_counts(environ: Mapping[str, str]) -> list[int]:
    """The ranks of each machine, if one launcher has started all of them; else empty."""
    return [int(text) for text in environ.get(RANK_COUNTS_VARIABLE, "").split(",") if text.isdigit()]


def _own_count(counts: Sequence[int], environ: Mapping[str, str]) -> str:
    """The ranks of this machine, which may be a spare one that has just got its number; empty if they are not known."""
    number = _value(environ, "worker_id")
    return str(counts[int(number)]) if counts and number.isdigit() and int(number) < len(counts) else ""


def _torch_address(settings: Settings) -> tuple[str, int]:
    """The address for torch.distributed, which all machines derive from the scheduler's: that host, and the port
    before. The first machine is expected to run the scheduler. Under torchrun it is the other way round: the
    scheduler's port follows from MASTER_PORT."""
    port = settings.scheduler_port
    return settings.scheduler_host, port - 1 if port > 1 else port + 1


def _require(environ: Mapping[str, str], *wanted: str) -> None:
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


def free_port(taken: int = 0) -> int:
    """A free loopback port, other than ``taken``, below the range from which the system assigns ports.

    So only a program that asks for this very port can take it before the scheduler does; then the launcher starts over.
    Raises RendezvousError if it finds none.
    """
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    low, high = (16384, first_ephemeral) if first_ephemeral > 18000 else (32768, 65536)
    for _ in range(_TRIES):
        port = random.SystemRandom().randrange(low, high)
        if port == taken:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue  # the port is in use
        return port
    raise RendezvousError(f"no free loopback port found among {_TRIES} tried between {low} and {high}")
